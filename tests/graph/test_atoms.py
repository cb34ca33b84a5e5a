"""Unification: what an axis falls into when it meets another one."""

from __future__ import annotations

import inspect
import sys

from nafi.graph.atoms import Atom, Pin, atoms_of, fixed, fresh, pin_axis, product, resolve, unify

WHERE = Pin("test", "test")


def sizes(axis) -> list[list[int]]:  # type: ignore[no-untyped-def]
    return [[atom.size for atom in segment] for segment in resolve(axis)]


def test_flattened_axis_takes_the_structure_of_its_parts() -> None:
    channels, places, flat = fresh(16), fixed(25, Pin("places")), fresh(400)
    unify(product(channels, places), flat, WHERE)
    assert sizes(flat) == [[16, 25]]
    assert resolve(flat)[0][0] is resolve(channels)[0][0]
    assert resolve(flat)[0][0].pinned is None
    assert resolve(flat)[0][1].pinned == Pin("places")


def test_concatenations_cut_each_other() -> None:
    one = fresh(5) + fresh(7)
    two = fresh(9) + fresh(3)
    unify(one, two, WHERE)
    assert sizes(one) == sizes(two) == [[5], [4], [3]]
    assert resolve(one)[1][0] is resolve(two)[1][0]


def test_a_concatenation_of_flattened_maps() -> None:
    maps = [product(fresh(4), fixed(6, Pin("places"))), product(fresh(5), fixed(6, Pin("places")))]
    flat = fresh(54)
    unify(maps[0] + maps[1], flat, WHERE)
    assert sizes(flat) == [[4, 6], [5, 6]]


def test_merged_batch_and_heads_come_apart_again() -> None:
    batch, width = fixed(2, Pin("input")), fresh(12)
    merged, inner = fresh(8), fresh(3)
    unify(product(batch, width), product(merged, inner), WHERE)
    assert sizes(merged) == [[2, 4]]
    assert sizes(width) == [[4, 3]]
    assert resolve(merged)[0][0].pinned == Pin("input")
    assert resolve(merged)[0][1] is resolve(width)[0][0]
    assert resolve(width)[0][0].pinned is None


def test_three_equal_pieces_viewed_as_one_axis_become_the_same() -> None:
    pieces = [fresh(4) for _ in range(3)]
    outer, inner = fresh(3), fresh(4)
    unify(pieces[0] + pieces[1] + pieces[2], product(outer, inner), WHERE)
    assert len(atoms_of([*pieces, inner])) == 1
    assert all(atom.pinned for atom in atoms_of([outer]))


def test_what_does_not_fit_is_pinned_and_nothing_else() -> None:
    four_by_six, three_by_eight, free = (
        product(fresh(4), fresh(6)),
        product(fresh(3), fresh(8)),
        fresh(5),
    )
    unify(four_by_six, three_by_eight, WHERE)
    assert all(atom.pinned == WHERE for atom in atoms_of([four_by_six, three_by_eight]))
    assert all(atom.pinned is None for atom in atoms_of([free]))


def test_a_pin_reaches_what_an_atom_falls_into_later() -> None:
    pinned, free = fixed(12, WHERE), fresh(5)
    outer, rest = fresh(3), fresh(20)
    unify(product(pinned, free), product(outer, rest), WHERE)
    assert sizes(pinned) == [[3, 4]]
    assert sizes(rest) == [[4, 5]]
    assert all(atom.pinned == WHERE for atom in atoms_of([pinned, outer]))
    assert all(atom.pinned is None for atom in atoms_of([free]))


def test_what_meets_a_pinned_axis_is_pinned() -> None:
    parts = product(fresh(3), fresh(4))
    unify(fixed(12, WHERE), parts, Pin("other"))
    assert all(atom.pinned == WHERE for atom in atoms_of([parts]))


def test_many_cuts_stay_shallow() -> None:
    """More than recursion may go deep, here."""
    cuts, limit = 300, sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + 150)
    try:
        axis = fresh(2 * cuts)
        for at in range(1, cuts):
            ones = [segment for _ in range(at) for segment in fresh(1)]
            unify(axis, [*ones, *fresh(2 * cuts - at)], WHERE)
        assert len(resolve(axis)) == cuts
    finally:
        sys.setrecursionlimit(limit)


def test_joining_keeps_the_pin_of_either() -> None:
    for pinned_first in (True, False):
        one, two = (
            Atom(3, WHERE if pinned_first else None),
            Atom(3, None if pinned_first else WHERE),
        )
        one.join(two)
        assert one.pinned == two.pinned == WHERE


def test_a_concatenation_inside_a_product_is_written_out() -> None:
    outer, inner = fresh(2), fresh(3) + fresh(4)
    flat = fresh(14)
    unify(product(outer, inner), flat, WHERE)
    assert sizes(flat) == [[3], [4], [3], [4]]
    assert len(atoms_of([flat])) == 2
    assert all(atom.pinned is None for atom in atoms_of([flat]))
    assert all(atom.pinned is not None for atom in atoms_of([outer]))


def test_a_pinned_concatenation_inside_a_product_leaves_the_outside_free() -> None:
    """The halves of a head that is rotated stay where they are; the heads may change places."""
    heads, width, flat = fresh(4), fresh(6), fresh(24)
    unify(flat, product(heads, width), WHERE)
    halves = fresh(3) + fresh(3)
    unify(width, halves, WHERE)
    pin_axis(halves, WHERE)
    assert sizes(width) == [[3], [3]]
    assert sizes(flat) == [[4, 6]]
    assert resolve(heads)[0][0].pinned is None
    unify(flat, product(fresh(4), fresh(2), fresh(3)), WHERE)  # comes to an end
    assert resolve(heads)[0][0].pinned is None


def test_a_repeated_axis_keeps_the_outside_free() -> None:
    """[a, a] is 2 x a, wherever the 2 stands: it is not cut into single positions."""
    heads, two, half = fresh(4), fresh(2), fresh(3)
    flat = product(heads, two, half)
    pieces = fresh(3) + fresh(3)
    unify(product(two, half), pieces, WHERE)
    assert sizes(flat) == [[4, 2, 3]]
    assert len(atoms_of([half, pieces])) == 1
    assert [atom.pinned is None for atom in resolve(flat)[0]] == [True, False, True]


def test_single_positions_are_no_misfit() -> None:
    """Three gates that are taken one by one, as a user wants it: nothing was given up."""
    gates = fresh(3)
    unify(gates, fresh(1) + fresh(1) + fresh(1), WHERE)
    assert all(atom.pinned is not None and atom.pinned.op is None for atom in atoms_of([gates]))
