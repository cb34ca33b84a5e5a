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


def check_inputs(inputs: Inputs, name: str = "example_inputs") -> tuple[Any, ...] | dict[str, Any]:
    """The arguments as a tuple or a dict; refuses what is not the arguments of a forward.

    name: what errors call them
    """
    if isinstance(inputs, Mapping):
        if not all(isinstance(key, str) for key in inputs):
            raise SpecError(
                f"{name}: the keys of a mapping are the names of the arguments of the network's "
                "forward; write ({...},) for one argument that is a dict"
            )
        return dict(inputs)
    if isinstance(inputs, Tensor | str) or not isinstance(inputs, Sequence):
        raise SpecError(
            f"{name}: expected a tuple of the arguments of the network's forward, or a dict of its "
            f"keyword arguments, found {type(inputs).__name__}; write (x,)"
        )
    return tuple(inputs)


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
