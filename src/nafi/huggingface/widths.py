"""Which widths a configuration of transformers can state.

Hides: what architectures call the width of a layer; it is found by making the network at another
width, without its numbers. Promises: a field is only used for the groups that it sets, all of them
and nothing else.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nafi.errors import InputError, NafiError, few
from nafi.graph import ModelSpec, named_tensors, rebuild
from nafi.huggingface.networks import shapes_of

_STEP = 8  # neurons more, to see what a field does
# Fields whose value None stands for a width that follows from others.
_OPTIONAL = ("n_inner", "ffn_dim", "intermediate_size", "d_ff")

Shapes = Mapping[str, torch.Size]


@dataclass(frozen=True)
class Field:
    """An entry of a configuration that is the width of these groups, in all layers."""

    name: str
    groups: tuple[str, ...]


def width_fields(model: nn.Module, spec: ModelSpec) -> list[Field]:
    """The fields of a network's configuration that set widths of groups. spec: of the network."""
    kind, config = type(model), model.config
    base = shapes_of(kind, config, kind.__name__)
    at_base = _at(spec, base)
    fields = []
    for name, width in _candidates(config, at_base):
        changed = copy.deepcopy(config)
        setattr(changed, name, width + _STEP)
        try:
            shapes = shapes_of(kind, changed, kind.__name__)
        except NafiError:  # it must be a multiple of something, say
            continue
        groups = _explained(at_base, base, shapes, width)
        if groups:
            fields.append(Field(name, groups))
    return fields


def limited(spec: ModelSpec, fields: list[Field], max_width: Any) -> dict[str, Any]:
    """`max_width` of a method, such that all groups without a field keep their width."""
    free = {group for field in fields for group in field.groups}
    given = max_width if isinstance(max_width, Mapping) else dict.fromkeys(free, max_width)
    return {name: given.get(name) if name in free else 1.0 for name in spec.groups}


def says_widths(model: nn.Module) -> bool:
    """Whether a network's configuration would make its tensors, as far as shapes tell."""
    shapes = {name: tensor.shape for name, tensor in named_tensors(model).items()}
    return shapes == shapes_of(type(model), model.config, type(model).__name__)


def is_filled_up(model: nn.Module, spec: ModelSpec) -> bool:
    """Whether `expressed` would add neurons, since layers of one field differ in width."""
    if says_widths(model):
        return False
    fields = width_fields(model, spec)
    return any(len({spec.widths[name] for name in field.groups}) > 1 for field in fields)


def expressed(model: nn.Module, spec: ModelSpec) -> nn.Module:
    """The same network with a configuration that says its widths.

    Layers for which there is one field are made equally wide: neurons that are zero are added to
    the narrower ones, which changes nothing. Refuses widths that no field can state.
    """
    fields = width_fields(model, spec)
    widths = {
        group: max(spec.widths[other] for other in field.groups)
        for field in fields
        for group in field.groups
    }
    changed = rebuild(model, spec, widths)
    for field in fields:
        setattr(changed.config, field.name, widths[field.groups[0]])
    if says_widths(changed):
        return changed
    kind = type(model).__name__
    before = _at(spec, shapes_of(type(model), model.config, kind)).widths
    others = [
        f"{name} ({spec.widths[name]}, was {width})"
        for name, width in before.items()
        if name not in widths and spec.widths[name] != width
    ]
    what = f"has no field for the widths of {few(others)}" if others else "makes other tensors"
    raise InputError(
        f"the configuration of {kind} {what}; fuse with max_width=1.0 (--max-width 1x), or write a "
        ".safetensors file, which nafi.load reads"
    )


def _at(spec: ModelSpec, shapes: Shapes) -> ModelSpec:
    """The spec at the widths of these shapes."""
    return spec.fitted({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})


def _candidates(config: Any, spec: ModelSpec) -> Iterator[tuple[str, int]]:
    """Fields that may be the width of groups, and this width."""
    widths = sorted({spec.widths[name] for name in _free(spec)})
    for name, value in config.to_dict().items():
        if isinstance(value, int) and not isinstance(value, bool) and value in widths:
            yield name, value
        elif value is None and name in _OPTIONAL:
            yield from ((name, width) for width in widths)


def _free(spec: ModelSpec) -> list[str]:
    return [name for name, group in spec.groups.items() if not group.rigid and not group.parent]


def _explained(spec: ModelSpec, base: Shapes, shapes: Shapes, width: int) -> tuple[str, ...]:
    """The groups of this width whose change, and nothing else, gives other shapes; or none."""
    changed = {name for name, shape in shapes.items() if base.get(name) != shape}
    groups = tuple(
        name
        for name in _free(spec)
        if spec.widths[name] == width and changed & set(spec.tensors_of(name))
    )
    if not groups or base.keys() != shapes.keys():
        return ()
    wider = spec.resized(dict.fromkeys(groups, width + _STEP))
    same = all(torch.Size(wider.shape(name)) == shapes[name] for name in spec.axes)
    return groups if same else ()
