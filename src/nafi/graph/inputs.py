"""The arguments of a network's forward.

Hides: whether they are positional or keywords. Promises: a network is run on them in one way
everywhere, and what cannot be arguments is refused in one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError, SpecError

# A tuple of positional arguments, or a mapping of keyword arguments. Tensors may also lie in
# tuples, lists and dicts within.
Inputs = Sequence[Any] | Mapping[str, Any]


def check_inputs(example_inputs: Inputs) -> tuple[Any, ...] | dict[str, Any]:
    """The arguments as a tuple or a dict; refuses what is not the arguments of a forward."""
    if isinstance(example_inputs, Mapping):
        if not all(isinstance(name, str) for name in example_inputs):
            raise SpecError(
                "example_inputs: the keys of a mapping are the names of the arguments of the "
                "network's forward; write ({...},) for one argument that is a dict"
            )
        return dict(example_inputs)
    if isinstance(example_inputs, Tensor | str) or not isinstance(example_inputs, Sequence):
        raise SpecError(
            "example_inputs: expected a tuple of the arguments of the network's forward, or a dict "
            f"of its keyword arguments, found {type(example_inputs).__name__}; write (x,)"
        )
    return tuple(example_inputs)


def arguments(inputs: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments."""
    return ((), dict(inputs)) if isinstance(inputs, Mapping) else (tuple(inputs), {})


def call(model: nn.Module, inputs: Inputs) -> Any:
    """Run a network, on copies, for it may write into its inputs."""
    args, kwargs = pytree.tree_map(_copied, arguments(inputs))
    return model(*args, **kwargs)


def _copied(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


def returned_tensors(result: Any) -> list[Tensor]:
    """The tensors within what a network returns, dataclasses included."""
    tensors = []
    for leaf in pytree.tree_leaves(result):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
        elif is_dataclass(leaf):
            tensors += returned_tensors([getattr(leaf, field.name) for field in fields(leaf)])
    return tensors


def run_batches(model: nn.Module, batches: Iterable[Any], caller: str) -> None:
    """Run a network on batches of inputs, for what can be seen on the way."""
    count = 0
    try:
        for batch in batches:
            # A loader gives inputs with their labels.
            inputs = batch[0] if isinstance(batch, list | tuple) else batch
            call(model, inputs if isinstance(inputs, Mapping) else (inputs,))
            count += 1
    except (RuntimeError, TypeError, IndexError, ValueError) as error:
        raise InputError(
            f"{caller}: the network does not run on a batch: {first_line(error)}; expected "
            "batches of inputs, tuples that begin with them, or dicts of keyword arguments"
        ) from None
    if not count:
        raise InputError(f"{caller}: no batch was given")


def first_line(error: Exception | None) -> str:
    """The first line of an error's message that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), repr(error))
