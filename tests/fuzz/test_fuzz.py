"""Whatever a file or a client holds: an error of ours that says so, or something that can be used.

NAFI_FUZZ_CASES: cases for each of the readers; `make fuzz` runs 10,000.
"""

from __future__ import annotations

import io
import json
import os
import signal
import tempfile
import tomllib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import BertConfig, BertForSequenceClassification
from typer.main import get_command

import nafi
from nafi.checkpoints import outline_clients, read
from nafi.cli.app import app
from nafi.cli.recipe import read_values
from nafi.errors import NafiError
from nafi.experiments import load_experiment, read_runs
from nafi.experiments.files import PAPER
from nafi.federated import (
    Acceptance,
    Strategy,
    Task,
    Trainer,
    Training,
    Update,
    UpdateError,
    make_strategy,
)
from nafi.federated.architecture import Shapes
from nafi.federated.checkpoint import checksum, read_state, write_state
from nafi.federated.flower import Federation, _outcome
from nafi.federated.messages import task_from, task_to, update_from, update_to
from nafi.federated.run import Outcome, Round
from nafi.federated.strategy import State
from nafi.graph.spec import ModelSpec
from nafi.probes import load_probe
from nafi.recipes import extracted_recipe, write_toml
from tests.federated.grids import LocalGrid
from tests.federated.networks import CLASSES, FEATURES, Small, normed, pictures, population
from tests.federated.test_simulation import made
from tests.fuzz.mutations import (
    edited,
    edited_bytes,
    edited_safetensors,
    header_of,
    junk,
    with_header,
)

CASES = int(os.environ.get("NAFI_FUZZ_CASES", "40"))
SECONDS = 30  # for a case; then it hangs, even on a busy machine
fuzzed = settings(
    max_examples=CASES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@cache
def folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="nafi-fuzz-"))


@pytest.fixture(autouse=True, scope="module")
def _cleaned() -> Iterator[None]:
    yield
    for path in sorted(folder().rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    folder().rmdir()
    folder.cache_clear()


def file_with(content: bytes, suffix: str = ".safetensors") -> Path:
    path = folder() / f"case{suffix}"
    path.write_bytes(content)
    return path


@cache
def strategy(name: str = "layerwise") -> Strategy:
    if name == "layerwise":
        return made(name)
    return make_strategy(name, normed(), Training(epochs=1, batch=8), rounds=3)


# The other has batch normalisation, and takes longer.
NAMES = ("layerwise", "layerwise", "layerwise", "match-then-average")
RULES = Acceptance(quorum=1, classes=CLASSES, max_bytes=10**6)


@cache
def exchange(name: str = "layerwise") -> tuple[State, Task, Update]:
    """A round of a federation: a task and the update that answers it."""
    clients = {c: pictures(20, int(c)) for c in "012"} if name != "layerwise" else population()
    work = Trainer(strategy(name).architecture, clients, CLASSES)
    state = strategy(name).start()
    if name == "layerwise":
        updates = [work(client, strategy().task(state, client))[0] for client in clients]
        state = strategy().aggregate(state, updates)
    task = strategy(name).task(state, "1")
    return state, task, work("1", task)[0]


@cache
def shapes(name: str) -> Shapes:
    return strategy(name).architecture.shapes(exchange(name)[0].form)


def check(found: Outcome, name: str = "layerwise") -> None:
    """An outcome is refused with a reason, or it does not end a round that others deliver to."""
    state, task, good = exchange(name)
    if isinstance(found, Exception):
        raise UpdateError(str(found))
    RULES.check(found[0], "1", task, shapes(name))
    under_way = Round(strategy(name), state, ["0", "1"], RULES, lambda *_: None)
    under_way.tasks = {"0": replace(task), "1": task}
    outcomes: list[Outcome] = [(replace(good, client="0"), 0.0), found]
    try:
        after, _ = under_way.finish(outcomes)
    except NafiError as error:
        raise AssertionError("what one client sends ends the round") from error
    assert not under_way.refused
    strategy(name).model(after)


def update_bytes(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    content = data.draw(edited_safetensors(update_to(exchange(name)[2])))
    check((update_from(content), 0.0), name)


def updates(data: st.DataObject) -> None:
    """Updates that were read, with a value that is not what it should be."""
    network = data.draw(st.sampled_from(NAMES))
    update = exchange(network)[2]
    fields = ["", "client", "round", "samples", "class_counts", "tensors", "extras"]
    name = data.draw(st.sampled_from(fields))
    value: Any = data.draw(junk())
    if name == "tensors":
        key = data.draw(st.sampled_from(sorted(update.tensors)))
        own = update.tensors[key]
        shape = data.draw(st.lists(st.integers(0, 5), max_size=3))
        kind = data.draw(st.sampled_from([torch.float32, torch.float64, torch.int64, torch.bool]))
        odd = torch.ones(shape).to(kind) * data.draw(st.sampled_from([1, 0, -1]))
        number = data.draw(st.sampled_from([0, 1e9, -1e9, 1e30, float("nan"), float("inf")]))
        full = torch.full_like(own, number if own.is_floating_point() else 10**9)
        value = {**update.tensors, key: data.draw(st.sampled_from([full, odd, value]))}
    if name == "class_counts" and isinstance(value, list):
        value = tuple(value)
    check((replace(update, **{name: value}) if name else update, 0.0), network)


def task_bytes(data: st.DataObject) -> None:
    """A client survives a server that errs, too."""
    content = data.draw(edited_safetensors(task_to(exchange()[1])))
    task = task_from(content)
    if task.training.epochs * task.training.batch < 10**4:
        Trainer(strategy().architecture, population(), CLASSES)("1", task)


@cache
def state_bytes() -> bytes:
    path = folder() / "whole.safetensors"
    write_state(path, exchange()[0], [{"round": 1}], strategy().settings())
    return path.read_bytes()


def sign(path: Path) -> None:
    """Give a checkpoint the checksum of its content, as whoever forges one would."""
    try:
        with safe_open(path, framework="pt") as handle:
            metadata = handle.metadata() or {}
            tensors = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        text = metadata["nafi"]
    except (SafetensorError, OSError, ValueError, KeyError):
        return
    save_file(tensors, path, metadata={**metadata, "sha256": checksum(text, tensors)})


def checkpoints_of_runs(data: st.DataObject) -> None:
    path = file_with(data.draw(edited_safetensors(state_bytes())))
    if data.draw(st.booleans()):
        sign(path)
    state, _, _ = read_state(path, strategy().state_type)
    strategy().check_state(state)
    strategy().model(state)
    strategy().task(state, "1")


@cache
def model_bytes() -> bytes:
    torch.manual_seed(0)
    inputs = (torch.zeros(2, FEATURES),)
    result = nafi.fuse([Small(), Small()], inputs)
    path = folder() / "model.safetensors"
    nafi.save(result, path, factory="tests.federated.networks:Small", example_inputs=inputs)
    return path.read_bytes()


def models(data: st.DataObject) -> None:
    """The factory is given; what a file names instead is not even looked at."""
    path = file_with(data.draw(edited_safetensors(model_bytes())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nafi.load(path, Small)


@cache
def hugging_face() -> tuple[Path, Any, Any]:
    """A folder with its weights in several files; its configuration and its index."""
    path = folder() / "bert"
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 6, "num_labels": 3}
    tables = {"vocab_size": 11, "max_position_embeddings": 6}
    config = BertConfig(num_hidden_layers=1, **sizes, **tables)
    BertForSequenceClassification(config).save_pretrained(path, max_shard_size="1KB")
    texts = [(path / name).read_text() for name in ("config.json", INDEX)]
    return path, *map(json.loads, texts)


INDEX = "model.safetensors.index.json"


def hugging_face_folders(data: st.DataObject) -> None:
    """A configuration or an index that is almost right; no case may run long or take much memory.

    Configurations hold many values that do not matter: most cases change those that do.
    """
    path, config, index = hugging_face()
    name = data.draw(st.sampled_from(["config.json", "config.json", INDEX]))
    written = {"config.json": config, INDEX: index}
    key = data.draw(st.sampled_from(["", *sorted(config)]))
    if name == "config.json" and key:
        written[name] = {**config, key: data.draw(junk())}
    else:
        written[name] = data.draw(edited(written[name]))
    for file, content in written.items():
        text = json.dumps(content).encode("utf-8", "surrogatepass")
        changed = file == name and data.draw(st.booleans())
        (path / file).write_bytes(data.draw(edited_bytes(text)) if changed else text)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nafi.load(path)
    assert type(model).__module__.startswith("transformers.models.")
    assert sum(p.numel() for p in model.parameters()) < 10**5


@cache
def sums_bytes() -> tuple[torch.nn.Module, bytes]:
    torch.manual_seed(0)
    model, path = Small(), folder() / "whole.stats"
    batch = (torch.randn(60, FEATURES), torch.arange(60) % CLASSES)
    nafi.save_statistics(nafi.statistics(model, [batch]), path)
    return model, path.read_bytes()


def sums(data: st.DataObject) -> None:
    """What a client sums up gives a network that runs, or is refused."""
    model, content = sums_bytes()
    path = file_with(data.draw(edited_safetensors(content)), ".stats")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        solved = nafi.solve_head(model, [nafi.load_statistics(path)])
    assert all(bool(tensor.isfinite().all()) for tensor in solved.parameters())


@cache
def fuse_parameters() -> list[Any]:
    """The options of `nafi fuse`, which a recipe may name."""
    command: Any = get_command(app)
    return list(command.commands["fuse"].params)


RECIPE: dict[str, Any] = {
    "checkpoints": ["a.safetensors", "b.pt"],
    "model": "networks:net",
    "max-width": "1.5x",
    "sample_counts": [10, 20],
    "probe": "noise",
    "seed": 3,
    "option": {"sweeps": 3, "penalty": 0.5, "clip": "None"},
}


def recipe_bytes(data: st.DataObject) -> bytes:
    """A recipe with other values, with dates, which only TOML has, or with other bytes."""
    recipe = data.draw(edited(RECIPE))
    if not isinstance(recipe, dict):
        recipe = {data.draw(st.sampled_from([*RECIPE, "taken_from"])): recipe}
    recipe = without_null(recipe)
    if data.draw(st.integers(0, 9)) == 9:
        table = recipe.get("option")
        date = data.draw(st.dates() | st.times() | st.datetimes())
        (table if isinstance(table, dict) else recipe)["penalty"] = date
    text = write_toml(recipe).encode("utf-8", "surrogatepass")
    return data.draw(edited_bytes(text)) if data.draw(st.booleans()) else text


def without_null(value: Any) -> Any:
    """TOML has no null."""
    if isinstance(value, dict):
        return {key: without_null(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [without_null(each) for each in value if each is not None]
    return "" if value is None else value


def recipes(data: st.DataObject) -> None:
    values, _ = read_values(file_with(recipe_bytes(data), ".toml"), fuse_parameters())
    assert set(values) <= {str(parameter.name) for parameter in fuse_parameters()}


def recipes_of_outputs(data: st.DataObject) -> None:
    """What a stranger's file says made it can be printed, and reads back as it was."""
    content = recipe_bytes(data)
    if data.draw(st.booleans()):
        output = folder() / "output"
        output.mkdir(exist_ok=True)
        (output / "nafi-recipe.toml").write_bytes(content)
    else:
        header = header_of(model_bytes())
        header["__metadata__"]["nafi-recipe"] = content.decode("utf-8", "replace")
        output = file_with(with_header(model_bytes(), data.draw(edited(header))))
    made = extracted_recipe(output)
    text = write_toml(made)
    assert repr(tomllib.loads(text)) == repr(made)
    assert all(character.isprintable() or character == "\n" for character in text)


@cache
def torch_bytes() -> list[bytes]:
    """Of torch.save, in both of its formats."""
    torch.manual_seed(0)
    found = []
    for zipped in (True, False):
        stream = io.BytesIO()
        torch.save(Small().state_dict(), stream, _use_new_zipfile_serialization=zipped)
        found.append(stream.getvalue())
    return found


def torch_files(data: st.DataObject) -> None:
    path = file_with(data.draw(edited_bytes(data.draw(st.sampled_from(torch_bytes())))), ".pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        nafi.load(path, Small)


def outlines(data: st.DataObject) -> None:
    """What a dry run looks at: shapes alone."""
    path = file_with(data.draw(edited_safetensors(model_bytes())))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = outline_clients([path, path], "tests.federated.networks:Small")
    assert all(tensor.is_meta for shapes in found.shapes for tensor in shapes.values())


@cache
def spec_data() -> Any:
    return nafi.groups(Small(), (torch.zeros(2, FEATURES),)).to_dict()


def specs(data: st.DataObject) -> None:
    ModelSpec.from_dict(data.draw(edited(spec_data())))


@cache
def experiments() -> list[bytes]:
    return [path.read_bytes() for path in PAPER.iterdir() if path.name.endswith(".toml")]


def configurations(data: st.DataObject) -> None:
    text = data.draw(edited_bytes(data.draw(st.sampled_from(experiments()))))
    path = file_with(text, ".toml")
    experiment = load_experiment(str(path), data.draw(st.sampled_from([None, "quick"])))
    for method in experiment.methods:
        method.candidates()


def records(data: st.DataObject) -> None:
    record = {
        "experiment": "mnist-nets",
        "trial": 0,
        "clients": 15,
        "hidden": 1,
        "method": "nafi",
        "test": 90.0,
        "widths": [100],
    }
    lines = [json.dumps(record), json.dumps(data.draw(edited(record)))]
    text = "\n".join(lines).encode()
    read_runs(file_with(data.draw(st.just(text) | edited_bytes(text)), ".jsonl"))


@cache
def federation() -> Federation:
    LocalGrid(ClientApp(), {})
    return Federation(strategy(), acceptance=RULES)


def replies(data: st.DataObject) -> None:
    """Whatever a node answers, it is an update or a reason why not; it never ends the run."""
    content = data.draw(edited_safetensors(update_to(exchange()[2])) | st.binary(max_size=64))
    kind = data.draw(st.sampled_from(["nafi.safetensors", "numpy.ndarray", ""]))
    array = Array(dtype="uint8", shape=(3,), stype=kind, data=content)
    key = data.draw(st.sampled_from(["nafi", "x"]))
    name = data.draw(st.sampled_from(["message", "y"]))
    records = [
        RecordDict({key: ArrayRecord({name: array})}),
        RecordDict({"nafi": ConfigRecord({"message": content})}),
        RecordDict(),
    ]
    server, question = federation(), Message(RecordDict(), 1, "train")
    reply = Message(data.draw(st.sampled_from(records)), reply_to=question)
    if data.draw(st.integers(0, 9)) == 9:
        reply = Message(Error(code=data.draw(st.integers(0, 300))), reply_to=question)
    check(_outcome(server._kept(reply, folder() / "reply")))


def other_files(data: st.DataObject) -> None:
    read(file_with(data.draw(st.binary(max_size=200))))


@cache
def array_bytes() -> bytes:
    stream = io.BytesIO()
    np.save(stream, np.arange(12.0).reshape(4, 3))
    return stream.getvalue()


def probes(data: st.DataObject) -> None:
    load_probe(str(file_with(data.draw(edited_bytes(array_bytes())), ".npy")), ())


# Each with whether something is left that can be used, too.
READERS: dict[Callable[[st.DataObject], None], bool] = {
    update_bytes: True,
    updates: True,
    task_bytes: True,
    checkpoints_of_runs: True,
    models: True,
    hugging_face_folders: True,
    specs: True,
    configurations: True,
    records: True,
    replies: True,
    sums: True,
    recipes: True,
    recipes_of_outputs: True,
    torch_files: True,
    outlines: True,
    probes: True,
    other_files: False,
}


@contextmanager
def limited() -> Iterator[None]:
    """A case that hangs fails."""

    def hung(*_: object) -> None:
        raise AssertionError(f"a case took more than {SECONDS} seconds")

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.__name__)
def test_only_our_errors(reader: Callable[[st.DataObject], None]) -> None:
    """Any other error fails, and any case that hangs; both paths were taken."""
    found: Counter[str] = Counter()
    exchange(), exchange("match-then-average")  # once, and not within a case

    @fuzzed
    @given(st.data())
    def case(data: st.DataObject) -> None:
        try:
            with limited():
                reader(data)
            found["used"] += 1
        except NafiError:
            found["refused"] += 1

    case()
    assert found["refused"] > CASES / 10
    assert (found["used"] > 0) == READERS[reader]
