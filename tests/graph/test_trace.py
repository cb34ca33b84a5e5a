"""Networks that torch traces in one way or the other, and the precision of the self-test."""

from __future__ import annotations

import random
import warnings
from collections import UserDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nafi
from nafi.errors import SpecError
from nafi.graph import ModelSpec, SpecWarning, check_spec, evaluating, rebuild, trace
from nafi.graph.groups import analyse
from tests.graph import zoo

VECTORS = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(7, 2, 16, generator=torch.Generator().manual_seed(1))
IDS = torch.arange(14).reshape(2, 7)


class Net(nn.Module):
    """Two layers, and a function of itself and its inputs that says what to do with them."""

    def __init__(self, way: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        self.one = nn.Linear(5, 6)
        self.two = nn.Linear(6, 2)
        for name, part in parts.items():
            setattr(self, name, part)
        self.way = way

    def forward(self, *inputs: Any, **named: Any) -> Any:
        return self.way(self, *inputs, **named)


def straight(self: Net, x: Tensor) -> Tensor:
    return self.two(torch.relu(self.one(x)))


def quiet_groups(model: nn.Module, inputs: Any) -> ModelSpec:
    """The groups, of which there is nothing to warn of; the self-test must pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecWarning)
        return nafi.groups(model, inputs)


# ------------------------------------------------------------------------ precision


def normed(dtype: torch.dtype) -> Callable[[Net, Tensor], Tensor]:
    """A network whose norm computes in this precision, and that hardly listens to one layer."""

    def way(self: Net, x: Tensor) -> Tensor:
        h = self.one(x).to(dtype)
        h = (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype)
        return self.two(h) + 1e-5 * self.three(h)  # type: ignore[operator]

    return way


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_in_lower_precision_is_tested_in_double(dtype: torch.dtype) -> None:
    """A mistake of a hundred-thousandth still shows, which rounding would have hidden."""
    model = Net(normed(dtype), three=nn.Linear(6, 2))
    spec = quiet_groups(model, (VECTORS,))
    assert spec.widths == {"one": 6}
    assert check_spec(model, (VECTORS,), spec) < 1e-12
    data = spec.to_dict()
    data["axes"]["three.weight"][1] = [[6]]  # one axis forgotten
    with pytest.raises(SpecError, match="permuting group one changes the output"):
        check_spec(model, (VECTORS,), ModelSpec.from_dict(data))


def test_numbers_that_a_network_makes_are_tested_in_double() -> None:
    def way(self: Net, x: Tensor) -> Tensor:
        hidden = torch.zeros(len(x), 6)  # float32, whatever the network is in
        hidden = hidden + self.one(x)
        with torch.autocast("cpu", torch.bfloat16):
            return self.two(hidden)

    model = Net(way)
    assert check_spec(model, (VECTORS,), analyse(Net(straight), (VECTORS,))) < 1e-12


def language_model(name: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 20, "hidden_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 12}
    options = {
        "T5": {"vocab_size": 20, "d_model": 8, "d_kv": 2, "d_ff": 12, "num_layers": 1},
        "Mamba": {**sizes, "state_size": 3},
        "Gemma": {**sizes, **heads, "head_dim": 2},
    }
    config = getattr(transformers, f"{name}Config")(**options.get(name, {**sizes, **heads}))
    config.use_cache = False
    kind = "EncoderModel" if name == "T5" else "ForCausalLM"
    model: nn.Module = getattr(transformers, f"{name}{kind}")(config)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "inner"),
    [
        ("Llama", "model.layers.0.mlp.gate_proj"),
        ("Mistral", "model.layers.0.mlp.gate_proj"),
        ("Qwen2", "model.layers.0.mlp.gate_proj"),
        ("Gemma", "model.layers.0.mlp.gate_proj"),
        ("T5", "encoder.block.0.layer.1.DenseReluDense.wi"),
        ("Mamba", "backbone.layers.0.mixer.in_proj"),
    ],
)
def test_language_models_with_norms_in_single_precision(name: str, inner: str) -> None:
    spec = nafi.groups(language_model(name), {"input_ids": IDS[:, :4]})
    assert inner in spec.groups


# ------------------------------------------------------------------- torch's transformers


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=False)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def decoder() -> nn.Module:
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 24), 1)


def transformer() -> nn.Module:
    return nn.Transformer(16, 4, 1, 1, 24)


CAUSAL = nn.Transformer.generate_square_subsequent_mask(7)


@pytest.mark.parametrize(
    ("build", "inputs", "masks"),
    [
        (encoder, (TOKENS,), {"mask": CAUSAL}),
        (encoder, (TOKENS,), {"mask": CAUSAL, "is_causal": True}),
        (decoder, (TOKENS, TOKENS), {"tgt_mask": CAUSAL}),
        pytest.param(
            transformer,
            (TOKENS, TOKENS),
            {"src_mask": CAUSAL, "tgt_mask": CAUSAL},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_masks_change_nothing_about_the_groups(
    build: Callable[[], nn.Module], inputs: tuple[Tensor, ...], masks: Mapping[str, Any]
) -> None:
    model = build()
    names = ("src",) if build is encoder else ("tgt", "memory")
    names = ("src", "tgt") if build is transformer else names
    masked = quiet_groups(model, {**dict(zip(names, inputs, strict=True)), **masks})
    plain = analyse(model, inputs)
    assert masked.axes == plain.axes
    assert masked.groups == plain.groups
    assert "layers.0.linear1" in {name.split("er.", 1)[-1] for name in masked.groups}


def test_a_mask_that_the_network_makes_itself() -> None:
    """As in PyTorch's tutorial: values are looked at, but they are always the same."""

    class Tutorial(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 16)
            self.encoder = encoder()
            self.out = nn.Linear(16, 20)

        def forward(self, x: Tensor) -> Tensor:
            mask = nn.Transformer.generate_square_subsequent_mask(len(x))
            return self.out(self.encoder(self.embedding(x), mask))

    spec = quiet_groups(Tutorial(), (IDS,))
    assert spec.groups["encoder.layers.0.linear1"].width == 24
    assert spec.groups["embedding"].width == 16


# ---------------------------------------------------------------------- the second way


# One of each kind; in the whole zoo both ways agree.
KINDS = (
    *("mlp_2", "shared_layer", "tied_autoencoder", "two_inputs", "lenet_view", "grouped_conv"),
    *("squeeze_excite", "group_norm", "pixel_shuffle", "tuple_outputs", "cross_attention"),
    *("encoder_pre_norm", "einsum", "gru", "tied_language_model"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("monai_vit", "gpt2_language_model")),
)


@pytest.mark.parametrize("name", KINDS)
def test_both_ways_to_trace_give_the_same_spec(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = zoo.seeded(name)
    expected = analyse(model, inputs)
    monkeypatch.setattr(trace, "exported", trace.followed)
    spec = analyse(model, inputs)
    assert spec == expected
    assert trace.trace(model, inputs).decisions == ()


def branches(self: Net, x: Tensor) -> Tensor:
    if self.one(x).sum().item() > -1e6:
        return straight(self, x)
    return x


def chosen_rows(self: Net, x: Tensor) -> Tensor:
    rows = (x[:, 0] > -100).nonzero()[:, 0]
    return straight(self, x[rows])


def repeated(self: Net, x: Tensor) -> Tensor:
    return sum((straight(self, x) for _ in range(x.sign().abs().sum().int())), x[:, :2])


def listed(self: Net, x: Tensor) -> Tensor:
    return straight(self, x) * x[0].tolist()[0]


def by_numpy(self: Net, x: Tensor) -> Tensor:
    return straight(self, x) * float(x.numpy()[0, 0])


def by_chance(self: Net, x: Tensor) -> Tensor:
    return straight(self, x) * (1 if torch.rand(1) < 0.5 else 2)


@pytest.mark.parametrize("way", [branches, repeated, listed, by_numpy, by_chance])
def test_what_values_decide_is_followed_and_told(way: Callable[..., Tensor]) -> None:
    with pytest.warns(SpecWarning, match=rf"values decide what .*{Path(__file__).name}, line"):
        spec = nafi.groups(Net(way), (VECTORS,))
    assert spec.axes == analyse(Net(straight), (VECTORS,)).axes


def masked_rows(self: Net, x: Tensor) -> Tensor:
    return self.two(torch.relu(self.one(x))[x[:, 0] > -100])


def masked_pairs(self: Net, x: Tensor) -> Tensor:
    hidden = torch.relu(self.one(x[:, None] + x))
    return self.two(hidden[(x @ x.T > -100)])


@pytest.mark.parametrize("way", [chosen_rows, masked_rows, masked_pairs])
def test_rows_that_values_choose(way: Callable[..., Tensor]) -> None:
    """Their number depends on values, but what is done with them does not."""
    spec = quiet_groups(Net(way), (VECTORS,))
    assert spec.axes == analyse(Net(straight), (VECTORS,)).axes


def test_neurons_that_values_choose_keep_their_places() -> None:
    def way(self: Net, x: Tensor) -> Tensor:
        hidden = self.one(x)
        return self.two(hidden[:, hidden.sum(0) > -1e6])

    assert quiet_groups(Net(way), (VECTORS,)).groups == {}


def test_a_condition_of_torch_within_what_is_followed() -> None:
    """Both of its branches are seen, only the `if` is followed."""

    def way(self: Net, x: Tensor) -> Tensor:
        hidden = torch.cond(x.sum() > 0, torch.relu, torch.tanh, (self.one(x),))
        return self.two(hidden) if x.sum() < 1e6 else x

    with pytest.warns(SpecWarning, match="values decide"):
        spec = nafi.groups(Net(way), (VECTORS,))
    assert spec.widths == {"one": 6}


def test_a_line_that_decides_is_named() -> None:
    class Branches(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            if x.sum() > -1e6:
                return self[1](self[0](x))
            return x

    with pytest.warns(SpecWarning, match=r"in `if x.sum\(\) > -1e6:`"):
        nafi.groups(Branches(nn.Linear(5, 6), nn.Linear(6, 2)), (VECTORS,))


def test_a_decision_without_inputs_is_not_told() -> None:
    def way(self: Net, x: Tensor) -> Tensor:
        return straight(self, x) if torch.ones(3).sum() > 2 else x

    assert quiet_groups(Net(way), (VECTORS,)).widths == {"one": 6}


def test_a_wrong_spec_of_what_was_followed_is_refused() -> None:
    """A choice that depends on the order of the neurons, which no graph shows."""

    def way(self: Net, x: Tensor) -> Tensor:
        hidden = self.one(x)
        return self.two(hidden) * (1 + hidden[0].tolist()[0])

    with (
        pytest.warns(SpecWarning, match="values decide"),
        pytest.raises(SpecError, match="permuting group one changes the output"),
    ):
        nafi.groups(Net(way), (VECTORS,))


def test_following_leaves_the_network_and_its_inputs_alone() -> None:
    def way(self: Net, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return branches(self, x.mul_(2))

    model = Net(way).train()
    model.register_buffer("calls", torch.zeros(()))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = VECTORS.clone()
    with pytest.warns(SpecWarning):
        nafi.groups(model, (x,))
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())
    assert x.equal(VECTORS)
    assert model.training


def test_parts_that_were_compiled() -> None:
    def way(self: Net, x: Tensor) -> Tensor:
        return straight(self, x) if x.sum() > -1e6 else x

    model = Net(way)
    model.one = torch.compile(model.one, backend="eager")
    with pytest.warns(SpecWarning, match="values decide"):
        spec = nafi.groups(model, (VECTORS,))
    assert spec.widths == {"one._orig_mod": 6}


# ----------------------------------------------------------------------------- arguments


@dataclass
class Result:
    logits: Tensor
    hidden: list[Tensor]


def keywords(self: Net, *, x: Tensor, more: Mapping[str, list[Tensor]], scale: float = 1) -> Result:
    return Result(straight(self, x + more["shift"][0]) * scale, [x])


NAMED = {"x": VECTORS, "more": {"shift": [VECTORS.flip(0)]}, "scale": 2.0}


def test_keyword_arguments_give_what_positional_ones_give() -> None:
    def way(self: Net, x: Tensor, more: Tensor) -> Tensor:
        return straight(self, x + more) * 2

    spec = quiet_groups(Net(keywords), UserDict(NAMED))
    assert spec.axes == analyse(Net(way), (VECTORS, VECTORS)).axes
    data = spec.to_dict()
    data["axes"]["two.weight"][1] = [[6]]
    with pytest.raises(SpecError, match="permuting group one"):
        check_spec(Net(keywords), NAMED, ModelSpec.from_dict(data))


def test_a_network_of_keyword_arguments_is_rebuilt() -> None:
    model = Net(keywords)
    wide = rebuild(model, quiet_groups(model, NAMED), {"one": 9})
    assert wide.one.out_features == 9
    torch.testing.assert_close(wide(**NAMED).logits, model(**NAMED).logits)


@pytest.mark.parametrize("method", ["nafi", "fedavg", "ensemble"])
def test_networks_of_keyword_arguments_are_fused_saved_and_loaded(
    method: str, tmp_path: Path
) -> None:
    def way(self: Net, *, x: Tensor, hidden: bool = True) -> Tensor:
        return self.one(x) if hidden else straight(self, x)

    models, other = [Net(way), Net(way)], [Net(straight), Net(straight)]
    for one, two in zip(models, other, strict=True):
        two.load_state_dict(one.state_dict())
    inputs = {"x": VECTORS, "hidden": False}
    result = nafi.fuse(models, inputs, method=method)
    expected = nafi.fuse(other, (VECTORS,), method=method)
    assert result.model(**inputs).equal(expected.model(VECTORS))
    if method != "ensemble":
        file = tmp_path / "fused.safetensors"
        nafi.save(result, file)
        loaded = nafi.load(file, lambda: Net(way))
        assert loaded(**inputs).equal(result.model(**inputs))


def test_batches_of_keyword_arguments() -> None:
    def way(self: Net, *, x: Tensor) -> Tensor:
        return straight(self, x)

    moments = nafi.input_moments(Net(way), [{"x": VECTORS}])
    expected = nafi.input_moments(Net(straight), [VECTORS])
    assert moments["one.weight"].shape == expected["one.weight"].shape


# ------------------------------------------------------------------------------ refusals


def nested(self: Net, x: Tensor) -> Tensor:
    return straight(self, torch.nested.nested_tensor([x, x[:2]])).to_padded_tensor(0.0)


@pytest.mark.parametrize(
    ("way", "inputs", "message"),
    [
        (nested, (VECTORS,), r"cannot be traced: .*torch.export.*make_fx.*by hand"),
        (lambda self, x: object(), (VECTORS,), "returns object without a tensor"),
        (lambda self, x: straight(self, x) * random.random(), (VECTORS,), "something else each"),
        (straight, {0: VECTORS}, r"write \(\{...\},\)"),
        (straight, {"y": VECTORS}, "does not run on the example inputs: .*'y'"),
        (straight, VECTORS, r"write \(x,\)"),
    ],
)
def test_what_cannot_be_traced_is_refused_with_advice(
    way: Callable[..., Any], inputs: Any, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        nafi.groups(Net(way), inputs)


def test_random_numbers_of_a_network_on_the_cpu_are_fixed_without_other_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seeding all devices formats a traceback for each that is not there, at every batch."""

    def seed_all(seed: int) -> torch.Generator:
        raise AssertionError("all devices were seeded")

    torch.manual_seed(5)
    monkeypatch.setattr(torch, "manual_seed", seed_all)
    before = torch.get_rng_state()
    drawn = []
    for _ in range(2):
        with evaluating(nn.Linear(2, 2, device="meta").to_empty(device="cpu")):
            drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(torch.get_rng_state(), before)
    monkeypatch.undo()
    torch.manual_seed(0)
    assert torch.equal(torch.rand(3), drawn[0])
