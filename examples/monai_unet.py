"""A network that nobody here wrote: MONAI's 2-D UNet, trained apart on photos of cars, and fused.

    python examples/monai_unet.py              # some minutes; needs Carvana under NAFI_DATA
    python examples/monai_unet.py --quick      # made-up pictures, a minute

Prints the groups that were found, the dice of each client's own model, of the one-shot fusions, and
of the fused model after a few more rounds.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

import numpy as np
import torch
from monai.networks.nets import UNet
from torch import nn

import nafi
from nafi.experiments.data import carvana
from nafi.experiments.entries import dice
from nafi.experiments.partition import quantity_partition
from nafi.experiments.problems import bce_and_dice
from nafi.federated import Architecture, Samples, Trainer, Training, make_strategy, simulate

CLIENTS = 4


def network(channels: tuple[int, ...] = (8, 16, 32, 64)) -> nn.Module:
    """MONAI's UNet with residual units, as its tutorials have it, but narrow."""
    return UNet(2, 3, 1, channels, strides=(2,) * (len(channels) - 1), num_res_units=2)


def photos() -> tuple[Samples, Samples]:
    data = carvana(96, 64)
    chosen = np.random.default_rng(0).permutation(len(data.train))[:600]
    return data.train[chosen], data.test


def made_up(count: int = 120) -> tuple[Samples, Samples]:
    """Bright discs on a dark ground, and where they are."""
    generator = torch.Generator().manual_seed(0)
    centres = 8 + 16 * torch.rand(count, 2, 1, 1, generator=generator)
    rows, columns = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
    far = (rows - centres[:, 0]) ** 2 + (columns - centres[:, 1]) ** 2
    masks = (far < 40).float().unsqueeze(1)
    noise = 0.3 * torch.randn(count, 3, 32, 32, generator=generator)
    whole = Samples(0.5 * masks + noise, masks)
    return whole[torch.arange(2 * count // 3)], whole[torch.arange(2 * count // 3, count)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    quick = parser.parse_args().quick
    train, test = made_up() if quick else photos()
    factory = partial(network, (4, 8)) if quick else network
    inputs = (torch.zeros(2, *train.inputs.shape[1:]),)

    architecture = Architecture(factory, inputs)
    spec = architecture.spec
    covered = sum(spec.groups[name].width for name in spec.groups)
    print(f"{len(spec.groups)} groups of {covered} neurons; pinned: {len(spec.pinned)}")

    rng = np.random.default_rng(0)
    parts = quantity_partition(len(train), CLIENTS, 2.0, rng)
    shares = {str(s): train[part] for s, part in enumerate(parts)}
    training = Training(epochs=2 if quick else 10, batch=8, optimiser="adam", rate=0.003)
    work = Trainer(architecture, shares, loss=bce_and_dice)

    start = time.perf_counter()
    alone = make_strategy("ot", architecture, training, rounds=1)  # each starts on its own
    state = alone.start()
    updates = [work(name, alone.task(state, name))[0] for name in shares]
    models = [architecture.filled(state.form, update.tensors).eval() for update in updates]
    samples = [len(share) for share in shares.values()]
    print(f"trained for {time.perf_counter() - start:.0f} seconds")
    for name, model in zip(shares, models, strict=True):
        print(f"client {name}, {len(shares[name])} photos: dice {dice(model, test):.1f}")

    counts = {"sample_counts": samples}
    for method, options in {
        "fedavg": counts,
        "ot": {},
        "rebasin": {},
        "pfnm": {**counts, "max_width": 2.0},
        "nafi": {**counts, "max_width": 2.0, "penalty": 0.1},
    }.items():
        result = nafi.fuse(models, inputs, method=method, spec=spec, **options)
        width = sum(result.widths.values()) or covered
        found = dice(result.model, test)
        seconds = result.diagnostics["seconds"]
        print(f"{method} in one shot, {width} neurons, {seconds:.1f} seconds: dice {found:.1f}")

    strategy = make_strategy(
        "match-then-average", architecture, training, rounds=4, max_width=2.0, penalty=0.1
    )
    run = simulate(strategy, list(shares), work, evaluate=lambda m: {"dice": dice(m, test)})
    for record in run.records:
        print(f"nafi, then averaged, round {record['round']}: dice {record['dice']:.1f}")


if __name__ == "__main__":
    main()
