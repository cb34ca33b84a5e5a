"""A few unlabelled inputs at the server, checked once.

Hides: the forms in which people hold inputs: tensors, loaders, tuples with labels, dicts by name.
Promises: one batch of arguments that fit the example inputs, on which the network runs; what cannot
be used raises an error that says what to give instead.
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import InputError
from nafi.fusion.networks import FusionWarning
from nafi.graph import Inputs, call, check_inputs, evaluating, first_line

PROBE_LIMIT = 1024  # inputs that are used; more cost time and memory and tell little
PROBE_FEW = 8  # fewer than these are warned of
_FORMS = (
    "a tensor, a tuple of arguments, a dict of them by name, batches of these, or 'noise' or "
    "'synthetic'"
)
NOISE, SYNTHETIC = "noise", "synthetic"  # stand for inputs that are made up


def read_probe(
    probe: object, model: nn.Module, example_inputs: Inputs, limit: int = PROBE_LIMIT
) -> Inputs:
    """The first inputs of a probe as one batch: arguments as the example inputs have them.

    probe: a tensor; a tuple, which is one batch of arguments in the order in which forward takes
        them, or of inputs and labels; a dict of arguments by name; or any other iterable of such
        batches, as a list or a DataLoader

    What comes beyond the network's arguments, as labels do, is left out. "noise" stands for inputs
    that are made up; see `noise_inputs`.
    """
    if is_word(probe, NOISE):
        probe = noise_inputs(example_inputs)
    if not example_inputs:
        raise InputError("probe: a network without inputs needs none; leave it out")
    batches: list[list[Any]] = []
    count, structure = 0, None
    for batch in _batches(probe):
        arguments = _arguments(batch, model, example_inputs)
        leaves, structure = _fitting(arguments, example_inputs)
        batches.append(leaves)
        count += batch_size(leaves)
        if count >= limit:
            break
    if structure is None or count == 0:
        raise InputError("probe: found no inputs; give some dozens of them, they need no labels")
    examples = pytree.tree_leaves(check_inputs(example_inputs))
    joined = [_joined(parts, limit, examples) for parts in zip(*batches, examples, strict=True)]
    _check_varied(joined, examples)
    inputs: Inputs = pytree.tree_unflatten(joined, structure)
    _check_runs(model, inputs)
    if min(count, limit) < PROBE_FEW:
        text = f"probe: found {count}, too few to tell what networks do; some dozens will do"
        warnings.warn(text, FusionWarning, stacklevel=3)
    return inputs


def is_word(probe: object, word: str) -> bool:
    """Whether a probe is this word; tensors do not compare with words."""
    return isinstance(probe, str) and probe == word


def noise_stands_for(example_inputs: Inputs) -> bool:
    """Whether inputs can be made up: a single tensor of numbers."""
    leaves = _tensors(check_inputs(example_inputs))
    return len(leaves) == 1 and leaves[0].is_floating_point() and leaves[0].ndim > 1


def made_up_count(example_inputs: Inputs) -> int:
    """How many inputs would be made up."""
    return len(noise_inputs(example_inputs)) if noise_stands_for(example_inputs) else 0


def made_up_probe(model: nn.Module, example_inputs: Inputs) -> Inputs | None:
    """Noise as a probe; None for a network of other inputs, or that does not run on noise."""
    try:
        return read_probe(NOISE, model, example_inputs)
    except InputError:
        return None


# The spectrum of photographs falls with the frequency: its amplitude about as 1 / f; a little
# steeper is better for small images.
_FALL = 1.5
# So many inputs are made up, fewer of large ones, whose many places tell as much: 55 photographs of
# 224 x 224 pixels.
_MADE_UP, _MADE_UP_NUMBERS, _MADE_UP_LEAST = 256, 2**23, 32


def noise_inputs(example_inputs: Inputs) -> Tensor:
    """Inputs that are made up, for whoever has none: mean 0 and deviation 1, as standardised data.

    Images, (inputs, channels, height, width), get the spectrum of photographs and channels that are
    alike; all else is white noise. Drawn by a fixed seed.
    """
    if not noise_stands_for(example_inputs):
        raise InputError(
            "probe: noise stands for a single input of numbers, such as images; give some dozens "
            "of real inputs"
        )
    (example,) = _tensors(check_inputs(example_inputs))
    generator = torch.Generator().manual_seed(0)
    shape = list(example.shape[1:])
    fitting = _MADE_UP_NUMBERS // max(1, math.prod(shape))
    count = min(max(fitting, _MADE_UP_LEAST), _MADE_UP)
    if len(shape) != 3:
        return torch.randn(count, *shape, generator=generator)
    channels, height, width = shape
    # What all channels have in common, and what is of each.
    white = torch.randn(count, 1 + channels, height, width, generator=generator)
    rows, columns = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)
    frequency = (rows.square() + columns.square()).sqrt().clamp(min=1 / max(height, width))
    shaped = torch.fft.irfft2(torch.fft.rfft2(white) / frequency**_FALL, s=(height, width))
    shaped = shaped / shaped.std(dim=(1, 2, 3), keepdim=True)
    images: Tensor = 0.9 * shaped[:, :1] + (1 - 0.9**2) ** 0.5 * shaped[:, 1:]
    return images


def batch_size(inputs: Any) -> int:
    """How many inputs there are: the length of the first tensor that has one."""
    return next((len(leaf) for leaf in _tensors(inputs) if leaf.ndim), 1)


def _tensors(inputs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]


def _batches(probe: object) -> Iterator[Any]:
    if isinstance(probe, Tensor | tuple | Mapping):
        yield probe
    elif isinstance(probe, Iterable) and not isinstance(probe, str | bytes):
        yield from probe
    else:
        hint = "; wrap a data set in a DataLoader" if hasattr(probe, "__getitem__") else ""
        raise InputError(f"probe: found {type(probe).__name__}, expected {_FORMS}{hint}")


def _arguments(batch: Any, model: nn.Module, example_inputs: Inputs) -> Inputs:
    """The arguments of forward in a batch."""
    names = _parameters(model)
    if not isinstance(example_inputs, Mapping):
        return _values(batch, names[: len(example_inputs)], example_inputs)
    if isinstance(batch, Mapping):
        return dict(zip(example_inputs, _pick(batch, list(example_inputs)), strict=True))
    # The order of a mapping says nothing: what stands first is what forward takes first.
    taken = [name for name in names if name in example_inputs]
    names = taken + [name for name in example_inputs if name not in taken]
    values = _values(batch, names, [example_inputs[name] for name in names])
    bound = dict(zip(names, values, strict=True))
    return {name: bound[name] for name in example_inputs}


def _values(batch: Any, names: Sequence[str], examples: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of these names, in their order."""
    first, wanted = examples[0], len(examples)
    if isinstance(batch, Mapping) and not isinstance(first, Mapping):
        return _pick(batch, names)
    if not isinstance(batch, list | tuple):
        batch = (batch,)
    if batch and isinstance(batch[0], list | tuple | Mapping) and type(batch[0]) is not type(first):
        return _values(batch[0], names, examples)  # (inputs, labels), several inputs
    if len(batch) < wanted:
        raise InputError(
            f"probe: found batches of {len(batch)}, expected the network's {wanted} arguments; "
            "give tuples of them, or dicts by name; on the command line, --probe module:function, "
            "which returns such a dict"
        )
    return tuple(batch[:wanted])


def _parameters(model: nn.Module) -> list[str]:
    """The names of what forward takes by position, in order."""
    return [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]


def _pick(batch: Mapping[Any, Any], names: Sequence[str]) -> tuple[Any, ...]:
    if any(name not in batch for name in names):
        found = ", ".join(map(str, batch)) or "nothing"
        raise InputError(
            f"probe: found {found}, expected inputs by the names {', '.join(names)}, which "
            "the network's forward has for them"
        )
    return tuple(batch[name] for name in names)


def _fitting(arguments: Inputs, example_inputs: Inputs) -> tuple[list[Any], Any]:
    """The leaves of arguments, each of the kind and shape of its example, and their structure."""
    leaves, structure = pytree.tree_flatten(arguments)
    examples, expected = pytree.tree_flatten(check_inputs(example_inputs))
    if structure != expected:
        raise InputError(
            f"probe: found arguments of other kinds than the example inputs ({structure}, "
            f"expected {expected})"
        )
    return [_like(leaf, like) for leaf, like in zip(leaves, examples, strict=True)], structure


def _like(leaf: Any, example: Any) -> Any:
    if not isinstance(example, Tensor):
        return leaf
    if not isinstance(leaf, Tensor):
        hint = "; torch.from_numpy makes one of it" if type(leaf).__name__ == "ndarray" else ""
        raise InputError(f"probe: found {type(leaf).__name__}, expected tensors{hint}")
    if leaf.is_meta or leaf.layout is not torch.strided:
        kind = "of the meta device, which holds no values" if leaf.is_meta else str(leaf.layout)
        raise InputError(f"probe: found a tensor {kind}, expected a dense one with its values")
    _check_shape(leaf, example)
    if leaf.is_floating_point() != example.is_floating_point():
        raise InputError(
            f"probe: found {leaf.dtype}, expected {example.dtype} as the example inputs have it; "
            "prepare the inputs as in training, pixels scaled in the same way"
        )
    _check_numbers(leaf)
    return leaf.detach().to(example.device, example.dtype)


def _check_numbers(leaf: Tensor) -> None:
    """Refuse what no layer can be fitted to, even where later ones bound it, as tanh does."""
    if bool(torch.isnan(leaf).any()):
        raise InputError("probe: found NaN among the inputs; leave those inputs out")
    # Masks that are added to the scores of attention are minus infinity, and nowhere above zero.
    if bool(torch.isinf(leaf).any()) and bool((leaf > 0).any()):
        raise InputError("probe: found infinite values among the inputs; leave those inputs out")


def _check_shape(leaf: Tensor, example: Tensor) -> None:
    if leaf.ndim == example.ndim and leaf.shape[1:] == example.shape[1:]:
        return
    expected = ", ".join(["inputs", *map(str, example.shape[1:])])
    single = leaf.shape == example.shape[1:]
    hint = "; is it a data set? Wrap it in a DataLoader" * single
    raise InputError(
        f"probe: found shape {tuple(leaf.shape)}, expected ({expected}) as the example inputs "
        f"have it{hint}"
    )


def _joined(parts: Sequence[Any], limit: int, examples: Sequence[Any]) -> Any:
    """One argument from all batches; parts end in its example.

    What is not of the example's batch, as a mask that holds for all inputs, is of the first one.
    """
    *leaves, example = parts
    if not _is_batched(example, examples):
        return leaves[0]
    return torch.cat(leaves)[:limit]


def _is_batched(leaf: Any, leaves: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == batch_size(leaves)


def _check_varied(leaves: Sequence[Any], examples: Sequence[Any]) -> None:
    """Refuse inputs that are all the same: responses to them tell no neuron from another."""
    pairs = zip(leaves, examples, strict=True)
    batched = [leaf for leaf, example in pairs if _is_batched(example, examples)]
    if all(_is_constant(leaf) for leaf in batched):
        raise InputError(
            "probe: found inputs that are all the same, expected such as the network is for; they "
            "need no labels"
        )


def _is_constant(inputs: Tensor) -> bool:
    reference = inputs[:1] if len(inputs) > 1 else inputs.flatten()[:1]
    return bool((inputs == reference).all())


def _check_runs(model: nn.Module, inputs: Inputs) -> None:
    try:
        with evaluating(model):
            outputs = call(model, inputs)
    except Exception as error:  # whatever the network's own code raises
        raise InputError(
            f"probe: the network does not run on {batch_size(inputs)} inputs at once: "
            f"{first_line(error)}"
        ) from None
    for output in _tensors(outputs):
        # Minus infinity is what choices get that are masked.
        if output.is_floating_point() and not bool((output < math.inf).all()):
            raise InputError(
                "probe: the network returns NaN or infinite values on these inputs; are they "
                "prepared as in training?"
            )
