"""What nafi promises of any network, one step after the other.

Hides: random weights that leave nothing constant, the precision, what each step compares. Promises:
a record of plain values for every network, whatever happens: a step that fails leaves its error.
"""

from __future__ import annotations

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir
from dataclasses import dataclass
from functools import cached_property
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import nafi
from nafi.errors import NafiError
from nafi.fusion import Networks
from nafi.graph import Inputs, ModelSpec, call, named_tensors, permute
from nafi.graph.check import convert_inputs, difference, run
from nafi.graph.permute import random_permutations
from tests.fusion.apart import prepared, shared_groups, side_by_side
from tests.support.networks import Network

Record = dict[str, Any]
# The largest difference that counts as rounding, relative to the largest output.
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}


def in_general_position(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """The same network with weights that all matter.

    Matrices get the scale that keeps signals alive, so that no error hides in weights of 0.02.
    What is constant, as norms and their statistics after initialisation, becomes random, but not
    what a file does not hold.
    """
    with torch.no_grad():
        for tensor in dict.fromkeys(named_tensors(model).values()):
            if tensor.is_floating_point() and tensor.numel() > 1:
                tensor.copy_(_enlivened(tensor, generator))
    return model


def _enlivened(tensor: Tensor, generator: torch.Generator) -> Tensor:
    first = tensor.flatten()[0]
    if bool((tensor == first).all()):
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return torch.exp(0.3 * noise) if first != 0 else 0.3 * noise
    if tensor.ndim < 2 or not isinstance(tensor, nn.Parameter):
        return tensor
    size = tensor.square().mean().sqrt()
    return tensor * (2 * tensor.shape[0] / tensor.numel()) ** 0.5 / size


@dataclass(frozen=True, eq=False)
class Subject:
    """Two independent models of one network, in the highest precision that it runs in."""

    network: Network
    one: nn.Module
    other: nn.Module
    inputs: Inputs
    dtype: torch.dtype

    @staticmethod
    def of(network: Network) -> Subject:
        for dtype in TOLERANCE:
            generator = torch.Generator().manual_seed(1)
            one, other = (
                in_general_position(network.build(seed).to(dtype), generator) for seed in (0, 1)
            )
            inputs = convert_inputs(network.inputs(), dtype, generator)
            try:
                call(one, inputs)  # as it is; `run` lets nothing be computed in less than double
            except Exception:
                if dtype is torch.float32:
                    raise
                continue
            outputs = run(one, inputs)
            assert all(t.isfinite().all() for t in outputs), "the network returns infinite numbers"
            return Subject(network, one, other, inputs, dtype)
        raise AssertionError

    @cached_property
    def spec(self) -> ModelSpec:
        """The groups, self-tested."""
        return nafi.groups(self.one, self.inputs)

    @cached_property
    def pair(self) -> Networks:
        return prepared([self.one, self.other], self.inputs, self.spec)

    @cached_property
    def shared(self) -> list[str]:
        return shared_groups(self.pair)

    def gap(self, model: nn.Module, *expected: nn.Module) -> float:
        """The difference of a model to the mean of others."""
        outputs = zip(*(run(one, self.inputs) for one in expected), strict=True)
        wanted = [sum(each) / len(each) for each in outputs]  # type: ignore[arg-type]
        return difference(run(model, self.inputs), wanted)

    def agrees(self, gap: float) -> bool:
        return gap < TOLERANCE[self.dtype]


def traced(subject: Subject) -> Record:
    """`nafi.groups` with its self-test."""
    spec, state = subject.spec, named_tensors(subject.one)
    share = round(spec.coverage(state), 4)
    return {
        "traced": True,
        "groups": len(spec.groups),
        "coverage": share,
        "left": left(spec, state),
    }


def left(spec: ModelSpec, state: Mapping[str, Tensor]) -> str:
    """What keeps the most numbers out of all groups, or their tensors from being covered."""
    numbers: Counter[str] = Counter()
    for pin in spec.pinned:
        if pin.op is not None or not spec.tensors[pin.tensor].groups:
            numbers[short(pin.reason)] += state[pin.tensor].numel()
    return next((reason for reason, _ in numbers.most_common(1)), "")


def permuted(subject: Subject) -> Record:
    """All groups in another order: the same function."""
    orders = random_permutations(subject.spec, torch.Generator().manual_seed(2))
    gap = subject.gap(permute(subject.one, subject.spec, orders), subject.one)
    return {"permuted": subject.agrees(gap), "permuted_gap": gap}


def copies(subject: Subject) -> Record:
    """Two permuted copies fuse back into the network."""
    generator = torch.Generator().manual_seed(3)
    models = [
        permute(subject.one, subject.spec, random_permutations(subject.spec, generator))
        for _ in range(2)
    ]
    found = nafi.fuse(models, subject.inputs, spec=subject.spec, prior_ratio=100.0)
    gap = subject.gap(found.model, subject.one)
    return {"copies": subject.agrees(gap), "copies_gap": gap}


def grows(subject: Subject) -> Record:
    """The groups whose width can change."""
    return {"grows": len(subject.pair.spec.groups) - len(subject.shared)}


def apart(subject: Subject) -> Record:
    """Two models with no neuron in common: the mean of the outputs.

    Neurons that have to be shared are averaged, which is no mean of outputs; then the same is asked
    of two equal models.
    """
    gap = subject.gap(side_by_side(subject.pair, subject.shared), subject.one, subject.other)
    if subject.agrees(gap):
        return {"apart": True, "apart_gap": gap, "independent": True}
    equal = prepared([subject.one, subject.one], subject.inputs, subject.spec)
    again = subject.gap(side_by_side(equal, subject.shared), subject.one)
    found = {"apart": subject.agrees(again), "apart_gap": again, "independent": False}
    return {**found, "independent_gap": gap, "shared": len(subject.shared)}


def loads(subject: Subject) -> Record:
    """What two independent models fuse into, saved and loaded.

    One sweep of matching gives every group a width of its own, which is all that matters here.
    """
    models = [subject.one, subject.other]
    found = nafi.fuse(models, subject.inputs, spec=subject.spec, sweeps=1)
    grown = sum(found.widths[name] > g.width for name, g in subject.spec.groups.items())
    with TemporaryDirectory() as folder, chdir(folder):  # errors name the file
        nafi.save(found, "fused.safetensors", example_inputs=subject.inputs)
        loaded = nafi.load("fused.safetensors", factory=subject.network.build)
    gap = subject.gap(loaded, found.model)
    return {"loads": subject.agrees(gap), "loads_gap": gap, "grown": grown}


STEPS: list[Callable[[Subject], Record]] = [traced, permuted, copies, grows, apart, loads]


def examine(network: Network) -> Iterator[Record]:
    """What is known of a network after each step; without groups nothing more can be asked.

    Seconds are those of the processor: other work on the machine does not count.
    """
    record = blank(network)
    yield record
    subject = Subject.of(network)
    record["parameters"] = sum(p.numel() for p in subject.one.parameters())
    record["precision"] = str(subject.dtype).removeprefix("torch.")
    for step in STEPS:
        begun = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            record |= attempt(step, subject, record)
        record["seconds"][step.__name__] = round(time.process_time() - begun, 2)
        yield record
        if not record["traced"]:
            return


def blank(network: Network) -> Record:
    """The record of a network of which nothing is known."""
    checks = {step.__name__: False for step in STEPS}
    head = {"network": network.label, "transformer": network.transformer}
    return {**head, **checks, "errors": [], "seconds": {}}


def failed(record: Record, step: str, error: str, text: str, *, foreign: bool = True) -> None:
    """Add an error to a record."""
    found = {"step": step, "error": error, "text": short(text), "foreign": foreign}
    record["errors"].append(found)


def short(text: str) -> str:
    """The beginning of a text, and files of it without the folders of this machine."""
    return re.sub(r"(/[^\s/()]+)+/(?=[^\s/()]+\.py)", "", text)[:300]


def attempt(step: Callable[[Subject], Record], subject: Subject, record: Record) -> Record:
    """What a step finds; an error is noted instead."""
    try:
        return step(subject)
    except Exception as error:
        first = next(iter(str(error).splitlines()), "")
        foreign = not isinstance(error, NafiError)
        failed(record, step.__name__, type(error).__name__, first, foreign=foreign)
        return {}
