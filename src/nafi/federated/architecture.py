"""One network at many widths.

Hides: rebuilding, folding, and how first weights are drawn. Promises: for every form of the
network a module that runs, what its tensors look like, and first weights that depend on a seed
alone; a network is rebuilt once for its widths, however often it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn

from nafi.errors import InputError, few
from nafi.federated.randomness import seeded
from nafi.graph import (
    Inputs,
    Kind,
    ModelSpec,
    check_inputs,
    copy_network,
    fingerprint,
    fold_batchnorm,
    groups,
    named_tensors,
    rebuild,
    resize_state,
    unwrapped,
)

Tensors = Mapping[str, Tensor]
# No layer is wider: sizes of tensors stay numbers that torch can have.
_WIDEST = 2**31 - 1
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Form:
    """What tells two networks of one architecture apart, beside their weights.

    widths: neurons of each group
    folded: the (layer, batchnorm) pairs that were made one layer
    """

    widths: Mapping[str, int]
    folded: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        wrong = [name for name, width in self.widths.items() if not 1 <= width <= _WIDEST]
        if wrong:
            width = self.widths[wrong[0]]
            raise InputError(f"{wrong[0][:60]}: found a width of {width}, expected at least 1")

    @property
    def key(self) -> str:
        """The same for forms of equal networks."""
        return repr((sorted(self.widths.items()), self.folded))


@dataclass(frozen=True)
class Expected:
    """What a tensor that is sent must look like.

    variance: no number is below zero; total: a sum over samples, which may be large
    required: it cannot be left out
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    variance: bool = False
    required: bool = True
    total: bool = False


Shapes = Mapping[str, Expected]


class Architecture:
    """The user's network.

    spec: its groups, at the widths that the factory gives it
    """

    def __init__(
        self,
        factory: Callable[[], nn.Module],
        example_inputs: Inputs,
        spec: ModelSpec | None = None,
    ) -> None:
        """factory: makes the network, with first weights from torch's random numbers.

        example_inputs: the arguments of its forward, a tuple or a dict; only shapes matter
        spec: from `nafi.groups`, if you have it
        """
        self.factory = factory
        self.example_inputs = check_inputs(example_inputs)
        self._first = self._draw(0)
        known = groups(self._first, self.example_inputs) if spec is None else spec
        self.spec = replace(known, example_inputs=self.example_inputs)
        # A run goes from form to form: that of the round and the one to come are asked for often,
        # older ones never.
        self._rebuilt: dict[str, nn.Module] = {}
        self._made: dict[str, tuple[nn.Module, ModelSpec]] = {}

    @property
    def form(self) -> Form:
        """The network as the factory makes it."""
        return Form(self.spec.widths)

    @cached_property
    def fingerprint(self) -> str:
        """Letters for what the network's code does, whatever its weights."""
        return fingerprint(self._first, self.example_inputs)

    def network(self, form: Form) -> tuple[nn.Module, ModelSpec]:
        """A network of this form with no weights of note, and its spec."""
        model, spec = self._network(form)
        return copy_network(model), spec

    def spec_of(self, form: Form) -> ModelSpec:
        """The spec of a network of this form."""
        return self._network(form)[1]

    def shapes(self, form: Form) -> Shapes:
        """What the tensors of a network of this form look like."""
        model, spec = self._network(form)
        tensors = named_tensors(model)
        return {
            name: Expected(
                tuple(tensors[name].shape), tensors[name].dtype, tensor.kind is Kind.VARIANCE
            )
            for name, tensor in spec.tensors.items()
        }

    def filled(self, form: Form, tensors: Tensors) -> nn.Module:
        """The network with these weights, all of them."""
        model, spec = self.network(form)
        _check_whole(spec, tensors)
        return load_tensors(model, tensors)

    def sharing(self, form: Form, tensors: Tensors) -> nn.Module:
        """The network whose weights are these very tensors, to be left as it is.

        Nothing is copied: tensors may be on disk.
        """
        model, spec = self._network(form)
        _check_whole(spec, tensors)
        own = named_tensors(model)
        replaced = {}
        for name, tensor in tensors.items():
            _check_fits(own, name, tensor)
            replaced[id(own[name])] = _in_place_of(own[name], tensor)
        return copy_network(model, replaced)

    def drawn(self, form: Form, seed: int) -> dict[str, Tensor]:
        """First weights; neurons beyond those of the factory's network are zero."""
        model, spec = self._draw(seed), self.spec
        if form.folded:
            model, spec = fold_batchnorm(model, spec, form.folded)
        resized = resize_state(named_tensors(model), spec, form.widths)
        return {name: resized[name].detach() for name in spec.axes}

    def _draw(self, seed: int) -> nn.Module:
        with seeded(seed):
            model = self.factory()
        if not isinstance(model, nn.Module):
            kind = type(model).__name__
            raise InputError(f"factory: returned {kind}, expected an nn.Module")
        return unwrapped(model)

    def _network(self, form: Form) -> tuple[nn.Module, ModelSpec]:
        """As `network`, to be left as it is."""
        return _remembered(self._made, form.key, lambda: self._folded(form))

    def _folded(self, form: Form) -> tuple[nn.Module, ModelSpec]:
        model, spec = self._wide(form), self.spec.resized(form.widths)
        return fold_batchnorm(model, spec, form.folded) if form.folded else (model, spec)

    def _wide(self, form: Form) -> nn.Module:
        """The network at the widths of a form, with nothing folded."""
        self.spec.resized(form.widths)  # refuses groups that it does not have
        if {**self.spec.widths, **form.widths} == self.spec.widths:
            return self._first
        unfolded = Form(form.widths)
        return _remembered(
            self._rebuilt, unfolded.key, lambda: rebuild(self._first, self.spec, form.widths)
        )


def _remembered(
    made: dict[str, _Value], key: str, make: Callable[[], _Value], most: int = 3
) -> _Value:
    """What was made for this key, or make it; older ones than the last few are forgotten."""
    if key not in made:
        value = make()
        while len(made) >= most:
            del made[next(iter(made))]
        made[key] = value
    return made[key]


def load_tensors(model: nn.Module, tensors: Tensors) -> nn.Module:
    """Put weights into a network, in place; tensors that are not given stay."""
    into = named_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            _check_fits(into, name, tensor)
            into[name].copy_(tensor)
    return model


def _check_whole(spec: ModelSpec, tensors: Tensors) -> None:
    missing = [name for name in spec.axes if name not in tensors]
    if missing:
        raise InputError(f"weights of {few(missing)} are missing")


def _check_fits(into: Tensors, name: str, tensor: Tensor) -> None:
    if name not in into or into[name].shape != tensor.shape:
        raise InputError(
            f"{name}: found shape {tuple(tensor.shape)}, expected "
            f"{tuple(into[name].shape) if name in into else 'no such tensor'}"
        )


def _in_place_of(before: Tensor, tensor: Tensor) -> Tensor:
    """A tensor as a network holds it."""
    value = tensor.detach().to(before.dtype)
    if not isinstance(before, nn.Parameter):
        return value
    return nn.Parameter(value, requires_grad=before.requires_grad)
