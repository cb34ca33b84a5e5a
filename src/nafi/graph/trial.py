"""A network at other widths, tried out before it is made.

Hides: which modules of the user's own remember a size that the tensors have already, and that sizes
are tried on tensors without numbers first. Promises: as few attributes change as the network needs;
what is found to run computes, cut back to its old widths, what the old network did.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils import _pytree as pytree

from nafi.errors import SpecError
from nafi.graph.check import TOLERANCE, difference, probe_of, run
from nafi.graph.groups import analyse, sized_ops
from nafi.graph.inputs import Inputs, call, check_inputs, first_line, returned_tensors
from nafi.graph.permute import permute, random_permutations
from nafi.graph.recording import recording_alone
from nafi.graph.resize import load_resized, resized
from nafi.graph.spec import ModelSpec
from nafi.graph.tensors import Axis, Segment
from nafi.graph.trace import named_tensors
from nafi.graph.weight_norm import fill_directions

Shapes = list[tuple[int, ...]]
# So many ways to read what modules remember of sizes are tried.
_TRIES = 64


@dataclass(frozen=True)
class Setting:
    """What an attribute of a module is to be."""

    path: str
    attribute: str
    value: Any

    def applied(self, network: nn.Module) -> Setting:
        """Set it; returns the way back."""
        module = network.get_submodule(self.path)
        before = getattr(module, self.attribute)
        setattr(module, self.attribute, self.value)
        return Setting(self.path, self.attribute, before)


Settings = Sequence[Setting]
# Says what is wrong with a network with these settings, if anything.
_See = Callable[[Settings], str | None]


class Hollow:
    """A network on tensors without numbers, of which only the shapes are known.

    Runs cost neither memory nor arithmetic. `runs` is false where the code looks at numbers.
    """

    def __init__(self, model: nn.Module, spec: ModelSpec, inputs: Inputs) -> None:
        self._model, self._spec = model, spec
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._inputs: Inputs = pytree.tree_map(self._emptied, check_inputs(inputs))

    @property
    def runs(self) -> bool:
        return self._expected is not None

    @cached_property
    def _expected(self) -> Shapes | None:
        try:
            return self._shapes(self._built(self._spec))
        except Exception:  # whatever torch cannot do without numbers
            return None

    def see(self, new_spec: ModelSpec) -> _See:
        """Tries settings of the network at the widths of this spec."""
        return partial(self._trouble, self._built(new_spec))

    def _trouble(self, network: nn.Module, settings: Settings) -> str | None:
        back = [setting.applied(network) for setting in settings]
        try:
            return _unlike(self._shapes(network), self._expected)
        except Exception as error:
            return f"fails: {first_line(error)}"
        finally:
            for setting in back:
                setting.applied(network)

    def _built(self, spec: ModelSpec) -> nn.Module:
        tensors = named_tensors(self._model)
        with self._mode:
            state = {n: torch.empty(spec.shape(n), dtype=tensors[n].dtype) for n in spec.axes}
        return load_resized(self._model, self._spec, spec, state).eval()

    def _shapes(self, network: nn.Module) -> Shapes:
        with recording_alone(), self._mode, torch.no_grad(), torch.random.fork_rng(devices=[]):
            return [tuple(tensor.shape) for tensor in returned_tensors(call(network, self._inputs))]

    def _emptied(self, leaf: Any) -> Any:
        with self._mode:
            return torch.empty_like(leaf, device="cpu") if isinstance(leaf, Tensor) else leaf


@dataclass(frozen=True, eq=False)
class Trial:
    """A network, its spec, and the spec at the widths that it is to have."""

    model: nn.Module
    spec: ModelSpec
    new_spec: ModelSpec
    inputs: Inputs
    hollow: Hollow

    @property
    def changed(self) -> list[str]:
        return [
            n for n, group in self.spec.groups.items() if group.width != self.new_spec.widths[n]
        ]

    def fitting(self, tries: int = _TRIES) -> tuple[Settings, str | None]:
        """What modules have to remember, and what is wrong all the same, if anything.

        tries: ways to read what modules remember of sizes, before giving up
        """
        if not self.changed:
            return [], None
        settings, trouble = self.fitting_shapes(tries)
        if trouble is not None:
            return settings, trouble
        told: list[Setting] = []
        see = partial(self._trouble, told)
        trouble = see(settings)
        if trouble is not None:
            # A size may matter for numbers, where all shapes are right without.
            settings, trouble = self._adapted(see, trouble, tries)
        return [*settings, *told], trouble

    def fitting_shapes(self, tries: int = _TRIES) -> tuple[Settings, str | None]:
        """The same, as far as shapes tell."""
        if not self.hollow.runs:
            return [], None
        see = self.hollow.see(self.new_spec)
        trouble = see([])
        return ([], None) if trouble is None else self._adapted(see, trouble, tries)

    def advice(self, trouble: str) -> str:
        """Which lines of the network's code fix a size that should follow from the tensors."""
        lines = [
            f"{op.name} to a size with {size} (group {group}) in {op.source or op}"
            for op, size, group in sized_ops(self.model, self.inputs, self.changed)
        ]
        text = f"at other widths of {', '.join(self.changed)} the network {trouble}."
        if lines:
            text += " Its code may fix a size: " + "; ".join(dict.fromkeys(lines)) + "."
            text += " Write x.flatten(1), or view(x.size(0), -1), or take sizes from x.shape"
        return text

    def _adapted(self, see: _See, trouble: str, tries: int) -> tuple[Settings, str | None]:
        """Let modules of the user's own remember other sizes, such as a number of heads."""
        tried: list[_Remembered] = []
        for level in (1, 2):
            found = _remembered(self, _owners_above(self.spec, self.changed, level))
            if found and found != tried:
                settings = _fewest(found, see, tries)
                if settings is not None:
                    return settings, None
            tried = found
        return [], trouble

    def _trouble(self, told: list[Setting], settings: Settings) -> str | None:
        """What is wrong with the new network on the example inputs, if anything.

        Cut back to the old widths, the new network must be the old one, for what was cut is zero.
        This is seen with disturbed weights: a layer that starts at zero would hide everything.
        Numbers do not tell if a rigid group changed, and may not tell if 5 heads of 7 are read as 7
        of 5: then the new network is analysed, and must be made of the neurons asked for.

        told: gets the sizes of normalisations without tensors
        """
        generator = torch.Generator().manual_seed(0)
        probe, inputs, dtype = probe_of(self.model, self.inputs, generator)
        with torch.no_grad():
            if any(self.new_spec.widths[n] < g.width for n, g in self.spec.groups.items()):
                self._cut(probe)
            expected = run(probe, inputs)
            wide = self._widened(probe)
        del probe  # its tensors may be as large as all others together
        for setting in settings:
            setting.applied(wide)
        try:
            with _bare_norms_seen(wide, told):
                outputs = run(wide, inputs)
        except Exception as error:
            return f"fails: {first_line(error)}"
        trouble = _unlike(_shapes(outputs), _shapes(expected))
        if trouble is not None:
            return trouble
        is_rigid = any(self.spec.groups[name].rigid for name in self.changed)
        if is_rigid or any((s.path, s.attribute) in self._ambiguous for s in settings):
            derived = analyse(wide, inputs)
            if _factors(derived) != _factors(self.new_spec):
                return f"takes its neurons apart in another way: {derived.widths}"
            if is_rigid:
                return None
        gap = difference(outputs, expected)
        if gap > 10 * TOLERANCE[dtype]:
            return f"computes something else (by {gap:.2g})"
        # What is zero may lie where the code treats it in another way than its group.
        orders = random_permutations(self.new_spec, generator)
        gap = difference(run(permute(wide, self.new_spec, orders), inputs), outputs)
        return None if gap <= 10 * TOLERANCE[dtype] else "treats new neurons in another way"

    @cached_property
    def _ambiguous(self) -> set[tuple[str, str]]:
        """The attributes, by module and name, that could be one of several sizes."""
        found = _remembered(self, _owners_above(self.spec, self.changed, 2))
        several = [size for size in found if len(size.choices) > 1]
        return {(s.path, s.attribute) for size in several for s in size.choices[0]}

    def _cut(self, probe: nn.Module) -> None:
        """Set to zero, in place, what the new network will not have."""
        for name, tensor in named_tensors(probe).items():
            narrow = resized(tensor, name, self.spec, self.new_spec)
            tensor.copy_(resized(narrow, name, self.new_spec, self.spec))
        fill_directions(probe)

    def _widened(self, probe: nn.Module) -> nn.Module:
        """The network at the new widths; tensors that do not change are those of the probe."""
        # Where one group grows as another shrinks, a tensor changes and keeps its shape.
        touched = {name for group in self.changed for name in self.spec.tensors_of(group)}
        state = {
            name: resized(tensor.detach(), name, self.spec, self.new_spec)
            if name in touched
            else tensor
            for name, tensor in named_tensors(probe).items()
            if name in self.spec.axes
        }
        return fill_directions(load_resized(probe, self.spec, self.new_spec, state))


def make_trial(
    model: nn.Module, spec: ModelSpec, widths: Mapping[str, int], example_inputs: Inputs | None
) -> Trial:
    """example_inputs: those that the spec remembers, unless others are given."""
    inputs = spec.example_inputs if example_inputs is None else example_inputs
    if inputs is None:
        raise SpecError("rebuild needs example_inputs to see that the new network runs")
    inputs = check_inputs(inputs)
    spec.check_shapes(named_tensors(model))
    return Trial(model, spec, spec.resized(widths), inputs, Hollow(model, spec, inputs))


def _shapes(tensors: Sequence[Tensor]) -> Shapes:
    return [tuple(tensor.shape) for tensor in tensors]


def _factors(spec: ModelSpec) -> dict[str, list[list[list[int]]]]:
    """What every axis is a sum and product of, in numbers."""
    widths = spec.widths
    return {
        name: [
            [[widths[f] if isinstance(f, str) else f for f in segment.factors] for segment in axis]
            for axis in axes
        ]
        for name, axes in spec.axes.items()
    }


def _unlike(shapes: Shapes, expected: Shapes | None) -> str | None:
    return None if shapes == expected else f"returns shapes {shapes} instead of {expected}"


# --------------------------------------------------------------- what modules remember of sizes


@dataclass
class _Remembered:
    """A size that modules of one class keep in one attribute.

    choices: what it may have to be in each module; more than one where sizes were equal that now
        differ, such as a number of heads and one of groups
    """

    choices: list[list[Setting]]

    @classmethod
    def of(cls, modules: Sequence[Sequence[Setting]]) -> _Remembered:
        """modules: for each module the settings to choose from, in the same order for alike ones"""
        most = max(map(len, modules))
        choices = [[m[min(index, len(m) - 1)] for m in modules] for index in range(most)]
        return cls(
            [choice for index, choice in enumerate(choices) if choice not in choices[:index]]
        )


def _fewest(remembered: Sequence[_Remembered], see: _See, tries: int) -> Settings | None:
    """The settings that the network needs, if there are any with which it runs.

    A number that happens to equal a size, such as a window, is left alone: an attribute is changed
    only if the network does not run without.
    """
    for chosen in islice(_readings(remembered), tries):
        if see(_flat(chosen)) is None:
            for settings in chosen:
                rest = [other for other in chosen if other is not settings]
                chosen = rest if see(_flat(rest)) is None else chosen
            return _flat(chosen)
    return None


def _readings(remembered: Sequence[_Remembered]) -> Iterator[Sequence[Settings]]:
    """Ways to read attributes as sizes, the likely ones first.

    All of them, in all their meanings; then all but one: a number that only looks like a size
    spoils the others.
    """
    yield from product(*(size.choices for size in remembered))
    for choice in product(*(size.choices for size in remembered)):
        for spared in choice:
            yield [settings for settings in choice if settings is not spared]


def _flat(chosen: Sequence[Settings]) -> Settings:
    return [setting for settings in chosen for setting in settings]


def _remembered(trial: Trial, paths: Collection[str]) -> list[_Remembered]:
    """Attributes with the value of a size that changed; equal ones of one class go together.

    A module remembers sizes of the tensors below it: blocks of a network may have other widths.
    """
    spec = trial.spec
    kept: dict[tuple[type, str, Any], list[list[Setting]]] = {}
    for path in sorted(paths):
        below = [g for g in spec.groups if any(_is_below(n, path) for n in _names(spec, g))]
        sizes = _changed_sizes(spec, trial.new_spec, below)
        for kind, old, choices in _attributes_of_size(trial.model, path, sizes):
            kept.setdefault((kind, choices[0].attribute, old), []).append(choices)
    return [_Remembered.of(modules) for modules in kept.values()]


def _is_below(tensor: str, path: str) -> bool:
    return not path or tensor.startswith(f"{path}.")


def _attributes_of_size(
    model: nn.Module, path: str, sizes: Mapping[int, Sequence[int]]
) -> Iterator[tuple[type, Any, list[Setting]]]:
    """(class, value, what it may have to be) of all that a module may remember of sizes."""
    module = model.get_submodule(path)
    if not type(module).__module__.startswith("torch.nn"):
        for attribute, value in vars(module).items():
            if type(value) is int and value in sizes:
                choices = [Setting(path, attribute, new) for new in sizes[value]]
                yield type(module), value, choices
    for name, norm in module.named_children():
        # Without weights there is no tensor that its shape could have been taken from.
        if isinstance(norm, nn.LayerNorm) and norm.weight is None:
            old = tuple(norm.normalized_shape)
            new = tuple(sizes.get(n, [n])[0] for n in old)
            if new != old:
                place = f"{path}.{name}".removeprefix(".")
                yield type(norm), old, [Setting(place, "normalized_shape", new)]


def _owners_above(spec: ModelSpec, changed: Sequence[str], level: int) -> set[str]:
    """The modules that hold the tensors of some groups, and those up to so many levels above."""
    paths = {name for group in changed for name in _names(spec, group)}
    owners: set[str] = set()
    for _ in range(level + 1):
        paths = {path.rpartition(".")[0] for path in paths if path}
        owners |= paths
    return owners


def _names(spec: ModelSpec, group: str) -> list[str]:
    """All names of the tensors with neurons of a group."""
    tensors = set(spec.tensors_of(group))
    return [*tensors, *(other for other, name in spec.aliases.items() if name in tensors)]


def _changed_sizes(
    spec: ModelSpec, new_spec: ModelSpec, groups: Sequence[str]
) -> dict[int, list[int]]:
    """Old size -> new sizes of all groups, blocks and axes of this size, if one of them changes."""
    pieces = dict.fromkeys(piece for group in groups for piece in _pieces(spec, group))
    sizes: dict[int, list[int]] = {}
    for piece in pieces:
        old, new = (
            sum(part.size(widths) for part in piece) for widths in (spec.widths, new_spec.widths)
        )
        sizes.setdefault(old, []).append(new)
    return {old: new for old, new in sizes.items() if set(new) != {old}}


def _pieces(spec: ModelSpec, group: str) -> Iterator[Axis]:
    """The axes that hold a group, their segments, and the stretches of these that hold it."""
    for place in spec.places(group):
        axis = spec.axes[place.tensor][place.axis]
        yield axis
        for segment in axis:
            ends = range(len(segment.factors) + 1)
            stretches = (Segment(segment.factors[a:b]) for a in ends for b in ends if a < b)
            yield from ((stretch,) for stretch in stretches if group in stretch.groups)


@contextmanager
def _bare_norms_seen(model: nn.Module, told: list[Setting]) -> Iterator[None]:
    """Let normalisations without tensors learn their size when the network runs; tell of it."""
    hooks = [
        module.register_forward_pre_hook(partial(_see_size, path, told))
        for path, module in model.named_modules()
        if isinstance(module, _InstanceNorm) and not named_tensors(module)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _see_size(
    path: str, told: list[Setting], module: nn.Module, inputs: tuple[Tensor, ...]
) -> None:
    assert isinstance(module, _InstanceNorm)
    dimension = inputs[0].ndim - module._get_no_batch_dim()  # type: ignore[no-untyped-call]
    module.num_features = inputs[0].shape[dimension]
    told.append(Setting(path, "num_features", module.num_features))
