"""A dozen networks of the support matrix; and its contracts, limits and page can be trusted."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

import nafi
from nafi.errors import SpecError
from nafi.graph.tensors import Segment, TensorSpec
from tests.support import __main__ as matrix
from tests.support import contracts, page
from tests.support.contracts import Record, Subject, blank, examine, in_general_position
from tests.support.networks import BY_LABEL, Network, floats

FAST = ["torch/LSTM, num_layers=2, bidirectional=True", "torch/TransformerEncoder, causal mask"]
GATE = [
    *FAST,
    "monai/UNet",
    "monai/AttentionUnet",
    "monai/HighResNet",
    "monai/DynUNet, deep supervision",
    "monai/UNETR",
    "transformers/BertForSequenceClassification",
    "transformers/GPT2LMHeadModel",
    "transformers/BartForConditionalGeneration",
    "transformers/ViTForImageClassification",
    "transformers/ResNetForImageClassification",
]


@pytest.mark.parametrize(
    "label", [pytest.param(n, marks=() if n in FAST else pytest.mark.slow) for n in GATE]
)
def test_a_network_of_another_package_keeps_every_contract(label: str) -> None:
    *_, record = examine(BY_LABEL[label])
    assert record["errors"] == []
    assert {name: record[name] for name in page.CHECKS} == dict.fromkeys(page.CHECKS, True)
    assert record["grows"] > 0


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def network(make: Callable[[], nn.Module] = mlp) -> Network:
    return Network("tests", "network", make, floats((4, 5)))


def misread(change: Callable[[TensorSpec], TensorSpec]) -> Subject:
    """Two networks with a spec in which something about the last weight is wrong."""
    subject = Subject.of(network())
    spec = nafi.groups(subject.one, subject.inputs)
    wrong = {**spec.tensors, "3.weight": change(spec.tensors["3.weight"])}
    subject.__dict__["spec"] = replace(spec, tensors=wrong)
    return subject


def test_a_network_in_general_position_has_no_constants() -> None:
    model = in_general_position(mlp(), torch.Generator().manual_seed(0))
    for name, tensor in model.state_dict().items():
        assert tensor.numel() == 1 or tensor.min() < tensor.max(), name
    assert (model.state_dict()["1.running_var"] > 0).all()
    assert model.state_dict()["1.num_batches_tracked"] == 0


def test_a_right_spec_keeps_every_contract() -> None:
    *_, record = examine(network())
    assert all(record[name] for name in page.CHECKS)
    assert record["independent"]
    assert (record["grows"], record["groups"], record["errors"]) == (1, 1, [])
    assert record["grown"] == 1  # otherwise loading says little


def test_an_axis_without_its_group_is_seen() -> None:
    subject = misread(lambda t: replace(t, axes=(t.axes[0], (Segment((8,)),))))
    assert not contracts.permuted(subject)["permuted"]
    assert not contracts.copies(subject)["copies"]


def test_a_weight_that_does_not_read_its_inputs_is_seen() -> None:
    """Neurons kept apart would each count in full, and the fused network be a sum."""
    subject = misread(lambda t: replace(t, reads=()))
    found = contracts.apart(subject)
    assert not found["apart"]
    assert not found["independent"]


@pytest.mark.parametrize(("kind", "foreign"), [(SpecError, False), (KeyError, True)])
def test_errors_of_nafi_are_told_from_others(kind: type[Exception], foreign: bool) -> None:
    def step(subject: Subject) -> Record:
        raise kind("a reason")

    record = blank(network())
    assert contracts.attempt(step, Subject.of(network()), record) == {}
    (error,) = record["errors"]
    assert (error["step"], error["error"], error["foreign"]) == ("step", kind.__name__, foreign)
    assert "a reason" in error["text"]


def test_folders_of_the_machine_stay_out_of_the_records() -> None:
    text = contracts.short("x / 2 fails (/home/me/lib/torch/nn.py:2), see a/b, 'c.py'")
    assert text == "x / 2 fails (nn.py:2), see a/b, 'c.py'"


def test_a_network_that_ends_its_process_leaves_a_record() -> None:
    def broken() -> nn.Module:
        raise RuntimeError

    def busy() -> nn.Module:
        while True:
            pass

    for make, cause in [(os.abort, "memory"), (broken, "does not build"), (busy, "more than 1 s")]:
        record = matrix.isolated(network(make), seconds=1)
        assert record["errors"][0]["step"] == "traced"
        assert cause in record["errors"][0]["text"]
        assert not record["traced"]


def test_a_record_comes_back_from_its_process() -> None:
    record = matrix.isolated(network(), seconds=60)
    assert record["traced"]
    assert record["megabytes"] > 0


def records() -> list[Record]:
    """A network with all that is asked, one that is refused, and one that cannot be loaded."""
    good = blank(network()) | dict.fromkeys(page.CHECKS, True)
    good |= {"groups": 4, "grows": 3, "coverage": 0.95, "parameters": 1234, "independent": True}
    refused, broken = blank(network()), {**good, "loads": False, "loads_gap": 0.25, "grows": 0}
    contracts.failed(refused, "traced", "KeyError", "'a|b'")
    return [good, {**refused, "network": "other/b"}, {**broken, "transformer": True}]


def test_the_summary_counts() -> None:
    text = page.summary(records())
    assert "| traced | 97% | 2 of 3 (66.7%) |" in text
    assert "| loads | 100% | 1 of 2 (50.0%) |" in text
    assert "| transformers with a group that grows | 100% | 0 of 1 (0.0%) |" in text
    assert "| errors that are not nafi's | 0 | 1 |" in text


def test_the_page_names_every_failure() -> None:
    text = page.page(records(), 120, 3)
    assert "from 2 packages" in text
    assert "- other/b: traced: KeyError (not of nafi): 'a\\|b'" in text
    assert "- tests/network: loads: differs by 0.2" in text
    assert "| network | 1,234 | 4 | 95.0% | yes | yes | yes | 3/4 | yes |" in text


def test_the_page_is_that_of_the_records() -> None:
    known = list(matrix.read(matrix.RECORDS))
    assert matrix.PAGE.read_text(encoding="utf-8") == matrix.rendered(known)
    assert {record["network"] for record in known} <= set(BY_LABEL)
    assert len(known) >= 80
    assert len({page.package(record) for record in known}) >= 6
