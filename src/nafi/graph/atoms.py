"""What an axis is made of, found out by unification.

Hides: union-find over atoms, and how an atom falls apart when it turns out to be a concatenation
or a product of smaller ones. Promises: every step only takes freedom away, so whatever is still
free at the end may be permuted.

An axis is a *sequence of segments* (concatenation), a segment a *product of atoms*, the outermost
first: flattening (C, H, W) gives one segment (C, H, W), concatenating two maps gives two segments.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

# More copies of a concatenation than this within one axis are not worth telling apart.
_MOST_COPIES = 512


@dataclass(frozen=True)
class Pin:
    """Why an axis cannot be permuted; `op` names the operation where a rule gave up."""

    reason: str
    op: str | None = None


_UNSAVED = ", which is not saved with the network, tells positions apart"


def unsaved(constant: str) -> Pin:
    """Numbers that are no part of the state dict cannot be permuted, nor what they meet."""
    return Pin(f"{constant}{_UNSAVED}")


def is_unsaved(reason: str) -> bool:
    return reason.endswith(_UNSAVED)


class Atom:
    """A set of interchangeable positions, until something is learnt about it."""

    __slots__ = ("_bound", "_pin", "_root", "_whole", "size")

    def __init__(self, size: int, pin: Pin | None = None) -> None:
        self.size = size
        self._root: Atom | None = None
        self._bound: Axis | None = None
        self._whole: Atom | None = None
        self._pin = pin

    def root(self) -> Atom:
        """The atom that stands for all those known to be the same."""
        atom = self
        while atom._root is not None:
            if atom._root._root is not None:
                atom._root = atom._root._root
            atom = atom._root
        return atom

    @property
    def pinned(self) -> Pin | None:
        return self.root()._pin

    @property
    def bound(self) -> Axis | None:
        """What the atom turned out to be made of, if it did."""
        return self.root()._bound

    def whole(self, pin: Pin) -> Atom:
        """One pinned atom for a concatenation that is pinned altogether; always the same one."""
        root = self.root()
        if root._whole is None:
            root._whole = Atom(root.size, pin)
        return root._whole

    def pin(self, pin: Pin) -> None:
        """Forbid permuting; the first reason stays."""
        root = self.root()
        if root._pin is None:
            root._pin = pin

    def bind(self, axis: Axis) -> None:
        """Replace an unbound atom by smaller ones, which inherit its pin."""
        root = self.root()
        if root._pin is not None:
            pin_axis(axis, root._pin)
        root._bound = axis

    def join(self, other: Atom) -> None:
        """Make two unbound atoms of one size the same."""
        one, two = self.root(), other.root()
        if one is two:
            return
        two._root = one
        if two._pin is not None:
            one.pin(two._pin)


Segment = list[Atom]
Axis = list[Segment]


def fresh(size: int) -> Axis:
    """An axis of which nothing is known."""
    return [[Atom(size)]]


def fixed(size: int, pin: Pin) -> Axis:
    """An axis that must stay as it is."""
    return [[Atom(size, pin)]]


def size_of(axis: Axis) -> int:
    return sum(prod(atom.size for atom in segment) for segment in axis)


def product(*axes: Axis) -> Axis:
    """The axes flattened into one, the first outermost."""
    result: Axis = [[]]
    for axis in axes:
        pin = settled(axis) if len(axis) > 1 and _copies(result) > 1 else None
        result = _times(result, fixed(size_of(axis), pin) if pin is not None else axis)
    return result


def resolve(axis: Axis) -> Axis:
    """The axis in terms of unbound roots; atoms of size 1 are left out."""
    result: Axis = []
    for segment in axis:
        parts: Axis = [[]]
        for atom in segment:
            leaves = _leaves(atom)
            pin = settled(leaves) if len(leaves) > 1 and _copies(parts) > 1 else None
            parts = _times(parts, [[atom.whole(pin)]] if pin is not None else leaves)
        result += parts
    return result


def settled(axis: Axis) -> Pin | None:
    """Why nothing in the axis can be permuted; None if something can."""
    pins = [atom.pinned for segment in resolve(axis) for atom in segment]
    return None if None in pins else next(iter(pins), None)


def pin_axis(axis: Axis, pin: Pin) -> None:
    """Forbid permuting anything in the axis."""
    for segment in resolve(axis):
        for atom in segment:
            atom.pin(pin)


def unify(one: Axis, two: Axis, where: Pin) -> None:
    """Make two axes of one size the same, refining atoms as far as needed.

    where: the reason to pin both if they cannot be brought together.
    """
    while True:
        a, b = resolve(one), resolve(two)
        for still, other in ((a, b), (b, a)):
            pins = [atom.pinned for segment in still for atom in segment]
            if None not in pins:
                # Nothing of it can be permuted, so nothing of the other can.
                pin_axis(other, next((pin for pin in pins if pin is not None), _SINGLE))
                return
        if not _unify_once(a, b, where):
            return


def _unify_once(a: Axis, b: Axis, where: Pin) -> bool:
    """One pass from the left; True if an atom fell apart, so that all must be resolved anew."""
    i = j = 0
    while i < len(a) and j < len(b):
        wide_a, wide_b = size_of([a[i]]), size_of([b[j]])
        if wide_a != wide_b:
            (wide, at), (narrow, start) = ((a, i), (b, j)) if wide_a > wide_b else ((b, j), (a, i))
            if not _write_out(wide, at, narrow[start:]):
                _cut(wide[at], min(wide_a, wide_b))
                return True
            continue
        if _unify_segments(a[i], b[j], where):
            return True
        i, j = i + 1, j + 1
    return False


def _unify_segments(a: Segment, b: Segment, where: Pin) -> bool:
    """Two products of equal size, compared from the outermost atom; True if one fell apart."""
    for one, two in zip(a, b, strict=False):
        if one.size == two.size:
            one.join(two)
        elif one.size % two.size == 0:
            one.bind([[Atom(two.size), Atom(one.size // two.size)]])
            return True
        elif two.size % one.size == 0:
            two.bind([[Atom(one.size), Atom(two.size // one.size)]])
            return True
        else:
            pin_axis([a, b], where)
            return False
    return False


def _write_out(axis: Axis, at: int, other: Axis) -> bool:
    """Replace a product by its copies, if that takes nothing away or if the other axis repeats it.

    Its outermost atom stays in one piece, so that it can also stand within a product.
    """
    outer, *rest = axis[at]
    copies = [size_of([segment]) for segment in other[: outer.size]]
    repeated = copies == [size_of([rest])] * outer.size
    if not rest or outer.size > _MOST_COPIES or not (repeated or outer.pinned):
        return False
    outer.pin(_REPEATED)
    axis[at : at + 1] = [rest] * outer.size
    return True


def _cut(segment: Segment, at: int) -> None:
    """Let the outermost atom fall into two concatenated ones, at or before the given position."""
    outer = segment[0]
    inner = size_of([segment]) // outer.size
    first = max(1, at // inner)
    outer.bind([[Atom(first)], [Atom(outer.size - first)]])


def _leaves(atom: Atom) -> Axis:
    if atom.bound is not None:
        atom.root()._bound = resolve(atom.bound)  # so that chains of cuts stay short
        return list(atom.bound)
    return [[]] if atom.size == 1 else [[atom.root()]]


_SINGLE = Pin("its positions are told apart one by one")
_REPEATED = Pin("the same neurons several times over")
_INTERLEAVED = Pin("a concatenation within each neuron cannot be expressed", "concatenation")


def _copies(axis: Axis) -> int:
    return max(size_of([segment]) for segment in axis)


def _times(outer: Axis, inner: Axis) -> Axis:
    """The product of two axes. A concatenation inside a product has to be written out."""
    if len(inner) == 1:
        return [segment + inner[0] for segment in outer]
    result: Axis = []
    for segment in outer:
        copies = size_of([segment])
        if copies > 1:
            pin_axis([segment], _INTERLEAVED)
        if copies > 1 and copies * len(inner) > _MOST_COPIES:
            pin_axis(inner, _INTERLEAVED)
            result.append([Atom(copies * size_of(inner), _INTERLEAVED)])
        else:
            result += inner * copies
    return result


def atoms_of(axes: Sequence[Axis]) -> set[Atom]:
    """All unbound roots in some axes."""
    return {atom for axis in axes for segment in resolve(axis) for atom in segment}
