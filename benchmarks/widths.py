"""How long it takes to find out what may grow in large networks, and how much memory.

BERT-base, ViT-B/16 and ResNet-50 as transformers writes them, with random weights. `make bench`
prints a table in Markdown: processor seconds, and the peak of memory over the size of the model,
the model included. The aim is 20 s for BERT-base, and four times the model.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
import warnings
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

import nafi
from nafi.graph import check_spec, growth

T = TypeVar("T")
Network = tuple[nn.Module, tuple[Tensor, ...]]


def bert() -> Network:
    from transformers import BertConfig, BertForSequenceClassification

    return BertForSequenceClassification(BertConfig()), (torch.randint(0, 30000, (2, 64)),)


def vit() -> Network:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(ViTConfig(num_labels=1000)), (torch.randn(1, 3, 224, 224),)


def resnet() -> Network:
    from transformers import ResNetConfig, ResNetForImageClassification

    return ResNetForImageClassification(ResNetConfig(num_labels=1000)), (torch.randn(2, 3, 96, 96),)


def small() -> Network:
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), (torch.randn(2, 5),)


NETWORKS = {"BERT-base": bert, "ViT-B/16": vit, "ResNet-50": resnet}


def peak() -> int:
    """The most memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str) -> str:
    """A row of the table."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    seconds_of(*small())  # loads what torch loads when it is first used
    before = peak()
    model, inputs = NETWORKS[name]()
    model.eval()
    size = sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())
    spec, seconds, changing = seconds_of(model, inputs)
    times = " | ".join(f"{second:.1f}" for second in (*seconds, sum(seconds)))
    count = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    share = (peak() - before) / size
    return f"| {name} | {count:.0f} | {len(spec.groups)} | {changing} | {times} | {share:.1f} |"


def seconds_of(
    model: nn.Module, inputs: tuple[Tensor, ...]
) -> tuple[nafi.ModelSpec, list[float], int]:
    """The groups, the seconds of each step, and how many groups may change their width."""
    derive, spec = timed(lambda: nafi.groups(model, inputs, check=False))
    test, _ = timed(lambda: check_spec(model, inputs, spec))
    search, found = timed(lambda: growth(model, spec))
    return spec, [derive, test, search], len(spec.groups) - len(found.fixed)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def main() -> None:
    print(
        "\n| network | million | groups | may change | groups s | test s | widths s | all s |",
        end="",
    )
    print(" memory |\n" + "| --- " * 9 + "|")
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for row in pool.imap(measure, NETWORKS):
            print(row, flush=True)


if __name__ == "__main__":
    main()
