"""What the analysis finds in networks whose answer is known by hand, and what it refuses."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nafi
from nafi.errors import SpecError
from nafi.graph import ModelSpec, Role, Segment, SpecWarning, check_spec, gather, permute, rules
from nafi.graph.atoms import product
from nafi.graph.rules import shapes
from nafi.graph.spec import Place
from tests.graph import zoo


def spec_of(model: nn.Module, *shape: int, **options: bool) -> ModelSpec:
    return nafi.groups(model, (torch.zeros(2, *shape),), **options)


def axis(*segments: tuple[str | int, ...]) -> tuple[Segment, ...]:
    return tuple(Segment(factors) for factors in segments)


def test_lenet_by_hand() -> None:
    spec = spec_of(zoo.LeNet(), 3, 32, 32)
    assert spec.widths == {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84}
    assert spec.axes["conv1.weight"] == (axis(("conv1",)), axis((3,)), axis((5,)), axis((5,)))
    assert spec.axes["fc1.weight"] == (axis(("fc1",)), axis(("conv2", 25)))
    assert spec.axes["fc3.bias"] == (axis((10,)),)
    pinned = {(p.tensor, p.axis): p.size for p in spec.pinned}
    assert pinned["fc1.weight", 1] == 25
    assert str(spec).splitlines()[0] == "conv1: 6 in conv1.weight, conv1.bias, conv2.weight"
    assert Place("fc1.weight", 1) in spec.consumed
    assert Place("fc1.weight", 0) not in spec.consumed


def test_unet_decoder_reads_two_groups_at_their_offsets() -> None:
    """The skip comes first, then what was sampled up: the offset is the skip's width."""
    spec = nafi.groups(*zoo.seeded("unet_bilinear"))
    concatenated = [axes[1] for axes in spec.axes.values() if len(axes) > 1 and len(axes[1]) == 2]
    assert len(concatenated) == 4
    for first, second in concatenated:
        assert len(first.factors) == len(second.factors) == 1
        assert first.factors != second.factors
    assert len(spec.groups) == 18  # one for each 3x3 convolution


def test_attention_by_hand() -> None:
    """Heads, and within each head an order for query and key and one for the values."""
    spec = spec_of(zoo_model("vit_fused"), *zoo_shape("vit_fused"))
    heads, inner, values = (f"blocks.0.attention.qkv{n}" for n in ("", "/2", "/3"))
    assert spec.axes["blocks.0.attention.qkv.weight"][0] == axis(
        (heads, inner), (heads, inner), (heads, values)
    )
    assert spec.groups[inner].parent == spec.groups[values].parent == heads
    assert spec.groups[heads].parent is None


def test_a_head_width_that_heads_share_has_one_order() -> None:
    """A norm over each head's width with one weight for all heads ties the heads' orders."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(5, 3 * 4 * 6)
            self.norm = nn.LayerNorm(6)
            self.out = nn.Linear(24, 3)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 6).permute(2, 0, 3, 1, 4)
            scores = self.norm(q) @ self.norm(k).transpose(-1, -2)
            mixed = scores.softmax(-1) @ v
            return self.out(mixed.transpose(1, 2).flatten(2))

    spec = spec_of(Normed(), 7, 5)
    assert spec.groups["qkv"].width == 4
    assert spec.groups["qkv/2"].parent is None  # query and key: the norm's weight has no heads
    assert spec.groups["qkv/3"].parent == "qkv"


def test_lstm_gates_are_blocks() -> None:
    spec = spec_of(zoo_model("lstm"), *zoo_shape("lstm"))
    assert spec.axes["lstm.weight_hh_l0"] == (axis((4, "lstm")), axis(("lstm",)))
    assert spec.axes["lstm.weight_ih_l1"] == (axis((4, "lstm/2")), axis(("lstm",)))


def test_shared_weights_are_one_tensor() -> None:
    model, inputs = zoo_model("tied_language_model"), zoo_inputs("tied_language_model")
    spec = nafi.groups(model, inputs)
    (other, kept), *more = spec.aliases.items()
    assert not more
    assert {other, kept} == {"embedding.weight", "decoder.weight"}
    twin = permute(
        model, spec, {name: torch.arange(g.width).flip(0) for name, g in spec.groups.items()}
    )
    assert twin.embedding.weight is twin.decoder.weight


def test_an_operation_without_a_rule_pins_and_warns() -> None:
    class Renormed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.three(torch.relu(self.two(torch.renorm(self.one(x), 2, 0, 1.0))))

    with pytest.warns(
        SpecWarning, match=r"no rule for renorm .*test_groups.*one.weight axis 0, one.bias axis 0"
    ):
        spec = spec_of(Renormed(), 4)
    assert set(spec.groups) == {"two"}
    reasons = {(p.tensor, p.axis): p.reason for p in spec.pinned}
    assert "no rule for renorm" in reasons["one.weight", 0]
    assert reasons["three.weight", 0] == "model output"


def test_no_warning_where_all_has_a_rule() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecWarning)
        assert len(spec_of(zoo.LeNet(), 3, 32, 32).groups) == 4


def test_returned_hidden_units_are_never_permuted() -> None:
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = nn.Linear(4, 6), nn.Linear(6, 5), nn.Linear(5, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            hidden = torch.relu(self.one(x))
            return self.three(torch.relu(self.two(hidden))), hidden

    assert set(spec_of(Returns(), 4).groups) == {"two"}


def test_analysis_leaves_the_model_as_it_was() -> None:
    model = zoo_model("vgg").train()
    model.features[0].eval()
    modes = [m.training for m in model.modules()]
    state = {k: v.clone() for k, v in model.state_dict().items()}
    nafi.groups(model, zoo_inputs("vgg"))
    assert [m.training for m in model.modules()] == modes
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


# ---------------------------------------------------------- a broken rule must not go unnoticed


def broken_concatenation(call: rules.Call) -> rules.Value:
    """Forgets the order: the offset of each part is wrong."""
    value = shapes.concatenate(call)
    dim = call["dim"] % len(value.axes)
    value.axes[dim] = value.axes[dim][::-1]
    return value


def broken_flatten(call: rules.Call) -> rules.Value:
    """Takes the places for the outer part of a flattened axis."""
    value: rules.Value = call["self"]
    flat = product(*value.axes[:0:-1])
    return rules.Value([value.axes[0], flat])


def broken_norm(call: rules.Call) -> rules.Value:
    """Forgets that scale and statistics belong to the channels."""
    return rules.Value(call["input"].axes)


@pytest.mark.parametrize(
    ("op", "broken", "network"),
    [
        ("cat", broken_concatenation, "unet_bilinear"),
        ("cat", broken_concatenation, "densenet"),
        ("flatten", broken_flatten, "lenet_flatten"),
        ("batch_norm", broken_norm, "vgg"),
    ],
)
def test_the_self_test_sees_a_broken_rule(
    op: str, broken: rules.Rule, network: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rules.RULES, op, broken)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecWarning)
        with pytest.raises(SpecError, match=r"changes the output by"):
            nafi.groups(zoo_model(network), zoo_inputs(network))


def test_a_wrong_spec_by_hand_is_refused_with_the_group_and_its_parameters() -> None:
    model, inputs = zoo_model("mlp_2"), zoo_inputs("mlp_2")
    data = nafi.groups(model, inputs).to_dict()
    data["axes"]["layers.1.weight"][1] = [[8]]  # one axis forgotten
    with pytest.raises(
        SpecError, match=r"permuting group layers.0 changes .* layers.0.weight, layers.0.bias"
    ):
        check_spec(model, inputs, ModelSpec.from_dict(data))


# --------------------------------------------------------------------------- specs by hand


def test_a_spec_survives_json() -> None:
    spec = nafi.groups(zoo_model("vit_fused"), zoo_inputs("vit_fused"))
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


def test_pinning_a_group_by_hand_takes_its_children_along() -> None:
    model, inputs = zoo_model("vit_fused"), zoo_inputs("vit_fused")
    spec = nafi.groups(model, inputs)
    pinned = spec.pin("blocks.0.attention.qkv")
    assert set(spec.groups) - set(pinned.groups) == {
        "blocks.0.attention.qkv",
        "blocks.0.attention.qkv/2",
        "blocks.0.attention.qkv/3",
    }
    assert pinned.axes["blocks.0.attention.qkv.weight"][0] == axis((24,), (24,), (24,))
    check_spec(model, inputs, pinned)
    assert all(pinned.shape(name) == spec.shape(name) for name in spec.axes)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({}, "this is not a ModelSpec"),
        (
            {"groups": {}, "axes": {"w": [[[2]]]}, "consumed": [["w", float("inf")]]},
            "this is not a ModelSpec: cannot convert float infinity",
        ),
        (
            {"groups": {}, "axes": {"w": [[["nowhere"]]]}},
            r"w refers to unknown groups \['nowhere'\]",
        ),
    ],
)
def test_bad_data_is_refused(data: dict[str, object], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        ModelSpec.from_dict(data)


def test_bad_calls_say_what_to_do() -> None:
    model = zoo.MLP(5, 8, 4)
    with pytest.raises(SpecError, match=r"write \(x,\)"):
        nafi.groups(model, torch.zeros(2, 5))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="MLP does not run on the example inputs"):
        nafi.groups(model, (torch.zeros(2, 6),))
    with pytest.raises(SpecError, match=r"expected an nn.Module, found int"):
        nafi.groups(3, (torch.zeros(2, 5),))  # type: ignore[arg-type]
    spec = nafi.groups(model, (torch.zeros(2, 5),))
    with pytest.raises(SpecError, match=r"no group 'fc'; groups: layers.0"):
        permute(model, spec, {"fc": torch.arange(8)})
    with pytest.raises(SpecError, match=r"each of 0..7 once"):
        permute(model, spec, {"layers.0": torch.zeros(8, dtype=torch.long)})
    with pytest.raises(
        SpecError, match=r"layers.0.weight: found shape \(9, 5\), the network has \(8, 5\)"
    ):
        permute(zoo.MLP(5, 9, 4), spec, {})
    with pytest.raises(SpecError, match=r"the state dict lacks layers.1.weight"):
        spec.check_shapes({k: v for k, v in model.state_dict().items() if k != "layers.1.weight"})


# ------------------------------------------------------------------------------ neurons


def test_gathered_columns_know_where_they_came_from() -> None:
    model = zoo.LeNet()
    spec = spec_of(model, 3, 32, 32)
    neurons = gather(model.state_dict(), spec, "conv2")
    assert neurons.matrix.shape == (16, 6 * 25 + 1 + 120 * 25)
    incoming, _, outgoing = neurons.columns
    assert [c.role for c in neurons.columns] == [Role.INCOMING, Role.BIAS, Role.OUTGOING]
    assert (incoming.tensor, incoming.factors) == ("conv2.weight", ("conv1", 5, 5))
    assert (outgoing.tensor, outgoing.factors) == ("fc1.weight", ("fc1", 25))
    assert torch.equal(neurons.part(Role.INCOMING), model.conv2.weight.reshape(16, -1))
    assert torch.equal(neurons.part(Role.BIAS)[:, 0], model.conv2.bias)
    weight = model.fc1.weight.reshape(120, 16, 25)
    assert torch.equal(neurons.part(Role.OUTGOING), weight.transpose(0, 1).reshape(16, -1))


# ------------------------------------------------------------------------------ helpers


def zoo_model(name: str) -> nn.Module:
    return zoo.seeded(name)[0]


def zoo_inputs(name: str) -> tuple[Tensor, ...]:
    return zoo.seeded(name)[1]


def zoo_shape(name: str) -> tuple[int, ...]:
    return tuple(zoo_inputs(name)[0].shape[1:])


class Auxiliary(nn.Module):
    """A second head that only training uses, behind neurons of its own."""

    def __init__(self, functional: bool = False) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(5, 8), nn.Linear(8, 3)
        self.extra, self.norm = nn.Linear(8, 6), nn.BatchNorm1d(6)
        self.extra_head, self.drop = nn.Linear(6, 3), nn.Dropout(0.5)
        self.functional = functional
        self.never = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.drop(self.body(x).relu())
        if not self.training:
            return self.head(x)
        hidden = self.norm(self.extra(x)).relu()
        if self.functional:
            hidden = F.dropout(hidden, 0.5, self.training)
        return self.head(x), self.extra_head(hidden)


@pytest.mark.parametrize("functional", [False, True])
def test_what_only_training_uses_follows_its_neurons(functional: bool) -> None:
    """Its weights would keep their order while the body is permuted: training would differ."""
    torch.manual_seed(0)
    model, x = Auxiliary(functional), torch.randn(7, 5)
    with torch.no_grad():
        model.norm.running_mean.normal_()
    with pytest.warns(SpecWarning, match=r"uses never.weight, never.bias neither in eval nor"):
        spec = nafi.groups(model, (x,))
    assert set(spec.groups) == {"body", "extra"}
    assert spec.batchnorms == (("extra", "norm"),)
    orders = {"body": torch.randperm(8), "extra": torch.randperm(6)}
    permuted = permute(model, spec, orders)
    for network in (model, permuted):
        network.train()
        network.drop.eval()
        network.norm.eval()
        network.functional = False
    for found, expected in zip(permuted(x), model(x), strict=True):
        assert torch.allclose(found, expected, atol=1e-6)


def test_a_wrong_order_in_training_mode_is_refused() -> None:
    torch.manual_seed(0)
    model, x = Auxiliary(), torch.randn(7, 5)
    spec = nafi.groups(model, (x,), check=False)
    right = spec.tensors["extra.weight"]
    wrong = replace(right, axes=(right.axes[0], (Segment((8,)),)))
    broken = replace(spec, tensors={**spec.tensors, "extra.weight": wrong})
    with pytest.raises(SpecError, match="in training mode"):
        check_spec(model, (x,), broken)
