"""Recipes of `nafi fuse`, and those that its outputs hold."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import nafi
from nafi.errors import CheckpointError
from nafi.headers import add_note, read_header
from nafi.recipes import store_recipe, stored_recipe, write_toml
from tests.test_cli import complaint, run
from tests.test_cli_fuse import FILES, folder, network

__all__ = ["folder"]  # a fixture

RECIPE = """
checkpoints = ["a.safetensors", "b.safetensors", "c.pt"]
out = "g.safetensors"
model = "networks:net"
max-width = "1.5x"
sample_counts = [10, 20, 30]
probe = "noise"

[option]
sweeps = 3
clip = "None"
"""
COMMAND = [
    *FILES,
    *["--model", "networks:net", "--max-width", "1.5x", "--sample-counts", "10,20,30"],
    *["--probe", "noise", "--option", "sweeps=3", "--option", "clip=None"],
]


def tensors(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(path)
    return found


def assert_same(found: Path, wanted: Path) -> None:
    """Bit for bit."""
    ours, theirs = tensors(found), tensors(wanted)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_recipe_says_what_the_command_line_says(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE)
    done = run("fuse", "recipe.toml", "--json", cwd=folder)
    assert done.returncode == 0, done.stderr
    other = run("fuse", *COMMAND, "--out", "h.safetensors", "--json", cwd=folder)
    assert other.returncode == 0, other.stderr
    assert json.loads(done.stdout)["options"] == json.loads(other.stdout)["options"]
    assert_same(folder / "g.safetensors", folder / "h.safetensors")


def test_an_output_holds_the_recipe_that_repeats_it(folder: Path) -> None:
    """To the last byte of the file, from another folder than that of the first run."""
    out = folder / "out"
    out.mkdir()
    command = ["--out", "out/g.safetensors", "--report", "out/page.html"]
    done = run("fuse", *COMMAND, *command, cwd=folder)
    assert done.returncode == 0, done.stderr
    first = (out / "g.safetensors").read_bytes()
    printed = run("inspect", "out/g.safetensors", "--recipe", cwd=folder).stdout
    recipe = tomllib.loads(printed)
    assert recipe["checkpoints"] == [f"../{name}" for name in FILES]
    assert (recipe["out"], recipe["report"]) == ("g.safetensors", "page.html")
    assert recipe["option"] == {"sweeps": 3, "clip": "None"}
    assert str(folder) not in printed
    (out / "again.toml").write_text(printed)
    refused = run("fuse", "out/again.toml", "--force", cwd=folder)
    assert refused.returncode == 2
    done = run(
        "fuse", *refused.stderr.split(", give ")[1].split(), "out/again.toml", "--force", cwd=folder
    )
    assert done.returncode == 0, done.stderr
    assert (out / "g.safetensors").read_bytes() == first
    assert nafi.load(out / "g.safetensors", lambda: network(0))[0].out_features == 15


def test_the_command_line_comes_before_the_recipe(folder: Path) -> None:
    (folder / "recipe.toml").write_text(RECIPE)
    arguments = ["a.safetensors", "b.safetensors", "--sample-counts", "1,2", "--max-width", "1.2x"]
    done = run("fuse", "recipe.toml", *arguments, "--out", "h.safetensors", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = tomllib.loads(run("inspect", "h.safetensors", "--recipe", cwd=folder).stdout)
    assert told["checkpoints"] == ["a.safetensors", "b.safetensors"]
    assert (told["max_width"], told["sample_counts"], told["probe"]) == ("1.2x", "1,2", "noise")
    assert not (folder / "g.safetensors").exists()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("penalti = 3", "there is no 'penalti'; did you mean 'penalty'?"),
        ('penalty = "high"', "penalty: found 'high', expected a number"),
        ("seed = true", "seed: found True, expected a whole number"),
        ('frontier = "yes"', "expected true or false"),
        ("budget = [1.0]", "budget: found 1.0, expected text in quotes"),
        ('option = "sweeps=3"', "expected a table [option]"),
        ("option.day = 2024-02-29", "option.day: found 2024-02-29, expected no date and no time"),
        ("force = true", "'force' belongs on the command line: --force"),
        ('colour = "red"', "there is no 'colour'"),
        ("out = ", "is not TOML"),
    ],
)
def test_what_is_wrong_with_a_recipe_is_told_in_a_line(
    line: str,
    words: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (folder / "recipe.toml").write_text(line + '\nmodel = "networks:net"\n')
    before = sorted(folder.iterdir())
    told = complaint(["fuse", "recipe.toml"], folder, monkeypatch, capsys)
    assert words in told
    assert told.count("\n") == 1
    assert sorted(folder.iterdir()) == before


def test_recipes_that_are_not_there_or_two_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, words in [
        (["no.toml"], "cannot read no.toml: No such file"),
        (["a.toml", "b.toml"], "found the recipes a.toml, b.toml, expected one"),
    ]:
        assert words in complaint(["fuse", *arguments], folder, monkeypatch, capsys)
    for arguments in (["a.safetensors", "--recipe", "--model", "networks:net"], ["--recipe"]):
        told = complaint(["inspect", *arguments], folder, monkeypatch, capsys)
        assert "give the file and --recipe alone" in told


def test_a_recipe_of_a_stranger_is_only_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing that it names is imported, and it cannot command the terminal."""
    (folder / "trap.py").write_text("raise SystemExit('imported')")
    save_file({"x": torch.zeros(2)}, folder / "x.safetensors")
    told = {"model": "trap:net", "out": "\x1b[2Jg\x9b31m\u202e", "option": {"a b": [1.5, True]}}
    store_recipe(folder / "x.safetensors", told)
    done = run("inspect", "x.safetensors", "--recipe", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert all(character.isprintable() or character == "\n" for character in done.stdout)
    assert tomllib.loads(done.stdout) == {"taken_from": "x.safetensors", **told}
    for text in ("a = ", "a = " + "[" * 10**5):
        add_note(folder / "x.safetensors", "nafi-recipe", text)
        with pytest.raises(CheckpointError, match="not TOML"):
            stored_recipe(folder / "x.safetensors")
    words = complaint(["inspect", "a.safetensors", "--recipe"], folder, monkeypatch, capsys)
    assert "does not hold the recipe that made it" in words


def test_a_folder_holds_its_recipe_in_a_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not hold the recipe"):
        stored_recipe(tmp_path)
    store_recipe(tmp_path, {"out": "."})
    assert stored_recipe(tmp_path) == {"out": "."}
    (tmp_path / "nafi-recipe.toml").write_bytes(b"\x80")
    with pytest.raises(CheckpointError, match="holds a recipe that is not TOML"):
        stored_recipe(tmp_path)


def test_a_note_leaves_the_numbers_as_they_are(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    content = {"a": torch.randn(3, 5), "b": torch.arange(7, dtype=torch.int64)}
    save_file(content, file, metadata={"other": "kept"})
    for text in ("short", 'longer, and with "quotes" and ünïcode', "s"):
        add_note(file, "mine", text)
        header = read_header(file)
        assert header.notes == {"other": "kept", "mine": text}
        assert header.shapes == {"a": (3, 5), "b": (7,)}
        assert header.types == {"a": "F32", "b": "I64"}
        assert all(torch.equal(tensors(file)[name], content[name]) for name in content)
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="cannot be read as safetensors"):
        add_note(file, "mine", "text")


PLAIN = st.one_of(
    st.text(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False)
)


@given(
    st.dictionaries(
        st.text(), st.one_of(PLAIN, st.lists(PLAIN), st.dictionaries(st.text(), PLAIN)), max_size=5
    )
)
def test_what_is_written_as_toml_reads_back(recipe: dict[str, object]) -> None:
    text = write_toml(recipe)
    assert tomllib.loads(text) == recipe
    assert all(character.isprintable() or character == "\n" for character in text)
