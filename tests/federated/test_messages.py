"""The codec of tasks, updates and states; checkpoints of older versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, make_dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from nafi.errors import CheckpointError, InputError
from nafi.federated import (
    Form,
    LayerwiseState,
    Member,
    State,
    Trainer,
    make_strategy,
    read_records,
    read_state,
    simulate,
    update_from,
    update_to,
    write_state,
)
from nafi.federated.checkpoint import checksum
from nafi.federated.codec import check_fields, pack, unpack
from nafi.federated.strategy import Update
from nafi.federated.training import Training
from tests.federated.networks import CLASSES, population, small

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, eq=False)
class Inner:
    values: Mapping[str, Tensor]
    count: int = 0


@dataclass(frozen=True, eq=False)
class Whole(State):
    """A field of every kind."""

    rate: float = 0.5
    sure: bool = True
    mode: Literal["a", "b"] = "a"
    names: frozenset[str] = frozenset()
    pair: tuple[int, str] = (1, "x")
    several: tuple[int, ...] = ()
    maybe: tuple[int, ...] | None = None
    dtype: torch.dtype = torch.float32
    inside: Mapping[str, Inner] = field(default_factory=dict)
    rows: tuple[Inner, ...] = ()


def whole() -> Whole:
    return Whole(
        3,
        Form({"one": 5}, (("layer", "norm"),)),
        {"b": torch.arange(3.0), "a": torch.ones(2, 2).double()},
        names=frozenset({"y", "x"}),
        several=(1, 2, 3),
        maybe=(4,),
        dtype=torch.bfloat16,
        inside={
            "a/values/b": Inner({"t/u": torch.zeros(1)}),
            "a": Inner({"b": torch.ones(1), "": torch.tensor(7)}, 2),
        },
        rows=(Inner({}), Inner({"0": torch.tensor([1])})),
    )


def same(one: Any, two: Any) -> bool:
    (data, tensors), (other, others) = pack(one), pack(two)
    return (
        data == other
        and list(tensors) == list(others)
        and all(torch.equal(tensors[name], others[name]) for name in tensors)
    )


def test_what_is_packed_comes_back() -> None:
    data, tensors = pack(whole())
    back = unpack(Whole, json.loads(json.dumps(data)), tensors)
    assert same(back, whole())
    assert (back.form, back.names, back.maybe, back.dtype) == (
        whole().form,
        {"x", "y"},
        (4,),
        torch.bfloat16,
    )
    assert list(back.tensors) == ["b", "a"]
    assert list(back.inside) == ["a/values/b", "a"]


def test_a_state_of_any_strategy_survives_a_file(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    write_state(file, whole(), [{"round": 3}], {"seed": 1})
    back, records, settings = read_state(file, Whole)
    assert same(back, whole())
    assert (records, settings) == ([{"round": 3}], {"seed": 1})
    assert read_records(file) == records
    with pytest.raises(CheckpointError, match=r"of this strategy .*it has rate.*start a new run"):
        read_state(file, State)


def changed(place: str, value: Any) -> Any:
    data = json.loads(json.dumps(pack(whole())[0]))
    at = data
    *way, last = place.split("/")
    for step in way:
        at = at[int(step) if isinstance(at, list) else step]
    at[int(last) if isinstance(at, list) else last] = value
    return data


@pytest.mark.parametrize(
    ("place", "value", "why"),
    [
        ("colour", "red", "it has colour"),
        ("form/colour", "red", "form has colour"),
        ("form", None, "form: found None, expected a table"),
        ("round", -1, "round: found -1, expected a whole number"),
        ("round", 2**63, "round: found 9223372036854775808"),
        ("round", True, "round: found True"),
        ("round", 1.0, r"round: found 1\.0"),
        ("rate", float("nan"), "rate: found nan, expected a number"),
        ("rate", "1", "rate: found '1'"),
        ("sure", 1, "sure: found 1, expected true or false"),
        ("mode", "c", "mode: found 'c', expected one of a, b"),
        ("mode", ["a"], "mode: found"),
        ("names", "xy", "names: found 'xy', expected a list"),
        ("names", ["x", 1], r"names\.1: found 1, expected text"),
        ("names", ["\ud800"], "names.0: found .*, expected text"),
        ("pair", [1], r"pair: found \[1\], expected 2 values"),
        ("several", [1, -2], r"several\.1: found -2"),
        ("maybe", 4, "maybe: found 4, expected a list"),
        ("dtype", "tensor", "dtype: found 'tensor', expected a type of torch"),
        ("form/widths/one", 0, "one: found a width of 0"),
        ("form/widths/one", 2**31, "one: found a width"),
        ("form/widths/one", "5", r"form\.widths\.0: found '5'"),
        ("form/folded/0", ["a"], r"form\.folded\.0: found \['a'\], expected 2 values"),
        ("tensors", {"a": 1}, "tensors: found .*, expected names of tensors"),
        ("tensors", ["a"], "it has tensors/b, which has no place"),
        ("tensors", ["a", "b", "c"], "tensors: found 'c', expected the name of a tensor, once"),
        ("tensors", ["a", "b", "a"], "tensors: found 'a', expected the name of a tensor, once"),
        ("inside/a/count", -1, r"inside\.1\.count: found -1"),
        ("rows/1", {}, r"rows\.1 lacks values, count"),
    ],
)
def test_anything_else_is_refused_by_name(place: str, value: Any, why: str) -> None:
    with pytest.raises(InputError, match=why):
        unpack(Whole, changed(place, value), pack(whole())[1])


def test_a_name_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    """Other readers of JSON take the last one."""
    file = tmp_path / "run.safetensors"
    members = {"a": Member({}, 1), "b": Member({"w": torch.ones(1)}, 2)}
    packed, tensors = pack(LayerwiseState(0, Form({"one": 5}), {}, (), members))
    header = {"format": 3, "state": packed, "records": [], "settings": {}, "seats": {"seats": {}}}
    for name, refused in (("b", False), ("a", True)):
        text = json.dumps(header).replace('"b": {"tensors"', f'"{name}": {{"tensors"')
        save_file(tensors, file, metadata={"nafi": text, "sha256": checksum(text, tensors)})
        if refused:
            with pytest.raises(CheckpointError, match="a name is there twice"):
                read_state(file, LayerwiseState)
        else:
            assert list(read_state(file, LayerwiseState)[0].members) == ["a", "b"]


@pytest.mark.parametrize("header", ["[" * 10**5, "{}", "[]", '"x"', "{"])
def test_odd_headers_are_refused(header: str, tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    save_file({"x": torch.zeros(1)}, file, metadata={"nafi": header})
    for read in (lambda: read_state(file, State), lambda: read_records(file)):
        with pytest.raises(CheckpointError, match="start a new run"):
            read()
    with pytest.raises(InputError, match="this is not"):
        update_from(file.read_bytes())


def test_extras_survive_the_wire() -> None:
    update = Update(
        "a", 2, {"w": torch.ones(2)}, 5, (2, 3), {"w": torch.arange(3), "m": torch.ones(())}
    )
    back = update_from(update_to(update))
    assert same(back, update)
    assert same(update_from(update_to(replace(update, extras={}))), replace(update, extras={}))


OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "layerwise": {"penalty": 0.0, "evidence": 500.0},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_a_checkpoint_of_version_0_1_0_is_refused_with_what_to_do(name: str) -> None:
    """The files were written by version 0.1.0, after one round of three clients."""
    file = DATA / f"run-0.1.0-{name}.safetensors"
    training = Training(epochs=2, batch=8, rate=0.05, momentum=0.9)
    strategy = make_strategy(name, small(), training, rounds=2, seed=1, **OPTIONS[name])
    work = Trainer(strategy.architecture, population(), CLASSES)
    with pytest.raises(
        CheckpointError,
        match=r"nafi 0\.1\.0.*finish the run with nafi 0\.1\.0, or give",
    ):
        simulate(strategy, list(population()), work, checkpoint=file, resume=True)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"round": -1}, "round: found -1, expected a whole number"),
        ({"round": 2**63}, "round: found 9223372036854775808"),
        ({"rate": float("-inf")}, "rate: found -inf, expected a number"),
        ({"rate": 10**400}, "rate: found 1000.*, expected a number"),
        ({"sure": 1}, "sure: found 1, expected true or false"),
        ({"mode": "c"}, "mode: found 'c'"),
        ({"names": frozenset({1})}, "names: found 1, expected text"),
        ({"names": "xy"}, "names: found 'xy', expected a set"),
        ({"pair": (1,)}, r"pair: found \(1,\), expected 2 values"),
        ({"several": 4}, "several: found 4, expected a tuple"),
        ({"dtype": None}, "dtype: found None, expected a type of torch"),
        ({"form": None}, "form: found None, expected a Form"),
        ({"tensors": {"a": 1}}, r"tensors\.a: found 1, expected a tensor"),
        ({"tensors": {1: torch.ones(1)}}, "tensors: found 1, expected text"),
        ({"inside": {"a": Inner({}, -1)}}, r"inside\.0\.count: found -1"),
        ({"inside": {2: Inner({})}}, "inside: found 2, expected text"),
    ],
)
def test_what_could_not_be_read_is_not_written(
    change: dict[str, Any], why: str, tmp_path: Path
) -> None:
    file = tmp_path / "run.safetensors"
    with pytest.raises(InputError, match=why):
        write_state(file, replace(whole(), **change), [])
    assert not file.exists()


def test_numbers_of_numpy_are_written_as_plain_ones() -> None:
    data, tensors = pack(replace(whole(), rate=np.float64(0.25)))
    assert type(data["rate"]) is float
    assert unpack(Whole, data, tensors).rate == 0.25


@dataclass(frozen=True, eq=False)
class Node:
    """Holds others of its kind."""

    rows: tuple[Node, ...] = ()


@pytest.mark.parametrize("kind", [Whole, LayerwiseState, Node])
def test_types_that_can_be_written_are_known(kind: type) -> None:
    check_fields(kind)


@pytest.mark.parametrize(
    "kind",
    [
        list[int],
        dict[str, int],
        Mapping[int, str],
        Mapping[str, list[int]],
        tuple[int, set[str]],
        int | str,
        Tensor,
        Literal[1],
        frozenset[tuple[int, ...]],
    ],
)
def test_types_that_cannot_be_written_are_refused(kind: Any) -> None:
    state = make_dataclass("Odd", [("odd", kind)], frozen=True)
    with pytest.raises(InputError, match=r"odd: a field of type .* cannot be written"):
        check_fields(state)
