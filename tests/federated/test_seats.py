"""Who has a name, and for how long."""

from __future__ import annotations

import pytest

from nafi.errors import InputError
from nafi.federated import Acceptance, Task, Update, simulate
from nafi.federated.seats import Names, Seats
from tests.federated.networks import CLASSES, population
from tests.federated.test_simulation import made, work

A, B = b"key a", b"key b"


def away(seats: Seats, rounds: int) -> list[str]:
    """Rounds in which nobody is there; who is forgotten."""
    forgotten = []
    for _ in range(rounds):
        seats.close_round([], [], {})
        forgotten += seats.forgotten()
    return forgotten


@pytest.mark.parametrize(
    ("names", "others"),
    [("kept", "the name 'north' belongs to another key"), ("freed", None), ("claimed", None)],
)
def test_a_name_is_its_keys(names: Names, others: str | None) -> None:
    seats = Seats(expire=3, names=names)
    seats.take("north", A)
    assert (seats.refusal("north", B) is None) == (names == "claimed")
    assert seats.refusal("north", A) is None
    assert away(seats, 2) == []
    assert away(seats, 5) == ["north"]
    assert seats.refusal("north", B) == others
    assert seats.refusal("north", A) is None


def test_a_key_has_one_live_name() -> None:
    seats = Seats(expire=3)
    seats.take("north", A)
    assert (
        seats.refusal("south", A) == "it says it is 'south', but its key goes by the name 'north'"
    )
    assert seats.refusal("south", B) is None
    away(seats, 3)
    assert seats.refusal("south", A) is None
    seats.take("south", A)
    assert "goes by the name 'south'" in str(seats.refusal("north", A))


def test_nodes_without_keys_may_have_any_name_that_no_key_has() -> None:
    seats = Seats()
    seats.take("north", b"")
    seats.take("south", A)
    assert seats.refusal("north", b"") is None
    assert seats.refusal("east", b"") is None
    assert seats.refusal("south", b"") == "the name 'south' belongs to another key"


def test_only_rounds_in_a_row_count() -> None:
    seats = Seats(expire=2)
    for delivers in (False, True, False):
        seats.close_round(["north"], ["north"], {"north": 5} if delivers else {})
        assert seats.forgotten() == []
    seats.close_round(["north"], [], {})  # there, but not chosen
    assert seats.table["north"].missed == 1
    seats.close_round([], [], {})
    assert seats.forgotten() == ["north"]
    assert Seats(expire=None).forgotten() == []


@pytest.mark.parametrize(("expire", "kept"), [(2, False), (None, True)])
def test_what_a_strategy_keeps_of_a_client_expires_with_it(expire: int | None, kept: bool) -> None:
    strategy = made("layerwise")
    trainer = work(strategy)

    def leaves(client: str, task: Task) -> tuple[Update, float]:
        if client == "1" and task.round > 0:
            raise ConnectionError
        return trainer(client, task)

    rules = Acceptance(quorum=2, classes=CLASSES)
    run = simulate(strategy, list(population()), leaves, acceptance=rules, expire=expire)
    assert ("1" in run.state.members) == kept  # type: ignore[attr-defined]


def test_wrong_options_are_named() -> None:
    with pytest.raises(InputError, match="expire: found 0, expected a whole number of at least 1"):
        Seats(0)
    with pytest.raises(InputError, match="names: found 'mine', expected one of kept, freed"):
        Seats(names="mine")  # type: ignore[arg-type]
