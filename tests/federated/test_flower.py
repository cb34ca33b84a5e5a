"""Our strategies on Flower: the same models, and what a server withstands."""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from nafi.checkpoints import load
from nafi.errors import InputError, NafiError
from nafi.federated import Acceptance, QuorumError, Samples, Strategy, Update, simulate
from nafi.federated.flower import (
    Federation,
    _packed,
    _unpacked,
    client_app,
    client_name,
    server_app,
)
from nafi.federated.messages import update_from, update_to
from nafi.federated.post import Post
from tests.federated.grids import Behaviour, LocalGrid, Node
from tests.federated.networks import CLASSES, FEATURES, Small, population
from tests.federated.test_simulation import OPTIONS, ROUNDS, made, work

INPUTS = (torch.zeros(2, FEATURES),)
CLIENTS = list(population())
ALL = Acceptance(classes=CLASSES)
SOME = Acceptance(quorum=2, classes=CLASSES)


def samples(context: Context) -> Samples:
    return population()[client_name(context)]


def app() -> ClientApp:
    return client_app(Small, INPUTS, samples, classes=CLASSES)


def grid(**behaviours: Behaviour) -> LocalGrid:
    """Nodes for all clients, in another order; behaviours: of client_0 and so on."""
    nodes = {
        100 - place: Node(name, behaviours.get(f"client_{name}"))
        for place, name in enumerate(CLIENTS)
    }
    return LocalGrid(app(), nodes)


def federation(strategy: Strategy, **options: Any) -> Federation:
    limits = {"nodes": len(CLIENTS), "wait": 0.0, "deadline": 0.2, "acceptance": ALL}
    return Federation(strategy, **{**limits, **options})


def reference(name: str) -> dict[str, torch.Tensor]:
    strategy = made(name)
    return simulate(strategy, CLIENTS, work(strategy)).model.state_dict()


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    for name in expected:
        torch.testing.assert_close(found[name], expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_model_is_that_of_the_runner_in_one_process(name: str) -> None:
    flower = federation(made(name))
    result = flower.start(grid())
    assert_equal(flower.run.model.state_dict(), reference(name))
    for key, array in result.arrays.items():
        assert (array.numpy() == flower.run.model.state_dict()[key].numpy()).all()
    strategy = made(name)
    expected = simulate(strategy, CLIENTS, work(strategy)).records
    for found, wanted in zip(flower.run.records, expected, strict=True):
        assert {**found, "seconds": 0, "loss": 0} == {**wanted, "seconds": 0, "loss": 0}
    assert result.train_metrics_clientapp[1]["bytes_up"] == expected[0]["bytes_up"]


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "run.safetensors"
    broken = grid()
    silent: Behaviour = lambda message, answer: []  # noqa: E731

    def breaking(message: Message, answer: Callable[[], Message]) -> list[Message]:
        if message.metadata.group_id == "3":
            broken.nodes[100].behaviour = silent
            return []
        return [answer()]

    broken.nodes[100].behaviour = breaking
    with pytest.raises(QuorumError, match=r"round 3 of 4: 2 of 3 .* no reply within 0.2 seconds"):
        federation(made("layerwise"), checkpoint=file).start(broken)
    flower = federation(made("layerwise"), checkpoint=file)
    flower.start(grid())
    assert_equal(flower.run.model.state_dict(), reference("layerwise"))
    assert [record["round"] for record in flower.run.records] == [1, 2, 3, 4]


def changed(**changes: Any) -> Behaviour:
    """Answers with an update that is not what was asked for."""

    def behave(message: Message, answer: Callable[[], Message]) -> list[Message]:
        reply = answer()
        if message.metadata.message_type != "train":
            return [reply]
        update = update_from(_unpacked(reply))
        made = {
            key: change(getattr(update, key)) if callable(change) else change
            for key, change in changes.items()
        }
        bad: Update = replace(update, **made)
        return [Message(_packed(update_to(bad)), reply_to=message)]

    return behave


def negative(message: Message, answer: Callable[[], Message]) -> list[Message]:
    """A count below zero, which `update_to` does not write."""
    replies = changed(class_counts=(11, 1, 1))(message, answer)
    if message.metadata.message_type == "query":
        return replies
    content = _unpacked(replies[0])
    assert content.count(b"[11, 1, 1]") == 1
    forged = content.replace(b"[11, 1, 1]", b"[-1, 1, 1]")
    return [Message(_packed(forged), reply_to=message)]


def crashing(message: Message, answer: Callable[[], Message]) -> list[Message]:
    if message.metadata.message_type == "train":
        message.content = RecordDict({"nafi": ConfigRecord({"task": b"not a task"})})
    return [answer()]


def unreadable(message: Message, answer: Callable[[], Message]) -> list[Message]:
    if message.metadata.message_type == "train":
        return [Message(_packed(b"\x08\0\0\0\0\0\0\0not json"), reply_to=message)]
    return [answer()]


def foreign(message: Message, answer: Callable[[], Message]) -> list[Message]:
    if message.metadata.message_type == "train":
        weights = ArrayRecord({"one.weight": torch.ones(2, 2)})
        return [Message(RecordDict({"arrays": weights}), reply_to=message)]
    return [answer()]


def silent(message: Message, answer: Callable[[], Message]) -> list[Message]:
    return [answer()] if message.metadata.message_type == "query" else []


def poisoned(tensors: Any) -> Any:
    return {name: torch.full_like(tensor, float("nan")) for name, tensor in tensors.items()}


BAD: dict[str, tuple[Behaviour, str]] = {
    "values that are NaN": (changed(tensors=poisoned), "NaN"),
    "another round": (changed(round=7), "it is for round 7"),
    "another client": (changed(client="0"), "it says that it is from '0'"),
    "no samples": (changed(samples=0), "samples: found 0"),
    "a negative class": (negative, "class_counts.0: found -1"),
    "a tensor too few": (changed(tensors=lambda t: dict(list(t.items())[1:])), "lacks"),
    "a crash": (crashing, "it holds no message of nafi"),
    "bytes that are no message": (unreadable, "this is not a message"),
    "arrays of another app": (foreign, "it holds no message of nafi"),
    "silence": (silent, "no reply within"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_a_bad_reply_is_refused_and_the_round_goes_on(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    behaviour, reason = BAD[case]
    strategy = made("fedavg")
    flower = federation(strategy, acceptance=SOME)
    with caplog.at_level(logging.WARNING):
        flower.start(grid(client_1=behaviour))
    for record in flower.run.records:
        assert set(record["refused"]) == {"1"}
        assert reason in record["refused"]["1"]
    assert caplog.text.count("client 1 refused") == ROUNDS
    others = [name for name in CLIENTS if name != "1"]
    expected = simulate(strategy, others, work(strategy)).model.state_dict()
    assert_equal(flower.run.model.state_dict(), expected)


def test_what_flower_itself_cannot_read_is_a_refusal_of_that_client() -> None:
    def garbage(message: Message, answer: Callable[[], Message]) -> list[Any]:
        return [ValueError("not JSON")] if message.metadata.message_type == "train" else [answer()]

    flower = federation(made("fedavg"), acceptance=SOME)
    flower.start(grid(client_1=garbage))
    assert [list(record["refused"]) for record in flower.run.records] == [["1"]] * ROUNDS


def test_a_reply_that_the_superlink_cannot_give_out_is_a_refusal_of_that_client() -> None:
    request = httpx.Request("POST", "https://superlink")
    error = httpx.HTTPStatusError("500", request=request, response=httpx.Response(500))

    def broken(message: Message, answer: Callable[[], Message]) -> list[Any]:
        return [error] if message.metadata.message_type == "train" else [answer()]

    flower = federation(made("fedavg"), acceptance=SOME)
    flower.start(grid(client_1=broken))
    assert [list(record["refused"]) for record in flower.run.records] == [["1"]] * ROUNDS


@pytest.mark.parametrize("how", ["an error", "silence"])
def test_a_superlink_that_is_gone_ends_the_run(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower tries to reach it for ever; errors of another kind it passes on."""
    net, hangs, over = grid(), threading.Event(), threading.Event()
    push = net.push_messages

    def until_it_hangs(futures: Any, timeout: float) -> Any:
        """Ten minutes pass at once, as soon as nothing will come any more."""
        while not hangs.is_set() and not all(future.done() for future in futures):
            wait(futures, 0.01)
        return wait(futures, 0)

    monkeypatch.setattr("nafi.federated.post.wait", until_it_hangs)

    def gone(messages: Any) -> list[str]:
        if messages[0].metadata.group_id == "3":
            if how == "an error":
                raise httpx.ConnectError("certificate verify failed")
            hangs.set()
            over.wait(300)
        return push(messages)

    net.push_messages = gone  # type: ignore[method-assign]
    file = tmp_path / "run.safetensors"
    kind, told = {
        "an error": (httpx.ConnectError, "certificate"),
        "silence": (NafiError, "SuperLink has not answered for 600 seconds"),
    }[how]
    with pytest.raises(kind, match=told):
        federation(made("fedavg"), checkpoint=file).start(net)
    over.set()
    hangs.clear()
    flower = federation(made("fedavg"), checkpoint=file)
    flower.start(grid())
    assert_equal(flower.run.model.state_dict(), reference("fedavg"))


def test_replies_that_never_become_whole_do_not_hold_the_round(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two of them are given the time of one: all that is left is waited for at once, and once."""
    monkeypatch.setattr("nafi.federated.post._GRACE", 1234.0)
    net, over, stuck = grid(), threading.Event(), []
    pull, waits = net.pull_messages, 0

    def until_two_are_left(futures: Any, timeout: float) -> Any:
        """The grace passes at once, as soon as only those are left that never come."""
        nonlocal waits
        if timeout != 1234.0:
            return wait(futures, timeout)
        waits += 1
        while sum(not future.done() for future in futures) > 2:
            wait(futures, 0.01)
        return wait(futures, 0)

    def slowly(numbers: Any) -> list[Message]:
        for reply in net.replies.get(numbers[0], []):
            if reply.metadata.src_node_id != 98 and reply.metadata.message_type == "train":
                stuck.append(reply.metadata.src_node_id)
                over.wait(300)
        return pull(numbers)

    monkeypatch.setattr("nafi.federated.post.wait", until_two_are_left)

    net.pull_messages = slowly  # type: ignore[method-assign]
    one_round = replace(made("fedavg"), rounds=1)
    flower = federation(one_round, acceptance=replace(SOME, quorum=1))
    flower.start(net)
    over.set()
    assert (sorted(stuck), waits) == ([99, 100], 1)
    refused = flower.run.records[0]["refused"]
    assert list(refused) == ["0", "1"]
    assert all("not whole" in reason for reason in refused.values())


@pytest.mark.slow
def test_a_slow_reply_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes on while others are asked for theirs, and counts; each is given up once here."""
    monkeypatch.setattr("nafi.federated.post._GRACE", 0.01)
    net, given_up = grid(), defaultdict[str, threading.Event](threading.Event)
    pull, take = net.pull_messages, Post.take

    def noted(self: Post, number: str, patience: float) -> Any:
        reply = take(self, number, patience)
        if reply is None:
            given_up[number].set()
        return reply

    def slowly(numbers: Any) -> list[Message]:
        for reply in net.replies.get(numbers[0], []):
            if reply.metadata.message_type == "train":
                given_up[numbers[0]].wait(300)
        return pull(numbers)

    monkeypatch.setattr(Post, "take", noted)
    net.pull_messages = slowly  # type: ignore[method-assign]
    flower = federation(made("fedavg"), deadline=600.0)
    flower.start(net)
    assert sum(event.is_set() for event in given_up.values()) == len(CLIENTS) * ROUNDS
    assert_equal(flower.run.model.state_dict(), reference("fedavg"))


def test_a_node_that_lost_the_question_for_its_name_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("nafi.federated.roster._ASK_AGAIN", 0.2)
    asked = []

    def started_again(message: Message, answer: Callable[[], Message]) -> list[Message]:
        asked.append(message.metadata.message_type)
        return [] if len(asked) == 1 else [answer()]

    flower = federation(made("fedavg"), wait=600.0)
    flower.start(grid(client_1=started_again))
    assert asked[:2] == ["query", "query"]
    assert_equal(flower.run.model.state_dict(), reference("fedavg"))


def test_a_name_counts_that_comes_after_the_question_was_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nodes that answer slowly would else be asked forever, and never be heard."""
    monkeypatch.setattr("nafi.federated.roster._ASK_AGAIN", 0.2)
    questions, first = [], list[Message]()

    def slow(message: Message, answer: Callable[[], Message]) -> list[Message]:
        if message.metadata.message_type != "query":
            return [answer()]
        questions.append(message)
        if len(questions) == 1:
            first.append(answer())
            return first
        return []  # whatever is asked later waits behind what was asked before

    net = grid(client_1=slow)
    pull = net.pull_messages

    def late(numbers: Any) -> list[Message]:
        waits = len(questions) < 2 and first and first[0] in net.replies.get(numbers[0], [])
        return [] if waits else pull(numbers)

    net.pull_messages = late  # type: ignore[method-assign]
    flower = federation(made("fedavg"), wait=60.0)
    flower.start(net)
    assert len(questions) >= 2
    assert_equal(flower.run.model.state_dict(), reference("fedavg"))


def test_a_refused_reply_is_not_held_in_memory(tmp_path: Path) -> None:
    flower = federation(made("fedavg"), acceptance=replace(SOME, max_bytes=1))
    grid()
    question = Message(RecordDict(), 1, "train")
    reply = Message(_packed(b"x" * 2**25), reply_to=question)
    held = weakref.ref(reply)
    found = flower._kept(reply, tmp_path / "reply")
    del reply
    gc.collect()
    assert "more than the limit" in str(found)
    assert held() is None


def test_a_quorum_is_of_those_that_a_round_asks() -> None:
    half = replace(made("fedavg"), fraction=0.5)
    with pytest.raises(InputError, match="quorum: found 3 for 2 clients"):
        Federation(half, nodes=4, acceptance=Acceptance(quorum=3))
    net = grid()
    with pytest.raises(QuorumError, match=r"3 of 8 nodes .* asks 2 of them\), 4 are needed"):
        Federation(half, nodes=8, wait=0.0, acceptance=ALL).start(net)
    flower = federation(half, nodes=4, acceptance=SOME)
    flower.start(net)
    assert [record["clients"] for record in flower.run.records] == [2] * ROUNDS


def test_an_error_of_the_client_does_not_tell_of_its_samples() -> None:
    def unreadable_data(context: Context) -> Samples:
        raise ValueError("could not convert 'Smith, John' to a number")

    net = LocalGrid(client_app(Small, INPUTS, unreadable_data, classes=CLASSES), {})
    net.nodes.update({7: Node("0"), 8: Node("1")})
    with pytest.raises(QuorumError, match="ValueError; the client's log says more") as caught:
        federation(made("fedavg"), nodes=2).start(net)
    assert "Smith" not in str(caught.value)


def test_a_client_that_wants_to_exit_is_one_failed_client() -> None:
    def exits(context: Context) -> Samples:
        if client_name(context) == "1":
            raise SystemExit(3)
        return samples(context)

    net = replace(grid(), app=client_app(Small, INPUTS, exits, classes=CLASSES))
    flower = federation(made("fedavg"), acceptance=SOME)
    flower.start(net)
    for record in flower.run.records:
        assert list(record["refused"]) == ["1"]
        assert "SystemExit; the client's log says more" in record["refused"]["1"]


def test_a_long_reason_is_cut() -> None:
    def wordy(message: Message, answer: Callable[[], Message]) -> list[Message]:
        if message.metadata.message_type == "train":
            return [Message(Error(code=1, reason="x\n" * 10**6), reply_to=message)]
        return [answer()]

    flower = federation(made("fedavg"), acceptance=SOME)
    flower.start(grid(client_1=wordy))
    reason = flower.run.records[0]["refused"]["1"]
    assert len(reason) < 400
    assert reason.isprintable()


def test_a_node_that_goes_while_it_is_asked_is_refused_alone() -> None:
    net = grid()

    def leaving(message: Message, answer: Callable[[], Message]) -> list[Message]:
        if message.metadata.message_type == "train" and message.metadata.group_id == "2":
            net.nodes.pop(98, None)  # the last to be asked
        return [answer()]

    net.nodes[100].behaviour = leaving
    flower = federation(made("fedavg"), acceptance=SOME)
    flower.start(net)
    assert "did not take the message" in flower.run.records[1]["refused"]["2"]


@pytest.mark.slow
def test_a_node_that_is_offline_for_a_while_can_still_deliver() -> None:
    """Its reply is there when it is back; asked before, Flower would have given it up."""
    net, looks = grid(), 0

    def away(message: Message, answer: Callable[[], Message]) -> list[Message]:
        reply = answer()
        if message.metadata.group_id == "2":
            net.nodes[99].online = False
        return [reply]

    pull, nodes = net.pull_messages, net.get_nodes

    def looked() -> list[Any]:
        """It is back when the server has looked for it three times."""
        nonlocal looks
        looks += not net.nodes[99].online
        net.nodes[99].online |= looks > 3
        return nodes()

    def strict(numbers: Any) -> list[Message]:
        replies = net.replies.get(numbers[0], [])
        offline = replies and not net.nodes[replies[0].metadata.src_node_id].online
        assert not offline, "asked for the reply of a node that is offline"
        return pull(numbers)

    net.nodes[99].behaviour = away
    net.pull_messages, net.get_nodes = strict, looked  # type: ignore[method-assign]
    flower = federation(made("layerwise"), deadline=600.0)
    flower.start(net)
    assert looks == 4
    assert_equal(flower.run.model.state_dict(), reference("layerwise"))


def test_a_node_that_never_tells_its_name_does_not_hold_the_others() -> None:
    net = grid()
    net.nodes[1] = Node("silent", lambda message, answer: [])
    flower = federation(made("fedavg"), wait=3600.0)  # the test would not end
    flower.start(net)
    assert_equal(flower.run.model.state_dict(), reference("fedavg"))


KEY = b"-----BEGIN PUBLIC KEY----- %d"


def keyed() -> LocalGrid:
    """A grid whose nodes have proven keys."""
    net = grid()
    for number, node in net.nodes.items():
        node.key = KEY % number
    return net


def test_a_name_belongs_to_the_key_that_first_had_it(caplog: pytest.LogCaptureFixture) -> None:
    net = keyed()

    def replaced(message: Message, answer: Callable[[], Message]) -> list[Message]:
        reply = answer()
        if message.metadata.group_id == "2" and 100 in net.nodes:
            net.nodes[200] = replace(net.nodes.pop(100), key=KEY % 200)
        return [reply]

    net.nodes[100].behaviour = replaced
    flower = federation(made("fedavg"), acceptance=SOME)
    flower.start(net)
    assert [record["clients"] for record in flower.run.records] == [3, 3, 2, 2]
    assert "node 200 is left out: the name '0' belongs to another key" in caplog.text


def half(file: Path, net: LocalGrid) -> None:
    """The first two rounds of a run; its server is ended in the third."""

    def ends(message: Message, answer: Callable[[], Message]) -> list[Message]:
        if message.metadata.group_id == "3":
            raise KeyboardInterrupt
        return [answer()]

    net.nodes[100].behaviour = ends
    with pytest.raises(KeyboardInterrupt):
        federation(made("layerwise"), checkpoint=file).start(net)
    net.nodes[100].behaviour = None


@pytest.mark.parametrize(("names", "clients"), [("kept", [3, 3, 2, 2]), ("claimed", [3] * 4)])
def test_a_resumed_run_gives_no_name_to_another_key(
    names: Any, clients: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever had client 0's name would be sent the layers that are client 0's alone."""
    file, net = tmp_path / "run.safetensors", keyed()
    half(file, net)
    tasks: list[str] = []

    def curious(message: Message, answer: Callable[[], Message]) -> list[Message]:
        tasks.append(message.metadata.message_type)
        return [answer()]

    net.nodes[200] = replace(net.nodes.pop(100), key=KEY % 200, behaviour=curious)
    flower = federation(made("layerwise"), checkpoint=file, acceptance=SOME, names=names)
    flower.start(net)
    assert [record["clients"] for record in flower.run.records] == clients
    refused = "node 200 is left out: the name '0' belongs to another key" in caplog.text
    assert refused == (names == "kept") == ("train" not in tasks)


def test_a_key_has_one_name_also_after_a_resume(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, net = tmp_path / "run.safetensors", keyed()
    half(file, net)
    net.nodes[300] = replace(net.nodes.pop(100), name="many names")
    flower = federation(made("layerwise"), checkpoint=file, acceptance=SOME)
    flower.start(net)
    assert [record["clients"] for record in flower.run.records] == [3, 3, 2, 2]
    assert "it says it is 'many names', but its key goes by the name '0'" in caplog.text
    assert set(flower.run.state.members) == set(CLIENTS)


def test_an_update_that_is_too_big_is_not_even_read() -> None:
    limit = 2000
    rules = replace(SOME, max_bytes=limit)
    fat = changed(tensors=lambda t: {**t, "more": torch.zeros(2**23)})
    flower = federation(made("fedavg"), acceptance=rules)
    flower.start(grid(client_1=fat))
    assert "more than the limit" in flower.run.records[0]["refused"]["1"]


def test_replies_that_come_twice_or_late_change_nothing(caplog: pytest.LogCaptureFixture) -> None:
    old: list[Message] = []

    def chatty(message: Message, answer: Callable[[], Message]) -> list[Message]:
        reply = answer()
        found = [*old, reply, reply]
        old[:] = [reply] if message.metadata.message_type == "train" else []
        return found

    flower = federation(made("layerwise"))
    with caplog.at_level(logging.WARNING):
        flower.start(grid(client_1=chatty))
    assert_equal(flower.run.model.state_dict(), reference("layerwise"))
    assert all(not record["refused"] for record in flower.run.records)
    assert "a reply to no open message is ignored" in caplog.text


def test_a_client_that_was_away_is_brought_up_to_date() -> None:
    """The same as in one process, where it is refused in that round."""

    def away(message: Message, answer: Callable[[], Message]) -> list[Message]:
        return [] if message.metadata.group_id == "2" else [answer()]

    strategy = made("layerwise")
    flower = federation(strategy, acceptance=SOME)
    flower.start(grid(client_2=away))
    assert [list(record["refused"]) for record in flower.run.records] == [[], ["2"], [], []]

    trainer = work(strategy)

    def sometimes(client: str, task: Any) -> Any:
        if client == "2" and task.round == 1:
            raise TimeoutError
        return trainer(client, task)

    expected = simulate(strategy, CLIENTS, sometimes, acceptance=SOME)
    assert_equal(flower.run.model.state_dict(), expected.model.state_dict())


def test_a_node_that_goes_away_and_comes_back_under_another_number_is_the_same_client() -> None:
    net = grid()

    def moving(message: Message, answer: Callable[[], Message]) -> list[Message]:
        reply = answer()
        if message.metadata.message_type == "train" and 100 in net.nodes:
            net.nodes[7] = net.nodes.pop(100)
        return [reply]

    net.nodes[100].behaviour = moving
    flower = federation(made("layerwise"))
    flower.start(net)
    assert flower.roster.names[7] == CLIENTS[0]
    assert_equal(flower.run.model.state_dict(), reference("layerwise"))


def test_too_few_nodes_end_the_run() -> None:
    net = grid()
    del net.nodes[100]
    with pytest.raises(QuorumError, match=r"2 of 3 nodes are there after 0 seconds, 3 are needed"):
        federation(made("fedavg")).start(net)
    flower = federation(made("fedavg"), acceptance=SOME)
    flower.start(net)
    assert [record["clients"] for record in flower.run.records] == [2] * ROUNDS


def test_two_nodes_of_one_name_are_not_two_clients(caplog: pytest.LogCaptureFixture) -> None:
    net = grid()
    net.nodes[200] = Node(CLIENTS[1])
    flower = federation(made("fedavg"))
    flower.start(net)
    assert_equal(flower.run.model.state_dict(), reference("fedavg"))
    assert "node 200 is left out: it says it is '1', as another does" in caplog.text


def test_a_node_that_does_not_tell_its_name_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    def nameless(message: Message, answer: Callable[[], Message]) -> list[Message]:
        return [Message(RecordDict({"nafi": ConfigRecord({"name": 3})}), reply_to=message)]

    net = grid()
    net.nodes[200] = Node("stranger", nameless)
    flower = federation(made("fedavg"))
    flower.start(net)
    assert_equal(flower.run.model.state_dict(), reference("fedavg"))
    assert "node 200 is left out: it did not tell its name" in caplog.text


def test_flowers_own_loop_is_refused() -> None:
    with pytest.raises(NafiError, match="call its start"):
        federation(made("fedavg")).configure_train(1, ArrayRecord(), ConfigRecord(), grid())


@pytest.mark.parametrize(
    ("options", "told"),
    [({"nodes": 0}, "nodes"), ({"deadline": 0}, "deadline"), ({"wait": -1}, "wait")],
)
def test_settings_that_make_no_sense_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        federation(made("fedavg"), **options)


def test_an_app_is_told_what_to_do_by_its_configuration(tmp_path: Path) -> None:
    out = tmp_path / "global.safetensors"
    told = {
        "nafi.strategy": "layerwise",
        "nafi.rounds": ROUNDS,
        "nafi.seed": 1,
        "nafi.nodes": 3,
        "nafi.epochs": 2,
        "nafi.batch": 8,
        "nafi.rate": 0.05,
        "nafi.momentum": 0.9,
        "nafi.penalty": 0.0,
        "nafi.evidence": 500.0,
        "nafi.out": str(out),
        "data": "not ours",
    }
    seen = []
    name = f"{Small.__module__}:Small"
    server = server_app(
        Small, INPUTS, classes=CLASSES, name=name, evaluate=lambda model: seen.append(1) or {}
    )
    server(grid(), Context(1, 0, {}, RecordDict(), told))
    assert len(seen) == ROUNDS
    assert_equal(load(out, trust_factory=name).state_dict(), reference("layerwise"))
    for name, why in {
        "penlty": "no setting 'penlty'; did you mean penalty",
        "quorom": "did you mean quorum",
        "zzz": "there are quorum, .* rounds, .* penalty",
    }.items():
        with pytest.raises(InputError, match=why):
            server(grid(), Context(1, 0, {}, RecordDict(), {**told, f"nafi.{name}": 1.0}))
