"""The input of a matching: S models' neurons and the prior, checked once.

Hides: every way in which a caller may write precisions and priors, every mistake in them, and
whether neurons are held or read again whenever they are needed. Promises: finite float64 arrays of
matching shapes, with sorted columns; anything else raises an `InputError` with the model, what was
found and what was expected.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import overload

import numpy as np
import numpy.typing as npt

from nafi.errors import InputError
from nafi.matching.columns import Array, ColumnBlocks, Index
from nafi.matching.gaussian import Gaussian

# Costs multiply four such numbers; outside these bounds they would overflow float64.
LARGEST = 1e50
_SMALLEST_PRIOR = 1e-50
_SCRATCH = 2**19  # numbers in a buffer: 4 MB


@dataclass(frozen=True, eq=False)
class Streamed(Sequence[Array]):
    """The neurons of S models that are read when they are needed and are never held together.

    widths: (S,) neurons of each model
    dimension: columns of all of them
    read: index of a model -> its neurons, (J_s, D)
    """

    widths: Sequence[int]
    dimension: int
    read: Callable[[int], npt.ArrayLike]

    def __len__(self) -> int:
        return len(self.widths)

    @overload
    def __getitem__(self, index: int) -> Array: ...
    @overload
    def __getitem__(self, index: slice) -> list[Array]: ...
    def __getitem__(self, index: int | slice) -> Array | list[Array]:
        if isinstance(index, slice):
            return [self[s] for s in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        where = f"neurons of model {index}"
        matrix = _real_array(self.read(index), where)
        if matrix.shape != (self.widths[index], self.dimension):
            raise InputError(
                f"{where}: read shape {matrix.shape}, expected "
                f"{(self.widths[index], self.dimension)}"
            )
        _require_finite(matrix, where)
        return matrix


@dataclass(frozen=True, eq=False)
class Owners:
    """How many models each neuron stands for, where a model is itself the fusion of several.

    counts: (J_s,) of each neuron; models: how many there were
    """

    counts: npt.ArrayLike
    models: int


@dataclass(frozen=True, eq=False)
class LocalModel:
    """The neurons of one model.

    neurons: (J_s, D) in sorted column order
    precision: (B,) the model's t_s, one per block of columns; (J_s, B) if it differs by neuron
    squares: (J_s, B) squared norm of each neuron within each block
    owners: (J_s,) how many models each neuron stands for; None: one
    """

    index: int
    neurons: Array
    precision: Array
    squares: Array
    owners: Array | None = None

    @property
    def width(self) -> int:
        return len(self.neurons)

    @property
    def steps(self) -> int:
        """How many models each of its neurons stands for, where that is the same for all."""
        return 1 if self.owners is None else int(self.owners[0])

    @cached_property
    def parts(self) -> list[tuple[Index, LocalModel]]:
        """The neurons that share precision and owners: which they are, and a model of them."""
        if self.owners is None:
            return [(np.arange(self.width), self)]
        precision = np.broadcast_to(self.precision, (self.width, self.squares.shape[1]))
        kinds = np.concatenate([self.owners[:, None], precision], axis=1)
        _, first, kind = np.unique(kinds, axis=0, return_index=True, return_inverse=True)
        chosen = [np.flatnonzero(kind.reshape(-1) == k) for k in range(len(first))]
        return [
            (
                rows,
                LocalModel(
                    self.index,
                    self.neurons[rows],
                    precision[rows[0]],
                    self.squares[rows],
                    self.owners[rows],
                ),
            )
            for rows in chosen
        ]


@dataclass(frozen=True, eq=False)
class LocalModels(Sequence[LocalModel]):
    """The models of a matching, made of their neurons whenever one is asked for.

    neurons: of each model, in the caller's columns; kind: (S,) which row of `kinds` each has
    kinds: (K, B) the precisions that occur
    by_neuron: model -> (J_s, B) precisions, where they differ by neuron
    owners: model -> (J_s,) how many models each neuron stands for, where that is not one
    """

    neurons: Sequence[Array]
    columns: ColumnBlocks
    kinds: Array
    kind: Index
    by_neuron: dict[int, Array]
    owners: dict[int, Array]

    def __len__(self) -> int:
        return len(self.neurons)

    def __iter__(self) -> Iterator[LocalModel]:
        return (self[s] for s in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> LocalModel: ...
    @overload
    def __getitem__(self, index: slice) -> list[LocalModel]: ...
    def __getitem__(self, index: int | slice) -> LocalModel | list[LocalModel]:
        if isinstance(index, slice):
            return [self[s] for s in range(*index.indices(len(self)))]
        if index not in self._made:
            if isinstance(self.neurons, Streamed):
                self._made.clear()  # one model at a time; the others are read again
            ordered = self.columns.sort(self.neurons[index])
            self._made[index] = LocalModel(
                index,
                ordered,
                self.by_neuron.get(index, self.kinds[self.kind[index]]),
                self.columns.sum_of_squares(ordered),
                self.owners.get(index),
            )
        return self._made[index]

    @cached_property
    def _made(self) -> dict[int, LocalModel]:
        return {}


@dataclass(frozen=True, eq=False)
class MatchingInput:
    """S models and the prior N(m0, 1/t0) of a global neuron, all in sorted column order.

    count: how many models there are, with those that some of them stand for
    """

    models: LocalModels
    prior: Gaussian
    columns: ColumnBlocks
    count: int

    @cached_property
    def widths(self) -> list[int]:
        """(S,) neurons of each model."""
        neurons = self.models.neurons
        return list(neurons.widths if isinstance(neurons, Streamed) else map(len, neurons))

    @property
    def widest(self) -> int:
        return max(self.widths)

    @cached_property
    def scratch(self) -> tuple[Array, Array]:
        """Two buffers for some neurons, as many as the widest model has or memory allows."""
        columns = len(self.columns.order)
        shape = (min(self.widest, max(1, _SCRATCH // columns)), columns)
        return np.empty(shape), np.empty(shape)


def make_input(
    neurons: Sequence[npt.ArrayLike],
    precisions: float | Sequence[npt.ArrayLike],
    prior_mean: npt.ArrayLike,
    prior_precision: npt.ArrayLike,
    owners: Sequence[Owners | None] | None = None,
) -> MatchingInput:
    """Check everything and sort the columns; the only way to make a `MatchingInput`."""
    matrices = neurons if isinstance(neurons, Streamed) else _neuron_matrices(neurons)
    widths = matrices.widths if isinstance(matrices, Streamed) else [len(m) for m in matrices]
    dimension = matrices.dimension if isinstance(matrices, Streamed) else matrices[0].shape[1]
    mean = _per_column(prior_mean, dimension, "prior_mean")
    prior = _per_column(prior_precision, dimension, "prior_precision")
    if np.any(prior < _SMALLEST_PRIOR):
        at = int(np.argmax(prior < _SMALLEST_PRIOR))
        raise InputError(
            f"prior_precision: found {prior[at]:g} at column {at}, expected values above 0, at "
            f"least {_SMALLEST_PRIOR:g} (without a prior new neurons are undefined)"
        )
    counted, total = _owner_counts(owners, widths)
    rows, kind = _distinct(_model_precisions(precisions, widths, dimension, set(counted)))
    varying = [entry for entry in rows if entry.shape[1] > 1]
    columns = ColumnBlocks.of_equal(np.concatenate([prior[None], *varying]))
    per_block = [_by_block(entry, columns) for entry in rows]
    by_neuron = {s: per_block[k] for s, k in enumerate(kind.tolist()) if s in counted}
    kinds = np.stack([entry[0] for entry in per_block])
    models = LocalModels(matrices, columns, kinds, kind, by_neuron, counted)
    natural = (columns.sort(prior) * columns.sort(mean))[None]
    before = Gaussian(natural, _by_block(prior[None], columns), columns)
    return MatchingInput(models, before, columns, total)


def _by_block(rows: Array, columns: ColumnBlocks) -> Array:
    """(R, D), or (R, 1) where all columns are alike -> (R, B)."""
    if rows.shape[1] == 1:
        return np.repeat(rows, len(columns.sizes), axis=1)
    return columns.sort(rows)[:, columns.starts]


def _distinct(entries: list[Array]) -> tuple[list[Array], Index]:
    """The tables of precisions that differ, and which of them each model has.

    Thousands of models with the same precision take the memory of one.
    """
    found: dict[bytes, int] = {}
    known: dict[int, int] = {}
    rows: list[Array] = []
    kind = np.empty(len(entries), dtype=np.intp)
    for s, entry in enumerate(entries):
        if id(entry) not in known:
            place = found.setdefault(entry.tobytes(), len(rows))
            if place == len(rows):
                rows.append(entry)
            known[id(entry)] = place
        kind[s] = known[id(entry)]
    return rows, kind


def _owner_counts(
    owners: Sequence[Owners | None] | None, widths: Sequence[int]
) -> tuple[dict[int, Array], int]:
    """Model -> the owners of each neuron, where there are several, and how many models in all."""
    entries = [None] * len(widths) if owners is None else list(owners)
    if len(entries) != len(widths):
        raise InputError(
            f"owners: found {len(entries)} entries, expected one for each of {len(widths)} models"
        )
    counted: dict[int, Array] = {}
    total = 0
    for s, (entry, width) in enumerate(zip(entries, widths, strict=True)):
        if entry is None:
            total += 1
            continue
        counts = _real_array(entry.counts, f"owners of model {s}")
        total += entry.models
        whole = counts.shape == (width,) and bool((counts == np.round(counts)).all())
        if not whole or counts.min() < 1 or counts.max() > entry.models:
            raise InputError(
                f"owners of model {s}: expected {width} whole numbers from 1 to {entry.models}, "
                "one for each neuron"
            )
        counted[s] = counts
    return counted, total


def _neuron_matrices(neurons: Sequence[npt.ArrayLike]) -> list[Array]:
    if not isinstance(neurons, Sequence) and not (
        isinstance(neurons, np.ndarray) and neurons.ndim == 3
    ):
        raise InputError(
            f"neurons: found {type(neurons).__name__}, expected a list of (J_s, D) arrays, "
            "one per model"
        )
    if len(neurons) == 0:
        raise InputError("neurons: found an empty list, expected at least one (J_s, D) array")
    matrices = [_real_array(matrix, f"neurons of model {s}") for s, matrix in enumerate(neurons)]
    dimension: int | None = None
    for s, matrix in enumerate(matrices):
        where = f"neurons of model {s}"
        if matrix.ndim != 2:
            raise InputError(
                f"{where}: found an array of shape {matrix.shape}, expected two dimensions (J_s, D)"
            )
        if matrix.shape[0] == 0 or matrix.shape[1] == 0:
            raise InputError(
                f"{where}: found shape {matrix.shape}, expected at least one neuron and one column"
            )
        dimension = matrix.shape[1] if dimension is None else dimension
        if matrix.shape[1] != dimension:
            raise InputError(
                f"{where}: found {matrix.shape[1]} columns, expected {dimension} as in model 0"
            )
        _require_finite(matrix, where)
    return matrices


def _model_precisions(
    precisions: float | Sequence[npt.ArrayLike],
    widths: Sequence[int],
    dimension: int,
    summaries: Collection[int],
) -> list[Array]:
    """For each model (1, D), or (J_s, D) where they differ by neuron; equal entries are shared.

    Where all columns are alike there is one.

    summaries: the models that may have precisions by neuron
    """
    count = len(widths)
    entries: list[npt.ArrayLike]
    if isinstance(precisions, Real) or getattr(precisions, "ndim", None) == 0:
        entries = [_per_column(precisions, dimension, "precisions")] * count  # type: ignore[arg-type]
    else:
        if isinstance(precisions, str | bytes | np.ma.MaskedArray) or not (
            isinstance(precisions, Sequence) or hasattr(precisions, "__array__")
        ):
            raise InputError(
                f"precisions: found {type(precisions).__name__}, "
                "expected a number or a list with one entry per model"
            )
        entries = list(precisions)  # type: ignore[arg-type]
        if len(entries) != count:
            raise InputError(
                f"precisions: found {len(entries)} entries, expected a number or one entry for "
                f"each of the {count} models (a scalar or a ({dimension},) array each)"
            )
    shared: dict[tuple[int, int], Array] = {}
    keys = [(id(e), widths[s] if s in summaries else 1) for s, e in enumerate(entries)]
    for s, (entry, key) in enumerate(zip(entries, keys, strict=True)):
        if key not in shared:
            by_neuron = key[1] if s in summaries else None
            shared[key] = _precision_rows(entry, dimension, s, by_neuron)
    return [shared[key] for key in keys]


def _precision_rows(entry: npt.ArrayLike, dimension: int, s: int, neurons: int | None) -> Array:
    """The precisions of one model; neurons: as many rows may there be."""
    where = f"precisions of model {s}"
    rows = _real_array(entry, where)
    if neurons is not None and rows.shape in ((neurons, 1), (neurons, dimension)):
        _require_finite(rows, where)
    else:
        rows = _per_column(entry, dimension, where)[None]
    if np.any(rows < 0):
        at = int(np.argmax((rows < 0).any(axis=0)))
        raise InputError(
            f"{where}: found {rows[:, at].min():g} at column {at}, expected values of at "
            "least 0 (a precision is 1/variance; 0 means no information)"
        )
    return rows[:, :1] if np.all(rows == rows[:, :1]) else rows


def _per_column(values: npt.ArrayLike, dimension: int, where: str) -> Array:
    array = _real_array(values, where)
    if array.ndim != 0 and array.shape != (dimension,):
        raise InputError(
            f"{where}: found shape {array.shape}, expected a number or shape ({dimension},)"
        )
    _require_finite(array, where)
    return np.broadcast_to(array, (dimension,))


def _real_array(values: npt.ArrayLike, where: str) -> Array:
    if isinstance(values, np.ma.MaskedArray):
        raise InputError(f"{where}: found a masked array, expected numbers; fill its gaps first")
    try:
        array = np.asarray(values)
    except Exception as error:  # whatever the caller's object raises on conversion
        raise InputError(f"{where}: expected real numbers in one array, but {error}") from None
    if array.dtype.kind not in "fiub":
        raise InputError(
            f"{where}: found {type(values).__name__} of dtype {array.dtype}, expected real numbers"
        )
    with np.errstate(over="ignore"):  # a number that is too large becomes infinite: refused later
        return array.astype(np.float64, copy=False)


def _require_finite(array: Array, where: str) -> None:
    """Refuse numbers that are not finite, or so large that their products would overflow."""
    if array.size == 0 or (array.min() >= -LARGEST and array.max() <= LARGEST):
        return  # most often, and without a copy; no comparison with NaN is true
    usable = np.abs(array) <= LARGEST
    if not usable.all():
        at = tuple(int(i) for i in np.argwhere(~usable)[0])
        place = f" at {at}" if at else ""
        raise InputError(
            f"{where}: found {array[at]:g}{place} ({int((~usable).sum())} such values), "
            f"expected finite numbers of at most {LARGEST:g}"
        )
