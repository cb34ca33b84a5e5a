"""One network at many widths.

Hides: rebuilding, folding, and how first weights are drawn. Promises: for every form of the
network a module that runs, and first weights that depend on a seed alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from nafi.errors import InputError, few
from nafi.federated.randomness import seeded
from nafi.graph import fold_batchnorm
from nafi.graph.groups import groups
from nafi.graph.rebuild import rebuild
from nafi.graph.spec import ModelSpec
from nafi.graph.trace import Inputs, named_tensors

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Form:
    """What tells two networks of one architecture apart, beside their weights.

    widths: neurons of each group
    folded: the (layer, batchnorm) pairs that were made one layer
    """

    widths: Mapping[str, int]
    folded: tuple[tuple[str, str], ...] = ()


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

        example_inputs: the arguments of its forward, as a tuple; only shapes matter
        spec: from `nafi.groups`, if you have it
        """
        self.factory = factory
        self.example_inputs = tuple(example_inputs)
        self._first = self._draw(0)
        known = groups(self._first, self.example_inputs) if spec is None else spec
        self.spec = replace(known, example_inputs=self.example_inputs)
        self._made: dict[str, tuple[nn.Module, ModelSpec]] = {}

    @property
    def form(self) -> Form:
        """The network as the factory makes it."""
        return Form(self.spec.widths)

    def network(self, form: Form) -> tuple[nn.Module, ModelSpec]:
        """A network of this form with no weights of note, and its spec."""
        key = repr((sorted(form.widths.items()), form.folded))
        if key not in self._made:
            # A run goes from form to form: the one before is asked for once more, older ones never.
            self._made = dict(list(self._made.items())[-1:])
            self._made[key] = self._shaped(self._first, form)
        model, spec = self._made[key]
        return copy.deepcopy(model), spec

    def filled(self, form: Form, tensors: Tensors) -> nn.Module:
        """The network with these weights, all of them."""
        model, spec = self.network(form)
        missing = [name for name in spec.axes if name not in tensors]
        if missing:
            raise InputError(f"weights of {few(missing)} are missing")
        return load_tensors(model, tensors)

    def drawn(self, form: Form, seed: int) -> dict[str, Tensor]:
        """First weights; neurons beyond those of the factory's network are zero."""
        model, spec = self._shaped(self._draw(seed), form)
        found = named_tensors(model)
        return {name: found[name].detach() for name in spec.axes}

    def _draw(self, seed: int) -> nn.Module:
        with seeded(seed):
            model = self.factory()
        if not isinstance(model, nn.Module):
            found = type(model).__name__
            raise InputError(f"factory: returned {found}, expected an nn.Module")
        return model

    def _shaped(self, model: nn.Module, form: Form) -> tuple[nn.Module, ModelSpec]:
        shaped = rebuild(model, self.spec, form.widths)
        spec = self.spec.resized(form.widths)
        return fold_batchnorm(shaped, spec, form.folded) if form.folded else (shaped, spec)


def load_tensors(model: nn.Module, tensors: Tensors) -> nn.Module:
    """Put weights into a network, in place; tensors that are not given stay."""
    own = named_tensors(model)
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name not in own or own[name].shape != tensor.shape:
                raise InputError(
                    f"{name}: found shape {tuple(tensor.shape)}, expected "
                    f"{tuple(own[name].shape) if name in own else 'no such tensor'}"
                )
            own[name].copy_(tensor)
    return model
