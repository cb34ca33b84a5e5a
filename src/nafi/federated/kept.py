"""Clients' networks that stay on disk, as the fusion reads them: one client at a time.

Hides: names that are one tensor, and when all networks are needed at once. Promises: what networks
in memory would give, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from nafi.federated.architecture import Architecture, Form, Tensors
from nafi.fusion import AligningMethod, Method, StoredModels
from nafi.graph import Inputs, named_tensors


class KeptModels(StoredModels):
    """Networks of one form.

    states: the tensors of each, as `on_disk` gives them
    """

    def __init__(self, architecture: Architecture, form: Form, states: Sequence[Tensors]) -> None:
        self._architecture, self._form, self._states = architecture, form, states
        model, spec = architecture.network(form)
        self._names = {name: spec.aliases.get(name, name) for name in named_tensors(model)}
        self._outline = {name: t.detach().to("meta") for name, t in named_tensors(model).items()}

    def __len__(self) -> int:
        return len(self._states)

    def tensors(self, index: int) -> Mapping[str, Tensor]:
        state = self._states[index]
        return {name: state[kept].detach() for name, kept in self._names.items()}

    def outline(self, index: int) -> Mapping[str, Tensor]:
        return self._outline

    def with_inputs(self, example_inputs: Inputs) -> KeptModels:
        return self

    def network(self, index: int) -> nn.Module:
        return self._architecture.sharing(self._form, self._states[index])


def networks_of(
    architecture: Architecture, form: Form, states: Sequence[Tensors], method: Method
) -> Sequence[nn.Module]:
    """The clients' networks, read one at a time if the method can do with that."""
    screened = isinstance(method, AligningMethod) and method.screen.active
    # Heads, and bases that may be turned, are read many times.
    groups = architecture.spec.groups.values()
    at_once = any(group.parent is not None or group.rigid for group in groups)
    if screened or at_once or not method.streams:
        return [architecture.sharing(form, state) for state in states]
    return KeptModels(architecture, form, states)
