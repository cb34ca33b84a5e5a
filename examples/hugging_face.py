"""Three small DistilBERTs of transformers, each trained on other roles of plays, and fused.

    python examples/hugging_face.py              # a minute or two; TinyShakespeare under NAFI_DATA
    python examples/hugging_face.py --seeds 3    # mean and spread
    python examples/hugging_face.py --quick      # a few steps, to see that it runs

The task is masked language modelling: the vowels of 16 characters are hidden. Each client has four
roles. Prints accuracy and loss on text of all twelve on which nobody trained: of each client, their
ensemble, the mean of their weights (`fedavg`), and nafi at the size of one client, without and with
a probe of 256 unlabelled texts of other roles. Clients start from

- one trained model, as when a model is fine-tuned,
- the same random weights, or
- random weights of their own.

At the end `nafi fuse a/ b/ c/ --out fused/` does the last of these with folders, and
`from_pretrained` reads what it wrote.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import DistilBertConfig, DistilBertForMaskedLM
from transformers.utils import logging

import nafi
from nafi.experiments.text import CHARACTERS, Role, roles

CLIENTS, ROLES, LENGTH, PROBE, BATCH = 3, 12, 16, 256, 32
VOWELS = torch.tensor([CHARACTERS.index(vowel) for vowel in "aeiou"])
MASK = len(CHARACTERS)
NOTHING = -100  # what the loss leaves out
STARTS = ("one trained model", "the same random weights", "random weights of their own")


@dataclass(frozen=True)
class Texts:
    """masked: (M, LENGTH) characters' numbers; hidden: what the masked ones are."""

    masked: Tensor
    hidden: Tensor


def cut(parts: Sequence[Tensor]) -> Texts:
    """Characters as short texts whose vowels are masked."""
    short = torch.cat([part[: len(part) // LENGTH * LENGTH].reshape(-1, LENGTH) for part in parts])
    is_vowel = torch.isin(short, VOWELS)
    return Texts(torch.where(is_vowel, MASK, short), torch.where(is_vowel, short, NOTHING))


def training_texts(some: Sequence[Role]) -> Texts:
    return cut([role.parts[0] for role in some])


def random_model(seed: int) -> DistilBertForMaskedLM:
    torch.manual_seed(seed)
    sizes = {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "initializer_range": 0.1}
    words = {"vocab_size": MASK + 1, "max_position_embeddings": LENGTH}
    return DistilBertForMaskedLM(
        DistilBertConfig(**sizes, **words, dropout=0.0, attention_dropout=0.0)
    )


def train(model: nn.Module, texts: Texts, seed: int, steps: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW(model.parameters(), 0.003)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.003, steps)
    model.train()
    for _ in range(steps):
        drawn = torch.randint(len(texts.masked), (BATCH,), generator=generator)
        said = model(texts.masked[drawn]).logits
        optimiser.zero_grad()
        F.cross_entropy(said.flatten(0, 1), texts.hidden[drawn].flatten()).backward()
        optimiser.step()
        schedule.step()
    return model.eval()


def train_clients(start: str, seed: int, steps: int) -> list[nn.Module]:
    """One model for each client."""
    first, everyone = random_model(seed), roles()
    if start == STARTS[0]:
        train(first, training_texts(everyone[2 * ROLES :]), seed, steps)
        steps = steps * 3 // 10
    models = []
    for client in range(CLIENTS):
        model = random_model(1000 * (client + 1) + seed)
        if start != STARTS[2]:
            model.load_state_dict(first.state_dict())
        mine = training_texts(everyone[client:ROLES:CLIENTS])
        models.append(train(model, mine, seed + client, steps))
    return models


def score(models: Sequence[nn.Module], texts: Texts) -> Tensor:
    """Accuracy in percent and loss; of several models, those of their mean probabilities."""
    with torch.no_grad():
        said = torch.stack([model(texts.masked).logits.softmax(dim=-1) for model in models])
    mean, known = said.mean(dim=0).log(), texts.hidden != NOTHING
    right = mean.argmax(dim=-1)[known] == texts.hidden[known]
    loss = F.nll_loss(mean[known], texts.hidden[known])
    return torch.stack([100 * right.double().mean(), loss.double()])


def probe_texts() -> Tensor:
    """Texts of roles that no client has, without what is hidden."""
    masked = training_texts(roles()[ROLES : 2 * ROLES]).masked
    return masked[torch.randperm(len(masked), generator=torch.Generator().manual_seed(0))[:PROBE]]


def rows_of(models: Sequence[nn.Module], test: Texts) -> dict[str, Tensor]:
    """Accuracy and loss of everything that can be made of these models."""
    alone = torch.stack([score([model], test) for model in models])
    example = {"input_ids": test.masked[:2]}
    ways = {
        "mean of weights (fedavg)": {"method": "fedavg"},
        "nafi": {"max_width": 1.0},
        "nafi with a probe": {"max_width": 1.0, "probe": {"input_ids": probe_texts()}},
    }
    fused = {name: nafi.fuse(models, example, **options) for name, options in ways.items()}
    return {
        "one client, mean": alone.mean(dim=0),
        "one client, best": alone[alone[:, 1].argmin()],
        "ensemble": score(models, test),
        **{name: score([result.model], test) for name, result in fused.items()},
    }


def fuse_folders(models: Sequence[nn.Module], folder: Path) -> DistilBertForMaskedLM:
    """What the command line makes of folders, read by transformers alone."""
    names = "abc"[: len(models)]
    for name, model in zip(names, models, strict=True):
        model.save_pretrained(folder / name)
    command = [sys.executable, "-m", "nafi", "fuse", *names, "--out", "fused", "--max-width", "1x"]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return DistilBertForMaskedLM.from_pretrained(folder / "fused").eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    steps = 20 if arguments.quick else 1000
    test = cut([role.parts[1] for role in roles()[:ROLES]])
    models: list[nn.Module] = []
    for start in STARTS:
        found = []
        for seed in range(arguments.seeds):
            models = train_clients(start, seed, steps)
            found.append(rows_of(models, test))
        print(f"clients start from {start}:")
        for name in found[0]:
            each = torch.stack([rows[name] for rows in found])
            (accuracy, loss), spread = each.mean(dim=0), each.std(dim=0, correction=0)
            print(
                f"  {name:26} accuracy {accuracy:5.1f} ± {spread[0]:3.1f}  "
                f"loss {loss:.3f} ± {spread[1]:.3f}",
                flush=True,
            )
    with tempfile.TemporaryDirectory() as folder:
        accuracy, loss = score([fuse_folders(models, Path(folder))], test)
    print(f"nafi fuse a/ b/ c/ --out fused/: accuracy {accuracy:.1f}, loss {loss:.3f}")


if __name__ == "__main__":
    main()
