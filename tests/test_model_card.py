"""Model cards: what users look for is in them, and no name becomes markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml
from markdown_it import MarkdownIt
from torch import nn

import nafi
from nafi.fusion import FusionResult
from nafi.model_card import Origin, model_card
from nafi.model_card import _plain as plain
from tests.fusion.networks import seeded
from tests.test_cli import run

NASTY = [
    "plain.safetensors",
    "a\n---\nlicense: mit\n",
    'quote" \\ and: [list]',
    "```\n# heading\n```",
    "`code` | cell | <script>alert(1)</script>",
    "\\| <img src=x>",
    "[link](http://example.org) www.example.org",
    "\x1b[31mred\u2028line\udc80",
    "- item",
]


@pytest.fixture(scope="module")
def result() -> FusionResult:
    models = [seeded(s, 8, 12, 9, 5) for s in range(len(NASTY))]
    inputs = (torch.zeros(2, 8),)
    return nafi.fuse(models, inputs, validate=weight_of_first, names=NASTY, penalty=0.3)


def weight_of_first(model: nn.Module) -> float:
    return float(next(model.parameters()).detach().abs().sum())


def test_the_front_matter_names_the_parents_and_nothing_else(result: FusionResult) -> None:
    card = model_card(result, Path("out\nlicense: mit"), Origin(NASTY, "nafi fuse"), hub=True)
    start, front, text = card.split("---\n", 2)
    assert start == ""
    data = yaml.safe_load(front)
    assert data == {
        "library_name": "transformers",
        "tags": ["nafi", "merge"],
        "base_model": NASTY,
    }
    assert "license: mit\n" not in text


def test_no_name_becomes_markup(result: FusionResult) -> None:
    """Lines are headings, cells and fences of ours alone, however files are called."""
    command = "nafi fuse " + " ".join(NASTY)
    card = model_card(result, Path("x.safetensors"), Origin(NASTY, command), hub=False)
    headings = [line for line in card.splitlines() if line.startswith("#")]
    names = ["Parents", "Scores", "Method", "Widths", "Size", "Use", "Repeat"]
    assert headings == ["# `x.safetensors`", *(f"## {name}" for name in names)]
    for line in card.splitlines():
        if line.startswith("|"):
            # As GitHub splits a row: signs after a backslash do not count.
            cells = re.sub(r"\\[!-/:-@\[-`{-~]", "", line).count("|") - 1
            assert cells in (2, 3), line
            assert "<" not in re.sub(r"\\[!-/:-@\[-`{-~]", "", line)
    fences = [line for line in card.splitlines() if line.startswith("```")]
    assert fences == ["```python", "```", "````sh", "````"]
    assert not set("\x1b\u2028\udc80") & set(card)
    card.encode()


@pytest.mark.parametrize(
    "name",
    [
        *NASTY,
        "layer_1.weight",
        "_x_ __y__ a_ _b a*b*c ~~gone~~",
        "# heading",
        "-",
        "---",
        "+ item",
        "> quote",
        "12. item",
        "3.",
        "1) item",
        "===",
        "&lt;b&gt; &#60;",
        "![x](y) <http://a.b>",
        "http://example.org",
    ],
)
def test_names_are_shown_as_they_are_by_a_renderer(name: str) -> None:
    """Alone in a line, behind words, and in a cell of a table."""
    markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    text = plain(name)
    shown = "".join(c for c in name if c.isprintable())
    for source, cells in [
        (text, 1),
        (f"before: {text}", 1),
        (f"| a | b |\n| --- | --- |\n| {text} | x |", 4),
    ]:
        inline = [token for token in markdown.parse(source) if token.type == "inline"]
        assert len(inline) == cells
        found = inline[-2 if cells == 4 else 0]
        kinds = {child.type for child in found.children or []}
        assert kinds <= {"text", "text_special"}, kinds
        if shown == name:
            rendered = "".join(child.content for child in found.children or [])
            assert rendered.removeprefix("before: ") == name


def test_plain_names_need_no_backslash() -> None:
    for name in ["a.safetensors", "1.0", '"attach"', "-0.5", "layer1_conv.weight", "runs/a (1).pt"]:
        assert plain(name) == name


def test_a_card_says_how_good_and_how_large(result: FusionResult) -> None:
    card = model_card(result, Path("x.safetensors"), Origin(["a", "b"]), hub=False)
    assert result.scores is not None
    for score in [result.scores.fused, *result.scores.clients, result.scores.best]:
        assert f"{score:.4g}" in card
    for group, width in result.widths.items():
        assert f"| {group} | " in card
        assert f" | {width} |" in card
    assert f"{sum(p.numel() for p in result.model.parameters()):,} parameters" in card
    assert "| penalty | 0.3 |" in card
    assert "## Repeat" not in card


def test_every_output_of_the_command_has_one(tmp_path: Path) -> None:
    for seed, name in enumerate(["a", "b|`c"]):
        model = seeded(seed, 8, 12, 9, 5)
        nafi.save(model, tmp_path / f"{name}.safetensors", factory="tests.architectures:mlp")
    options = ["--trust-factory", "tests.architectures:mlp", "--out", "f.safetensors"]
    options += ["--input-shape", "8", "--penalty", "0.2", "--json"]
    done = run("fuse", "a.safetensors", "b|`c.safetensors", *options, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["card"] == "f.md"
    card = (tmp_path / "f.md").read_text()
    assert "\n- `a.safetensors`\n- ``b|`c.safetensors``\n" in card
    command = f"nafi fuse a.safetensors 'b|`c.safetensors' {' '.join(options[:4])}"
    assert command in card
    assert "Nobody has scored this model" in card
    assert 'nafi.load("f.safetensors", "tests.architectures:mlp")' in card
    (tmp_path / "f.safetensors").unlink()
    done = run("fuse", "a.safetensors", "b|`c.safetensors", *options, cwd=tmp_path)
    assert "f.md exists already" in done.stderr
    assert (tmp_path / "f.md").read_text() == card
