"""The models to fuse and what is known of their data, checked once.

Hides: every way in which a caller's models may not fit together. Promises: two or more networks
with the same tensors of the same kinds, all finite, and counts of agreeing shapes; what does not
fit raises an error that names the model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from nafi.errors import InputError, unlike
from nafi.fusion.stored import Reread, StoredModels, StoredStates, chosen_models, outlines
from nafi.graph import (
    ModelSpec,
    TensorSpec,
    holds_numbers,
    lacks_weights,
    named_tensors,
    unwrapped,
)

Array = npt.NDArray[np.float64]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Clients:
    """S models of one architecture.

    models: in memory, or `StoredModels`, of which no two may be held at a time
    names: what errors call them
    class_counts: (S, K) samples per model and class, if known
    sample_counts: (S,) samples per model, if known
    input_moments: for each model weight -> mean squares of its inputs, if known
    among: `model_weights` and `class_weights` that are known from more models than these
    """

    models: Sequence[nn.Module]
    names: tuple[str, ...]
    class_counts: Array | None
    sample_counts: Array | None
    input_moments: Sequence[Mapping[str, Array]] | None = None
    among: tuple[Array, Array | None] | None = None

    def __len__(self) -> int:
        return len(self.models)

    @property
    def stored(self) -> bool:
        """Whether they stay in files and are read when they are needed."""
        return isinstance(self.models, StoredModels)

    @property
    def states(self) -> Sequence[Mapping[str, Tensor]]:
        """The tensors of each, as the clients have them."""
        if isinstance(self.models, StoredModels):
            return StoredStates(len(self.models), self.models.tensors)
        return [named_tensors(model) for model in self.models]

    @property
    def outlines(self) -> Iterator[Mapping[str, Tensor]]:
        """The same where shapes and types are enough, perhaps without numbers."""
        return outlines(self.models)

    def each(self, read: Callable[[int], T]) -> Sequence[T]:
        """What is made of each; again whenever it is asked for where they stay in files."""
        if self.stored:
            return Reread(len(self), read)
        return [read(s) for s in range(len(self))]

    def only(self, *chosen: int) -> Clients:
        """Some of them."""
        index = list(chosen)
        moments = self.input_moments
        return Clients(
            chosen_models(self.models, chosen),
            tuple(self.names[s] for s in chosen),
            None if self.class_counts is None else self.class_counts[index],
            None if self.sample_counts is None else self.sample_counts[index],
            None if moments is None else [moments[s] for s in chosen],
        )

    def part(self, chosen: Sequence[int]) -> Clients:
        """Some of them, each with the weight that it has among all."""
        index, classes = list(chosen), self.class_weights
        weights = self.model_weights[index], None if classes is None else classes[index]
        return replace(self.only(*chosen), among=weights)

    @property
    def model_weights(self) -> Array:
        """(S,) the weight of each model, 1 on average: by samples, unless classes say more."""
        if self.among is not None:
            return self.among[0]
        if self.sample_counts is None or self.class_counts is not None:
            return np.ones(len(self))
        return np.asarray(self.sample_counts / self.sample_counts.mean())

    @property
    def class_weights(self) -> Array | None:
        """(S, K) the share of each class that a model has seen, 1 on average over the models."""
        if self.among is not None:
            return self.among[1]
        if self.class_counts is None:
            return None
        totals = self.class_counts.sum(axis=0)
        shares = self.class_counts / np.where(totals > 0, totals, 1)
        # Nobody knows anything of a class without samples: all are equally right.
        return np.where(totals > 0, shares * len(self), 1.0)

    def weights_of(self, tensor: TensorSpec) -> Array:
        """(S, ...) the weight of each client's tensor, along the classes if it ends in them."""
        shares = self.class_weights
        axis = None if shares is None else tensor.class_axis(shares.shape[1])
        form = [len(self)] + [1] * len(tensor.axes)
        if shares is None or axis is None:
            return self.model_weights.reshape(form)
        form[axis + 1] = shares.shape[1]
        return shares.reshape(form)

    def check_classes(self, spec: ModelSpec) -> None:
        """Refuse class counts that no layer of the network ends in."""
        if self.class_counts is not None:
            check_class_axis(self.class_counts.shape[1], spec)


def check_class_axis(classes: int, spec: ModelSpec) -> None:
    """Refuse a number of classes that no layer of the network has."""
    if all(tensor.class_axis(classes) is None for tensor in spec.tensors.values()):
        raise InputError(
            f"class_counts: found {classes} classes, but no layer of the network has as many "
            "outputs; give a column for every output, in their order"
        )


def check_clients(
    models: Sequence[nn.Module],
    class_counts: npt.ArrayLike | None,
    sample_counts: npt.ArrayLike | None,
    names: Sequence[str] | None,
    input_moments: Sequence[Mapping[str, Array]] | None = None,
) -> Clients:
    """Check everything that does not need the networks' structure."""
    if isinstance(models, nn.Module) or not isinstance(models, Sequence):
        raise InputError(f"models: found {type(models).__name__}, expected a list of networks")
    if len(models) < 2:
        raise InputError(f"models: found {len(models)}, expected at least two to fuse")
    labels = tuple(f"model {s}" for s in range(len(models)))
    if names is not None:
        if isinstance(names, str) or len(names) != len(models):
            raise InputError(f"names: found {names!r}, expected {len(models)} names, one per model")
        labels = tuple(str(name) for name in names)
    if isinstance(models, StoredModels):
        _check_states(models.tensors, labels)
    else:
        models = _check_networks(models, labels)
        states = [named_tensors(model) for model in models]
        _check_states(states.__getitem__, labels)
    classes = _counts(class_counts, "class_counts", len(models), 2)
    samples = _counts(sample_counts, "sample_counts", len(models), 1)
    if samples is None and classes is not None:
        samples = classes.sum(axis=1)
    return Clients(models, labels, classes, samples, input_moments)


def _check_networks(models: Sequence[nn.Module], labels: Sequence[str]) -> tuple[nn.Module, ...]:
    """The networks without what is around them."""
    for model, label in zip(models, labels, strict=True):
        if not isinstance(model, nn.Module):
            raise InputError(f"{label}: found {type(model).__name__}, expected an nn.Module")
        if lacks_weights(model):
            raise InputError(
                f"{label} has lazy layers that never ran, so it has no weights to fuse; train it, "
                "or load its weights, first"
            )
    return tuple(unwrapped(model) for model in models)


def _check_states(read: Callable[[int], Mapping[str, Tensor]], labels: Sequence[str]) -> None:
    """Refuse tensors that are not those of the first, or not finite; one model at a time."""
    first: dict[str, Tensor] = {}
    for s, label in enumerate(labels):
        state = dict(read(s))
        first = first or {name: tensor.to("meta") for name, tensor in state.items()}
        _check_same_tensors(state, label, first, labels[0])
        _check_finite(state, label)


def _check_same_tensors(
    state: dict[str, Tensor], label: str, first: dict[str, Tensor], first_label: str
) -> None:
    advice = "; only models of one architecture can be fused"
    mismatch = unlike(state, first)
    if mismatch:
        raise InputError(f"{label} {mismatch}, unlike {first_label}{advice}")
    for name, tensor in state.items():
        if tensor.dtype != first[name].dtype:
            raise InputError(
                f"{label}: {name} is {tensor.dtype}, in {first_label} {first[name].dtype}; "
                "convert the models to one type first"
            )
        if tensor.ndim != first[name].ndim:
            raise InputError(
                f"{label}: {name} has shape {tuple(tensor.shape)}, in {first_label} "
                f"{tuple(first[name].shape)}{advice}"
            )


def _check_finite(state: dict[str, Tensor], label: str) -> None:
    for name, tensor in state.items():
        if holds_numbers(tensor) and not bool(torch.isfinite(tensor).all()):
            bad = int((~torch.isfinite(tensor)).sum())
            raise InputError(
                f"{label}: {name} holds {bad} value{'s' * (bad > 1)} that {_is(bad)} NaN or "
                "infinite; leave this model out or train it again"
            )


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def _counts(values: npt.ArrayLike | None, name: str, models: int, ndim: int) -> Array | None:
    if values is None:
        return None
    expected = f"({models}, classes)" if ndim == 2 else f"({models},)"
    try:
        counts = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(f"{name}: expected numbers of shape {expected}") from None
    if counts.ndim != ndim or len(counts) != models or counts.size == 0:
        raise InputError(
            f"{name}: found shape {counts.shape}, expected {expected}, a row for each model"
        )
    if not np.isfinite(counts).all() or (counts < 0).any():
        s = int(np.argwhere(~np.isfinite(counts) | (counts < 0))[0][0])
        raise InputError(f"{name}: found {counts[s]} for model {s}, expected counts of at least 0")
    empty = counts.reshape(models, -1).sum(axis=1) <= 0
    if empty.any():
        raise InputError(f"{name}: model {int(np.argmax(empty))} has no samples; leave it out")
    return counts
