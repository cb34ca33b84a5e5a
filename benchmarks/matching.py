"""How fast `nafi.match` is, as ratios measured in one run on one thread.

`make bench` prints tables in Markdown. The opponent does what public PFNM code does: a row of the
cost matrix at a time in numpy, over the same sweeps, and must end at the same assignments.
`python benchmarks/matching.py --wide` prints a table of 10 models with 4,000 neurons of 4,000
columns, which takes some minutes and 7 GB.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
from scipy.optimize import linear_sum_assignment
from threadpoolctl import threadpool_limits

import nafi
from nafi.matching.cost import PenalisedCost
from nafi.matching.divergence import DIVERGENCES
from nafi.matching.inputs import make_input
from nafi.matching.posterior import Posterior
from nafi.matching.products import direct_products

CLASSES = 10
PENALTY = 0.1


def models_like_mnist(
    count: int, width: int, columns: int = 795, noise: float = 1.0, seed: int = 0
):
    """Noisy subsets of twice as many neurons; class columns with shares as precisions."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(2 * width, columns))
    neurons = [
        truth[rng.permutation(2 * width)[:width]] + noise * rng.normal(size=(width, columns))
        for _ in range(count)
    ]
    shares = rng.dirichlet([0.5] * count, size=CLASSES).T * count
    precisions = [np.concatenate([np.ones(columns - CLASSES), share]) for share in shares]
    return neurons, precisions


def row_by_row(neurons, precisions, penalty: float, sweeps: int, seed: int = 0):
    """The algorithm of `nafi.match` with a loop over local neurons; unit prior at zero."""
    models, columns = len(neurons), neurons[0].shape[1]
    eta, precision = np.zeros((0, columns)), np.ones((0, columns))
    counts = np.zeros(0)
    assigned: list = [None] * models

    def row(w, t):
        after = precision + t
        cost = 2 * np.log((models - counts) / counts)
        cost = cost - ((eta + t * w) ** 2 / after).sum(axis=1) + (eta**2 / precision).sum(axis=1)
        ratio = after / precision
        gap = w - eta / precision
        kl = 0.5 * (ratio - 1 - np.log(ratio) + t**2 / after * gap**2).sum(axis=1)
        after = 1 + t
        new = (
            -((t * w) ** 2 / after).sum()
            + penalty * 0.5 * (after - 1 - np.log(after) + t**2 / after * w**2).sum()
        )
        opened = 2 * np.log(np.arange(1, len(neurons[0]) + 1) * models)
        return np.concatenate([cost + penalty * kl, new + opened])

    def place(s) -> bool:
        nonlocal eta, precision, counts
        before = assigned[s]
        alone = np.zeros(len(neurons[s]), dtype=bool)
        if before is not None:
            for j, i in enumerate(before):
                eta[i] -= precisions[s] * neurons[s][j]
                precision[i] -= precisions[s]
                counts[i] -= 1
            alone = counts[before] == 0
            keep = counts > 0
            number = np.cumsum(keep) - 1
            eta, precision, counts = eta[keep], precision[keep], counts[keep]
            for o in range(models):
                if assigned[o] is not None:
                    assigned[o] = np.where(keep[assigned[o]], number[assigned[o]], -1)
            before = assigned[s]
        cost = np.array([row(w, precisions[s]) for w in neurons[s]])
        _, chosen = linear_sum_assignment(cost)
        width = len(eta)
        is_new = chosen >= width
        same = before is not None and bool(np.all(np.where(is_new, alone, chosen == before)))
        for j in np.flatnonzero(is_new):
            chosen[j] = len(eta)
            eta = np.vstack([eta, np.zeros(columns)])
            precision = np.vstack([precision, np.ones(columns)])
            counts = np.append(counts, 0)
        for j, i in enumerate(chosen):
            eta[i] += precisions[s] * neurons[s][j]
            precision[i] += precisions[s]
            counts[i] += 1
        assigned[s] = chosen
        return same

    for s in range(models):
        place(s)
    rng = np.random.default_rng(seed)
    settled: set[int] = set()
    for _ in range(sweeps):
        for s in rng.permutation(models).tolist():
            if s not in settled:
                settled = settled | {s} if place(s) else {s}
        if len(settled) == models:
            break
    return assigned


def canonical(assignments) -> list[int]:
    """Global neurons numbered by first appearance, so that labels do not matter."""
    flat = np.concatenate(assignments)
    _, first, inverse = np.unique(flat, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse].tolist()


def cpu_seconds(work: Callable[[], object], repeat: int = 1) -> tuple[float, object]:
    """The least process time of a few runs, and what the last one returned."""
    best, result = np.inf, None
    for _ in range(repeat):
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


@dataclass(frozen=True)
class Against:
    """One comparison with the loop over rows; seconds of process time."""

    count: int
    neurons: int
    width: int
    ours: float
    theirs: float
    target: float


# Models, neurons of each, sweeps, and how many times faster nafi is to be.
AGAINST_ROWS = [(30, 100, 2, 60), (10, 500, 1, 100)]


def against_rows(count: int, width: int, sweeps: int, target: float) -> Against:
    neurons, precisions = models_like_mnist(count, width)
    ours, found = cpu_seconds(
        lambda: nafi.match(neurons, precisions=precisions, penalty=PENALTY, sweeps=sweeps),
        repeat=3,
    )
    theirs, loop = cpu_seconds(lambda: row_by_row(neurons, precisions, PENALTY, sweeps))
    if canonical(found.assignments) != canonical(loop):
        sys.exit("the two implementations disagree")
    return Against(count, width, found.width, ours, theirs, target)


def rows_table(found: Iterable[Against]) -> str:
    lines = [
        "| models x neurons x columns | width | nafi.match, s | row by row, s | ratio | target |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {one.count} x {one.neurons} x 795 | {one.width} | {one.ours:.2f} | {one.theirs:.1f} "
        f"| {one.theirs / one.ours:.0f}x | {one.target:g}x |"
        for one in found
    ]
    return "\n".join(lines)


def path_of_penalties() -> None:
    print("\n| ten penalties at once | mean of one, s | ten, s | ratio | target |")
    print("| --- | --- | --- | --- | --- |")
    penalties = np.geomspace(1e-3, 1, 10).tolist()
    for count, width in [(30, 100), (10, 500)]:
        neurons, precisions = models_like_mnist(count, width)
        singles = [
            cpu_seconds(lambda p=p, n=neurons, t=precisions: nafi.match(n, precisions=t, penalty=p))
            for p in penalties
        ]
        ten, path = cpu_seconds(
            lambda n=neurons, t=precisions: nafi.match_path(n, penalties, precisions=t)
        )
        for (_, single), found in zip(singles, path, strict=True):
            if canonical(single.assignments) != canonical(found.assignments):
                sys.exit("path and single matches disagree")
        one = float(np.mean([seconds for seconds, _ in singles]))
        widths = f"widths {path[0].width} to {path[-1].width}"
        print(
            f"| {count} x {width}, {widths} | {one:.2f} | {ten:.2f} | {ten / one:.1f}x | 6x |",
            flush=True,
        )


def growth(title: str, sizes: list[tuple[int, int]]) -> None:
    """With less noise, so that the global width stays that of the truth."""
    print(f"\n| {title} | seconds | per neuron and global neuron, ns | peak memory / inputs |")
    print("| --- | --- | --- | --- |")
    for count, width in sizes:
        neurons, precisions = models_like_mnist(count, width, noise=0.7)
        options = {"precisions": precisions, "penalty": PENALTY, "sweeps": 1}
        seconds, found = cpu_seconds(lambda n=neurons, o=options: nafi.match(n, **o))
        tracemalloc.start()
        nafi.match(neurons, **options)
        peak = tracemalloc.get_traced_memory()[1] / sum(w.nbytes for w in neurons)
        tracemalloc.stop()
        pairs = 2 * count * width * found.width
        print(
            f"| {count} x {width} -> {found.width} | {seconds:.2f} | {seconds / pairs * 1e9:.0f} "
            f"| {peak:.1f}x |",
            flush=True,
        )


def cost_building() -> None:
    """The whole cost matrix beside the products of global and local neurons that it needs."""
    print("\n| cost matrix | bare product, ms | matrix, ms | ratio | target |")
    print("| --- | --- | --- | --- | --- |")
    for count, width in [(30, 100), (10, 500)]:
        neurons, precisions = models_like_mnist(count, width)
        inputs = make_input(neurons, precisions, 0.0, 1.0)
        found = nafi.match(neurons, precisions=precisions, penalty=PENALTY, sweeps=1)
        posterior = Posterior(inputs)
        posterior.taken(spare=found.width)
        for s, assigned in enumerate(found.assignments):
            posterior.observe(s, assigned)
        posterior.forget(0)
        model = inputs.models[0]
        cost = PenalisedCost(PENALTY, DIVERGENCES["kl"], len(inputs.columns.order))
        everywhere = slice(found.width)

        def product(p=posterior, m=model, e=everywhere):
            return p.eta[e] @ m.neurons.T

        def matrix(p=posterior, m=model, e=everywhere, c=cost):
            gaussian = p.at(e)
            return c(gaussian, m, direct_products(gaussian, m))

        bare = min(cpu_seconds(product)[0] for _ in range(50))
        whole = min(cpu_seconds(matrix)[0] for _ in range(50))
        print(
            f"| {found.width} x {width} x 795 | {bare * 1e3:.2f} | {whole * 1e3:.2f} "
            f"| {whole / bare:.2f}x | 2x |"
        )


def companions(found) -> list[tuple[int, ...]]:
    """For each local neuron, those of all models that share its global neuron."""
    owners = found.owners().tolist()
    return [tuple(owners[i]) for assigned in found.assignments for i in assigned]


def wide(count: int, width: int) -> None:
    """Neurons as long as they are many, with much and with nothing in common; the first pass."""
    print(
        "| models x neurons x columns | noise | global neurons | products | seconds | ratio ",
        end="",
    )
    print("| peak memory beyond inputs, GB | of inputs | neurons that change company |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for noise in (1.0, 2.0):
        neurons, precisions = models_like_mnist(count, width, width, noise)
        size = sum(w.nbytes for w in neurons)
        first, exact = 0.0, []
        for products in ("float64", "float32"):
            options = {"precisions": precisions, "penalty": PENALTY, "sweeps": 0}
            tracemalloc.start()
            seconds, found = cpu_seconds(
                lambda n=neurons, o=options, p=products: nafi.match(n, **o, products=p)
            )
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            theirs = companions(found)
            first, exact = first or seconds, exact or theirs
            changed = np.mean([a != b for a, b in zip(theirs, exact, strict=True)])
            print(
                f"| {count} x {width} x {width} | {noise:g} | {found.width} | {products} "
                f"| {seconds:.0f} | {seconds / first:.2f}x | {peak / 2**30:.1f} "
                f"| {peak / size:.1f}x | {changed:.3%} |",
                flush=True,
            )
            del found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wide", nargs="?", type=int, const=4000, metavar="NEURONS")
    chosen = parser.parse_args().wide
    print(f"One thread of {os.cpu_count()} cores, process time, Python {sys.version.split()[0]}, ")
    print(f"numpy {np.__version__}. Ratios were measured in one run.\n")
    with threadpool_limits(1):
        if chosen is not None:
            wide(10, chosen)
            return
        cost_building()
        growth("growth in models", [(10, 100), (30, 100), (100, 100), (300, 100)])
        growth("growth in neurons", [(10, 100), (10, 200), (10, 500), (10, 1000)])
        path_of_penalties()
        print("\n" + rows_table(against_rows(*case) for case in AGAINST_ROWS))


if __name__ == "__main__":
    main()
