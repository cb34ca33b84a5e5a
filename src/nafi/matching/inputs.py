"""The input of a matching: S models' neurons and the prior, checked once.

Hides: every way in which a caller may write precisions and priors, and every mistake in them.
Promises: finite float64 arrays of matching shapes, with sorted columns; anything else raises an
`InputError` with the model, what was found and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real

import numpy as np
import numpy.typing as npt

from nafi.errors import InputError
from nafi.matching.columns import Array, ColumnBlocks
from nafi.matching.gaussian import Gaussian

# Costs multiply four such numbers; outside these bounds they would overflow float64.
LARGEST = 1e50
_SMALLEST_PRIOR = 1e-50


@dataclass(frozen=True, eq=False)
class LocalModel:
    """The neurons of one model.

    neurons: (J_s, D) in sorted column order
    precision: (B,) the model's t_s, one per block of columns
    squares: (J_s, B) squared norm of each neuron within each block
    """

    index: int
    neurons: Array
    precision: Array
    squares: Array

    @property
    def width(self) -> int:
        return len(self.neurons)


@dataclass(frozen=True, eq=False)
class MatchingInput:
    """S models and the prior N(m0, 1/t0) of a global neuron, all in sorted column order."""

    models: tuple[LocalModel, ...]
    prior: Gaussian
    columns: ColumnBlocks

    @cached_property
    def precisions(self) -> Array:
        """(S, B) every model's precisions."""
        return np.stack([model.precision for model in self.models])

    @property
    def widest(self) -> int:
        return max(model.width for model in self.models)

    @cached_property
    def scratch(self) -> tuple[Array, Array]:
        """Two buffers of the size of the widest model's neurons, for short use."""
        shape = (self.widest, len(self.columns.order))
        return np.empty(shape), np.empty(shape)


def make_input(
    neurons: Sequence[npt.ArrayLike],
    precisions: float | Sequence[npt.ArrayLike],
    prior_mean: npt.ArrayLike,
    prior_precision: npt.ArrayLike,
) -> MatchingInput:
    """Check everything and sort the columns; the only way to make a `MatchingInput`."""
    matrices = _neuron_matrices(neurons)
    dimension = matrices[0].shape[1]
    mean = _per_column(prior_mean, dimension, "prior_mean")
    prior = _per_column(prior_precision, dimension, "prior_precision")
    if np.any(prior < _SMALLEST_PRIOR):
        at = int(np.argmax(prior < _SMALLEST_PRIOR))
        raise InputError(
            f"prior_precision: found {prior[at]:g} at column {at}, expected values above 0, at "
            f"least {_SMALLEST_PRIOR:g} (without a prior new neurons are undefined)"
        )
    table = np.stack([prior, *_model_precisions(precisions, len(matrices), dimension)])
    columns = ColumnBlocks.of_equal(table)
    per_block = columns.sort(table)[:, columns.starts]
    models = []
    for index, matrix in enumerate(matrices):
        ordered = columns.sort(matrix)
        squares = columns.sum_of_squares(ordered)
        models.append(LocalModel(index, ordered, per_block[index + 1], squares))
    natural = (columns.sort(prior) * columns.sort(mean))[None]
    return MatchingInput(tuple(models), Gaussian(natural, per_block[:1], columns), columns)


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
    precisions: float | Sequence[npt.ArrayLike], count: int, dimension: int
) -> list[Array]:
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
    rows = [
        _per_column(entry, dimension, f"precisions of model {s}") for s, entry in enumerate(entries)
    ]
    for s, row in enumerate(rows):
        if np.any(row < 0):
            at = int(np.argmax(row < 0))
            raise InputError(
                f"precisions of model {s}: found {row[at]:g} at column {at}, expected values of at "
                "least 0 (a precision is 1/variance; 0 means no information)"
            )
    return rows


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
    usable = np.abs(array) <= LARGEST
    if not usable.all():
        at = tuple(int(i) for i in np.argwhere(~usable)[0])
        place = f" at {at}" if at else ""
        raise InputError(
            f"{where}: found {array[at]:g}{place} ({int((~usable).sum())} such values), "
            f"expected finite numbers of at most {LARGEST:g}"
        )
