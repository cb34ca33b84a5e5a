"""Match, then refit: every layer of a fused network is fitted to what its members compute.

Hides: where layers are, in modules or in functional code; they are fitted while the network runs,
so each one sees what the fitted layers below it make of the probe.
Promises: a weight is the posterior mean of METHOD's section 6 about the merged weights, for neurons
with their own deviation; or it is kept as it was merged, and the reason is given.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from nafi.fusion.held_out import held_out, numbers_of_rows, row_stretches
from nafi.fusion.networks import Networks
from nafi.fusion.probe import batch_size
from nafi.fusion.recording import Recording, Use, rows_of, sole_writers, written_axes
from nafi.fusion.statistics import LayerFit, LayerStatistics, fit_layer, with_deviation
from nafi.graph import Placements, Product, lift_axes, named_tensors, owned, watch

# A weight that reads what it made itself, as in a recurrent layer, reads something else after its
# fit. It is fitted so often at most, until another fit would lower its error, in units of the
# variance, by less than this share or by no more than rounding.
FITS = 6
_SHARE, _ROUNDING = 0.1, 1e-6


@dataclass(frozen=True)
class Refit:
    """What a refit did: how well every weight was fitted, and why others were kept."""

    fits: Mapping[str, LayerFit] = field(default_factory=dict)
    kept: Mapping[str, str] = field(default_factory=dict)


def refit(
    networks: Networks,
    placements: Sequence[Placements],
    model: nn.Module,
    progress: Callable[[str, int, int], None],
) -> Refit:
    """Fit the layers of a merged network in place, from the inputs on.

    networks: with a probe; model: merged, its normalisation folded as theirs is

    Cost: one run of the network, up to `FITS` more for each weight that is used several times, two
    of a client on two inputs, and for a layer with K inputs and N outputs some K^2 (K + N) for each
    ridge that is tried. Memory: the recordings, and about six times the largest layer's K^2 numbers
    of 8 bytes.
    """
    assert networks.probe is not None
    stretches = row_stretches(networks.template, networks.probe)
    count = batch_size(networks.probe)
    fitting = _Fitting(networks, placements, dict(named_tensors(model)), progress, count, stretches)
    while True:
        try:
            watch(model, networks.probe, fitting.visit)
            return Refit(fitting.fits, fitting.kept)
        except _RunAgainError:
            fitting.collected.clear()
            fitting.spread.clear()


class _RunAgainError(Exception):
    """A weight has changed that was used earlier in the run."""


@dataclass
class _Fitting:
    """A run of the network in which its weights are replaced.

    count: inputs of the probe; stretches: how their rows lie, from `row_stretches`
    alone: the weights that make neurons which no other weight adds to
    """

    networks: Networks
    placements: Sequence[Placements]
    state: Mapping[str, Tensor]
    progress: Callable[[str, int, int], None]
    count: int
    stretches: Mapping[Use, int]
    fits: dict[str, LayerFit] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    repeated: dict[str, list[LayerFit]] = field(default_factory=lambda: defaultdict(list))
    shifted: dict[str, Tensor] = field(default_factory=dict)
    collected: dict[str, list[LayerStatistics]] = field(default_factory=dict)
    spread: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    deviations: dict[str, Tensor] = field(default_factory=dict)
    alone: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.kept |= self.reference.kept
        written = self.reference.written.items()
        self.alone = sole_writers({name: activity.axes for (name, _), activity in written})

    @property
    def reference(self) -> Recording:
        return self.networks.recordings[0]

    def visit(self, product: Product) -> None:
        """Fit the weight that is about to be used, once all of its uses were seen."""
        name, use = product.name, (product.name, product.call)
        if name in self.fits or name in self.kept or use not in self.reference.written:
            return
        if product.places != self.reference.places[use]:
            self.kept[name] = "it runs along neurons"
            return
        self._collect(product)
        if product.call + 1 == self.reference.uses[name]:
            self.progress(f"refitting {name}", len(self.fits), len(self.reference.uses))
            self._fit(product)

    def _collect(self, product: Product) -> None:
        """Add what this use of a weight leaves unexplained, apart for both parts of the probe."""
        name, inputs = product.name, product.inputs(rows_of(product))
        targets, self.deviations[name] = self._targets(product)
        residual = targets - inputs @ product.weights
        held = self._held_out(product)
        parts = [
            LayerStatistics.of(inputs[:, where], residual[:, where]) for where in (~held, held)
        ]
        before = self.collected.get(name)
        self.collected[name] = (
            parts if before is None else [a + b for a, b in zip(before, parts, strict=True)]
        )
        variance = targets.double().var(dim=1, correction=0).sum()
        self.spread[name] += float(variance) * inputs.shape[1]

    def _held_out(self, product: Product) -> Tensor:
        """(M,) which rows are left to choose the ridge."""
        rows, stretch = rows_of(product), self.stretches.get((product.name, product.call))
        if self.count == 1:  # a part of it, in the place of one of four
            return held_out(numbers_of_rows(rows, product.places, 4, None))
        return held_out(numbers_of_rows(rows, product.places, self.count, stretch))

    def _fit(self, product: Product) -> None:
        """Fit a weight, for good or to see what it reads then."""
        name = product.name
        bias = self.networks.spec.tensors[name].bias
        rest, held_out = self.collected.pop(name)
        change, shifts, fit = fit_layer(
            rest, held_out, spread=self.spread[name], with_bias=bias is not None
        )
        before = self.repeated[name]
        if before and _is_settled(before[-1], fit):
            self.fits[name] = replace(before[-1], before=before[0].before)
            return
        before.append(fit)
        if bias is not None and self.reference.uses[name] == 1 and name in self.alone:
            # A weight that is used several times would be fitted again and again for it.
            change, shifts = with_deviation(
                rest + held_out, self.deviations[name], product.weights.double(), change, shifts
            )
        product.replace((product.weights + change).to(product.weights.dtype))
        if bias is not None:
            self._shift(product, self.state[bias], shifts)
        if not product.call or len(before) == FITS:
            self.fits[name] = replace(fit, before=before[0].before)
        if product.call:
            raise _RunAgainError

    def _shift(self, product: Product, bias: Tensor, shifts: Tensor) -> None:
        """Let a bias be the merged one plus what the mean of its layer's outputs lacks."""
        shifted = self.shifted.get(product.name, torch.zeros_like(shifts))
        self.shifted[product.name] = shifts
        change = (shifts - shifted).flatten().to(bias.dtype)
        with torch.no_grad():
            bias.view(-1)[self._index(product).flatten()] += change

    def _targets(self, product: Product) -> tuple[Tensor, Tensor]:
        """(B, M, N) the mean over its owners of what each neuron writes, zero if it has none.

        And (B, N) the mean of its owners' deviations. An owner that knows the like of an input
        counts more for it, where that is known.
        """
        networks, use = self.networks, (product.name, product.call)
        meaning = networks.spec.tensors[product.name]
        kept = [i for i in range(len(meaning.axes)) if i not in meaning.reads]
        total, owners, spread, counted = (torch.zeros(()) for _ in range(4))
        by_row = self._weights_by_row(product)
        for s, weights in enumerate(networks.clients.weights_of(meaning)):
            written, places = networks.recordings[s].written[use], self.placements[s]
            # A convolution has axes of space after that of its outputs.
            form = [weights.shape[i] for i in kept][: len(written.axes)]
            weight = torch.as_tensor(weights.reshape(form), dtype=written.values.dtype)
            rows = torch.ones(len(written.values)) if by_row is None else by_row[s]
            rows = rows.to(weight).reshape(-1, *[1] * len(written.axes))
            one = torch.ones_like(written.values[:1])
            lifted, present = (
                lift_axes(values, written.axes, networks.specs[s], where)
                for values, where in ((written.values, places), (one, owned(places)))
            )
            share = weight * rows.mean()
            spread = spread + share * _deviation(lifted, rows)
            counted = counted + share * present
            weight = weight if by_row is None else weight * rows
            total, owners = total + weight * lifted, owners + weight * present
        mean = (total / torch.where(owners > 0, owners, 1.0)).flatten(1)
        deviations = (spread / torch.where(counted > 0, counted, 1.0)).flatten(1)
        index = self._index(product)
        return mean[:, index].movedim(0, 1), deviations[0, index].double()

    def _weights_by_row(self, product: Product) -> Tensor | None:
        """(S, M) how much each client counts in each row; None if it is not known whose rows."""
        by_input = self.networks.by_input
        if by_input is None or product.samples != by_input.shape[1]:
            return None
        return by_input[:, rows_of(product) // (product.places // product.samples)]

    def _index(self, product: Product) -> Tensor:
        """(B, N) where each output lies along the axes that it is written to."""
        where = written_axes(product, self.networks.spec)
        assert where is not None
        return where[1]


def _deviation(values: Tensor, rows: Tensor) -> Tensor:
    """(1, ...) of values (M, ...) about their mean, if rows (M, ...) count differently."""
    rows = rows / rows.sum().clamp(min=torch.finfo(rows.dtype).tiny)
    mean = (rows * values).sum(dim=0, keepdim=True)
    return (rows * (values - mean).square()).sum(dim=0, keepdim=True).sqrt()


def _is_settled(last: LayerFit, fit: LayerFit) -> bool:
    """Whether a weight reads what it did at its last fit, or another one would hardly help."""
    same = abs(fit.before - last.after) <= _ROUNDING * last.after
    return same or fit.after >= (1 - _SHARE) * fit.before - _ROUNDING
