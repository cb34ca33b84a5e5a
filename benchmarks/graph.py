"""How long the analysis of a large network takes: MONAI's ResNet-50 in two dimensions.

`make bench` prints a table in Markdown. Seconds depend on the machine; the ratio to a forward pass
of the same network, measured beside it, is what to compare.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable

import torch
from monai.networks.nets import resnet50

import nafi
from nafi.graph import check_spec, fold_batchnorm, gather, permute, rebuild


def timed(work: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = resnet50(spatial_dims=2, n_input_channels=3, num_classes=1000).eval()
    inputs = (torch.randn(2, 3, 128, 128),)
    with torch.no_grad():
        model(*inputs)
        forward = min(timed(lambda: model(*inputs))[0] for _ in range(3))
    derive, spec = timed(lambda: nafi.groups(model, inputs, check=False))
    test, _ = timed(lambda: check_spec(model, inputs, spec))
    group = max(spec.groups.values(), key=lambda g: g.width)
    orders = {g.name: torch.arange(g.width).flip(0) for g in spec.groups.values()}
    rows = [
        ("forward pass of two 128 x 128 images", forward, ""),
        (f"groups ({len(spec.groups)}), without the self-test", derive, "15 s"),
        ("self-test", test, "15 s"),
        ("permute all groups", timed(lambda: permute(model, spec, orders))[0], ""),
        (
            f"gather {group.name}",
            timed(lambda: gather(model.state_dict(), spec, group.name))[0],
            "",
        ),
        ("fold all batch norms", timed(lambda: fold_batchnorm(model, spec))[0], ""),
        (
            f"rebuild with {group.name} at {group.width + 64}",
            timed(lambda: rebuild(model, spec, {group.name: group.width + 64}))[0],
            "",
        ),
    ]
    count = sum(p.numel() for p in model.parameters()) / 1e6
    share = spec.coverage(model.state_dict())
    print(f"ResNet-50 ({count:.1f} million parameters, {share:.2%} in tensors with groups), ")
    print(
        f"{torch.get_num_threads()} threads of {os.cpu_count()} cores, torch {torch.__version__}.\n"
    )
    print("| step | seconds | forward passes | target |")
    print("| --- | --- | --- | --- |")
    for name, seconds, target in rows:
        print(f"| {name} | {seconds:.2f} | {seconds / forward:.1f} | {target} |")


if __name__ == "__main__":
    main()
