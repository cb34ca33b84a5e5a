"""Sums over inputs from which a layer can be fitted: G and c of a ridge regression.

Promises: the sums of two sets of inputs add up to those of both; no input can be told from them
once they sum over more inputs than a layer has. A fit needs nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import reduce
from operator import add

import torch
from torch import Tensor

# In units of the mean diagonal of G. The best of these is chosen for each layer.
RIDGES: tuple[float, ...] = tuple(10.0 ** (k / 2) for k in range(4, -11, -1))
_FIRST = RIDGES.index(0.01)
# The outputs of a layer, at most, by which its ridge is chosen.
CHOOSING = 128
# How many times the deviation of an output may grow to be that of its targets.
_MOST_RESTORED = 5.0
# Sums in double precision are symmetric and positive up to this share.
ROUNDING = 1e-8


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What some inputs tell of a layer `z = h W + b`, in double precision, for B blocks at once.

    gram: (B, K, K) sum of h h^T; cross: (B, K, N) sum of h z^T
    sums: (B, K) sum of h; totals: (B, N) sum of z; squares: (B, N) sum of z^2
    count: (1,) how many inputs and places

    Memory: 8 B (K^2 + K N) bytes.
    """

    gram: Tensor
    cross: Tensor
    sums: Tensor
    totals: Tensor
    squares: Tensor
    count: Tensor

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> LayerStatistics:
        """inputs: (B, M, K); targets: (B, M, N). Cost: B M K (K + N) in their own precision.

        Products are taken about the means, which rounding would else hide.
        """
        samples = inputs.shape[1]
        count = max(samples, 1)  # sums over nothing are zero
        sums, totals = inputs.double().sum(dim=1), targets.double().sum(dim=1)
        about = inputs - (sums / count)[:, None].to(inputs.dtype)
        own = targets - (totals / count)[:, None].to(targets.dtype)
        return cls(
            (about.mT @ about).double() + sums[:, :, None] * sums[:, None] / count,
            (about.mT @ own).double() + sums[:, :, None] * totals[:, None] / count,
            sums,
            totals,
            targets.double().square().sum(dim=1),
            torch.tensor([samples], dtype=torch.float64),
        )

    @classmethod
    def zeros(cls, blocks: int, reads: int, writes: int) -> LayerStatistics:
        """Of no inputs."""
        inputs = torch.zeros(blocks, 0, reads, dtype=torch.float64)
        return cls.of(inputs, inputs.new_zeros(blocks, 0, writes))

    def __add__(self, other: LayerStatistics) -> LayerStatistics:
        return LayerStatistics(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(LayerStatistics))
        )

    def scaled(self, factor: float) -> LayerStatistics:
        """As if every input counted so many times."""
        return LayerStatistics(*(factor * getattr(self, f.name) for f in fields(LayerStatistics)))

    def towards(self, weights: Tensor, shifts: Tensor) -> LayerStatistics:
        """The same with outputs `z = h W + b`: weights (B, K, N), shifts (B, N)."""
        cross = self.gram @ weights + self.sums[:, :, None] * shifts[:, None]
        totals = (self.sums[:, None] @ weights)[:, 0] + self.count * shifts
        squares = (weights * cross).sum(dim=1) + shifts * totals
        return LayerStatistics(self.gram, cross, self.sums, totals, squares, self.count)

    def outputs(self, weights: Tensor, biases: Tensor) -> tuple[Tensor, Tensor]:
        """(B, N) mean and deviation of `h W + b`: weights (B, K, N), biases (B, N)."""
        mean = (self.sums[:, None] @ weights)[:, 0] / self.count
        square = (weights * (self.gram @ weights)).sum(dim=1) / self.count
        return mean + biases, (square - mean.square()).clamp(min=0).sqrt()

    def deviation(self, weights: Tensor) -> Tensor:
        """(B, N) of `h W + z`, if z is what weights (B, K, N) leave unexplained."""
        centred = self.centred()
        explained = (weights * (2 * centred.cross + centred.gram @ weights)).sum(dim=1)
        return ((centred.squares + explained) / self.count).clamp(min=0).sqrt()

    def centred(self) -> LayerStatistics:
        """The same about the means, which is what a layer with a bias has to explain."""
        count = self.count.clamp(min=1)
        return LayerStatistics(
            self.gram - self.sums[:, :, None] * self.sums[:, None] / count,
            self.cross - self.sums[:, :, None] * self.totals[:, None] / count,
            torch.zeros_like(self.sums),
            torch.zeros_like(self.totals),
            self.squares - self.totals.square() / count,
            self.count,
        )

    def some_outputs(self, most: int) -> LayerStatistics:
        """Of so many outputs at most, evenly spaced."""
        step = -(-self.cross.shape[2] // most)
        return self.of_outputs(slice(None, None, max(step, 1)))

    def of_outputs(self, outputs: slice | Tensor) -> LayerStatistics:
        """Of some of the N outputs."""
        return LayerStatistics(
            self.gram,
            self.cross[:, :, outputs],
            self.sums,
            self.totals[:, outputs],
            self.squares[:, outputs],
            self.count,
        )

    def of_block(self, block: int) -> LayerStatistics:
        """Of one of the B blocks."""
        at = slice(block, block + 1)
        return LayerStatistics(
            self.gram[at],
            self.cross[at],
            self.sums[at],
            self.totals[at],
            self.squares[at],
            self.count,
        )

    def solve(self, ridge: float) -> Tensor | None:
        """(B, K, N) `(G + t I)^-1 c` with t = ridge times the mean diagonal of G.

        The posterior mean of weights with prior mean zero; None if the ridge is lost in the
        rounding of G. Cost: B K^2 (K / 3 + 2 N).
        """
        diagonal = self.gram.diagonal(dim1=1, dim2=2)
        size = diagonal.mean(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
        ridged = self.gram + torch.diag_embed((ridge * size)[:, None].expand_as(diagonal))
        factor, failed = torch.linalg.cholesky_ex(ridged)
        return None if bool(failed.any()) else torch.cholesky_solve(self.cross, factor)

    def error(self, weights: Tensor) -> float:
        """The sum of squared differences between z and `h W`."""
        twice = 2 * self.cross - self.gram @ weights
        return float(self.squares.sum() - (weights * twice).sum())


def are_sums(gram: Tensor, cross: Tensor, outer: Tensor, rounding: float = ROUNDING) -> bool:
    """Whether there are samples with these sums of h h^T (K, K), h y^T (K, N) and y y^T (N, N)."""
    products = torch.cat([torch.cat([gram, cross], dim=1), torch.cat([cross.mT, outer], dim=1)])
    sizes = products.diagonal().clamp(min=0).sqrt()
    sizes = torch.where(sizes > 0, sizes, 1.0)
    products = products / sizes / sizes[:, None]
    if not bool(((products - products.mT).abs() <= rounding).all()):
        return False
    products.diagonal().add_(len(products) * rounding)
    return int(torch.linalg.cholesky_ex(products).info) == 0


@dataclass(frozen=True)
class LayerFit:
    """How well a layer was fitted.

    ridge: in units of the mean diagonal of G
    before, after: squared error of the merged and of the fitted weights, relative to the variance
        of what they are to compute
    inputs, samples: of the layer; samples count inputs and places
    """

    ridge: float
    before: float
    after: float
    inputs: int
    samples: int


def fit_layer(
    rest: LayerStatistics, held_out: LayerStatistics, *, spread: float, with_bias: bool
) -> tuple[Tensor, Tensor, LayerFit]:
    """Weights (B, K, N) and shifts (B, N) to add to those that a layer has, and how well they fit.

    The posterior mean about a prior mean m0 is `m0 + (G + t I)^-1 sum h (z - h m0)^T`, so the
    statistics are those of what m0 leaves unexplained: the difference of two large sums would be
    all rounding. With a bias, everything is about the means, and the shift makes them agree. The
    ridge is the best on what was held out; the fit is of everything. Generalised cross-validation
    would take all places of an image for independent samples, and chooses too little.

    spread: the sum of squares of z about its mean
    """
    both = rest + held_out
    fitted, judge, whole = (
        part.centred() if with_bias else part for part in (rest, held_out, both)
    )
    ridge, change = best_ridge(fitted, judge, whole)
    unit = max(spread, torch.finfo(torch.float64).tiny)
    before, after = (whole.error(step) / unit for step in (torch.zeros_like(change), change))
    shifts = (both.totals - (both.sums[:, None] @ change)[:, 0]) / both.count
    fit = LayerFit(ridge, before, after, change.shape[1], int(both.count))
    return change, shifts if with_bias else torch.zeros_like(shifts), fit


def pooled_fit(
    parts: Sequence[LayerStatistics], owned: Tensor, *, ridge: float, with_bias: bool
) -> tuple[Tensor, Tensor]:
    """Weights (B, K, N) and shifts (B, N) to add to a layer of which clients own different outputs.

        change_i = (t I + sum_s G_s)^-1 sum_s c_si   over the clients s that own output i

    parts: of each client, with what the layer lacks there; owned: (S, B, N) who owns an output
    ridge: t, in units of the mean diagonal of the sum; the bias has none

    An output that nobody owns stays. Cost: one solution for each set of owners.
    """
    systems = torch.stack([_normal_equations(part, with_bias)[0] for part in parts])
    wanted = torch.stack([_normal_equations(part, with_bias)[1] for part in parts])
    blocks, reads, writes = parts[0].cross.shape
    change = torch.zeros(blocks, systems.shape[-1], writes, dtype=torch.float64)
    for block, present, outputs in _sets_of_owners(owned):
        change[block][:, outputs] = _ridge_solution(
            systems[present, block].sum(dim=0),
            wanted[present, block][:, :, outputs].sum(dim=0),
            reads,
            ridge,
        )
    shifts = change[:, reads] if with_bias else torch.zeros(blocks, writes, dtype=torch.float64)
    return change[:, :reads], shifts


def pooled_deviation(
    parts: Sequence[LayerStatistics], owned: Tensor, weights: Tensor, change: Tensor, shifts: Tensor
) -> tuple[Tensor, Tensor]:
    """The same fit, `with_deviation` of what the owners of each output compute.

    weights: (B, K, N) those that change and shifts are added to
    """
    change, shifts = change.clone(), shifts.clone()
    for block, present, outputs in _sets_of_owners(owned):
        owning = [part for part, here in zip(parts, present, strict=True) if here]
        whole = reduce(add, owning).of_block(block).of_outputs(outputs)
        at = slice(block, block + 1)
        now = weights[at, :, outputs]
        change[at, :, outputs], shifts[at, outputs] = with_deviation(
            whole, whole.deviation(now), now, change[at, :, outputs], shifts[at, outputs]
        )
    return change, shifts


def _sets_of_owners(owned: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For each block and set of clients: (S,) who is in it, and (N,) the outputs that it owns."""
    for block in range(owned.shape[1]):
        sets = owned[:, block].T
        owners, which = sets.unique(dim=0, return_inverse=True)  # type: ignore[no-untyped-call]
        for number, present in enumerate(owners):
            if bool(present.any()):
                yield block, present, which == number


def with_deviation(
    whole: LayerStatistics, deviation: Tensor, weights: Tensor, change: Tensor, shifts: Tensor
) -> tuple[Tensor, Tensor]:
    """A fit whose outputs vary about their means as the neurons do that they stand for.

    A mean of neurons varies less than these, and a fit to it less than that. In networks that were
    trained for long, neurons are on for few inputs: one that varies less is never on.

    whole: sums over what the layer reads; deviation: (B, N) of the neurons
    weights: (B, K, N) those that the layer has; change, shifts: the fit, to be added to it
    Means stay as they are, and no output varies less, or more than five times as much, as before.
    """
    fitted = weights + change
    made = whole.outputs(fitted, torch.zeros_like(shifts))[1]
    factor = deviation / made.clamp(min=torch.finfo(torch.float64).tiny)
    restored = fitted * factor.clamp(1, _MOST_RESTORED)[:, None]
    lost = (whole.sums[:, None] @ (fitted - restored))[:, 0] / whole.count.clamp(min=1)
    return restored - weights, shifts + lost


def ridge_errors(fitted: LayerStatistics, judge: LayerStatistics, *, with_bias: bool) -> Tensor:
    """(len(RIDGES),) the error on some statistics of fits to others, for every ridge.

    Clients can add them up, and the ridge with the least is the one for all. Zeros where there is
    nothing to fit, or to judge by.
    """
    if not bool(fitted.count) or not bool(judge.count):
        return torch.zeros(len(RIDGES), dtype=torch.float64)
    parts = [part.centred() if with_bias else part for part in (fitted, judge)]
    fit, held = (part.some_outputs(CHOOSING) for part in parts)
    errors = torch.tensor([_error(fit, held, k) for k in range(len(RIDGES))], dtype=torch.float64)
    # A ridge that is lost in rounding is worse than no fit at all.
    worst = 10 * float(held.squares.sum().clamp(min=0)) + 1e-30
    return errors.nan_to_num(worst, worst, 0.0).clamp(min=0)


def _normal_equations(part: LayerStatistics, with_bias: bool) -> tuple[Tensor, Tensor]:
    """Of the weights (B, K, .), and of a bias as the weight of an input that is always one."""
    if not with_bias:
        return part.gram, part.cross
    count = part.count.expand(len(part.gram))[:, None, None]
    above = torch.cat([part.gram, part.sums[:, :, None]], dim=2)
    below = torch.cat([part.sums[:, None], count], dim=2)
    return torch.cat([above, below], dim=1), torch.cat([part.cross, part.totals[:, None]], dim=1)


def _ridge_solution(system: Tensor, wanted: Tensor, reads: int, ridge: float) -> Tensor:
    """With a ridge on the weights, larger where it is lost in rounding; zero if nothing helps."""
    unit = system.diagonal()[:reads].mean().clamp(min=torch.finfo(torch.float64).tiny)
    for larger in (1, 10, 100, 1000):
        ridged = system.clone()
        ridged.diagonal()[:reads] += larger * ridge * unit
        factor, failed = torch.linalg.cholesky_ex(ridged)
        if not bool(failed):
            return torch.cholesky_solve(wanted, factor)
    return torch.zeros_like(wanted)


def best_ridge(
    fitted: LayerStatistics, judge: LayerStatistics, whole: LayerStatistics
) -> tuple[float, Tensor]:
    """The ridge whose fit to some statistics has the least error on others; its fit to the whole.

    Goes from the middle both ways, and stops where it has become worse twice. In a wide layer some
    of the outputs choose for all.
    """
    fitted, judge = (part.some_outputs(CHOOSING) for part in (fitted, judge))
    best, least = _FIRST, _error(fitted, judge, _FIRST)
    for step in (1, -1):
        place, worse = _FIRST + step, 0
        while 0 <= place < len(RIDGES) and worse < 2:
            error = _error(fitted, judge, place)
            best, worse = (place, 0) if error < least else (best, worse + 1)
            least, place = min(error, least), place + step
    solution = whole.solve(RIDGES[best])
    return RIDGES[best], torch.zeros_like(whole.cross) if solution is None else solution


def _error(fitted: LayerStatistics, judge: LayerStatistics, place: int) -> float:
    """Of a ridge; infinite if it is lost in rounding."""
    weights = fitted.solve(RIDGES[place])
    return float("inf") if weights is None else judge.error(weights)
