"""Widths that grow, alone or together: recurrent layers, heads, attention, normalised weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from torch import nn

import nafi
from nafi.fusion import FusionResult, FusionWarning
from nafi.graph import growth
from tests.fusion.apart import prepared, shared_groups, side_by_side
from tests.fusion.networks import gap
from tests.graph import zoo


def built(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return zoo.named(name).build().eval()


def fused(name: str, **options: object) -> FusionResult:
    models = [built(name, seed) for seed in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FusionWarning)
        return nafi.fuse(models, zoo.named(name).example_inputs(), **options)


@pytest.mark.parametrize("name", ["lstm", "lstm_bidirectional", "gru"])
def test_layers_of_one_module_grow_to_one_width(name: str, tmp_path: Path) -> None:
    """One `hidden_size` for all: the narrower are filled up with units that nobody owns."""
    result = fused(name, evidence=1000.0, max_width=1.8)
    inputs = zoo.named(name).example_inputs()
    recurrent = next(m for m in result.model.modules() if isinstance(m, nn.RNNBase))
    rows = [row for row in result.summary() if row["group"].startswith(name[:3])]
    assert len(rows) == recurrent.num_layers * (1 + recurrent.bidirectional)
    assert {row["width"] for row in rows} == {recurrent.hidden_size}
    assert recurrent.hidden_size > rows[0]["local"][0]
    nafi.save(result, tmp_path / "fused.safetensors", example_inputs=inputs)
    loaded = nafi.load(tmp_path / "fused.safetensors", lambda: built(name, 0))
    assert gap(loaded, result.model, inputs) == 0


@pytest.mark.slow
def test_blocks_may_have_different_numbers_of_heads() -> None:
    """A module remembers the heads of its own block, and no others."""
    heads = {f"encoder.layer.{k}.attention.self.query": 5 + 2 * k for k in range(2)}
    result = fused("bert_sdpa", penalty=0.0, evidence=1e5, max_width=heads)
    assert {name: result.widths[name] for name in heads} == heads
    attention = [layer.attention.self for layer in result.model.encoder.layer]
    inner = [result.widths[f"{name}/2"] for name in heads]
    assert [module.query.out_features for module in attention] == [5 * inner[0], 7 * inner[1]]


class Fixed(nn.Module):
    """Two layers whose code fixes their width, and one that may grow."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 8), nn.Linear(8, 6), nn.Linear(6, 9)
        self.out = nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x).relu().view(-1, 8)
        x = self.b(x).relu().view(-1, 6)
        return self.out(self.c(x).relu())


def test_what_cannot_grow_does_not_hold_up_the_rest() -> None:
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(Fixed())
    with pytest.warns(FusionWarning, match=r"^a, b: the width stays as it is.*view\(-1, 8\)"):
        result = nafi.fuse(models, (torch.randn(4, 5),), penalty=0.0, evidence=1e5)
    assert (result.widths["a"], result.widths["b"]) == (8, 6)
    assert result.widths["c"] > 9


def grown(kind: Callable[[], nn.Module], inputs: tuple[torch.Tensor, ...]) -> FusionResult:
    """Two networks fused so that all but nothing is matched; what is saved of it loads."""
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(kind().eval())
    result = nafi.fuse(models, inputs, penalty=0.0, evidence=1e5, max_width=1.5)
    with TemporaryDirectory() as folder:
        nafi.save(result, Path(folder) / "fused.safetensors", example_inputs=inputs)
        loaded = nafi.load(Path(folder) / "fused.safetensors", kind)
    assert gap(loaded, result.model, inputs) == 0
    return result


class Attending(nn.Module):
    """Attention without a norm around it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(5, 12), nn.Linear(12, 3)
        self.attention = nn.MultiheadAttention(12, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x).relu()
        return self.out(self.attention(x, x, x)[0])


def test_attention_and_its_embedding_grow_together() -> None:
    result = grown(Attending, (torch.randn(2, 7, 5),))
    widths, attention = result.widths, result.model.attention
    assert widths["embed"] == widths["attention"] * 3 == widths["attention.out_proj"] == 18
    assert (attention.embed_dim, attention.num_heads, attention.head_dim) == (18, 6, 3)


class Encoding(nn.Module):
    """PyTorch's encoder: norms hold the embedding, and so the heads; the rest may grow."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(12, 4, 10, dropout=0.0, batch_first=True)
        self.embed, self.out = nn.Linear(5, 12), nn.Linear(12, 3)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.embed(x)))


def test_an_encoder_grows_between_its_norms() -> None:
    """What must hold is stated, so that nothing is tried in vain and nobody is warned."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", FusionWarning)
        result = grown(Encoding, (torch.randn(2, 7, 5),))
    larger = {name for name, width in result.widths.items() if width == 15}
    assert larger == {"encoder.layers.0.linear1", "encoder.layers.1.linear1"}
    assert result.widths["encoder.layers.0.self_attn"] == 4


class Block(nn.Module):
    """Attention as in many repositories: sizes are attributes, one projection makes all three."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.width = heads, width
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.proj, self.inner = nn.Linear(width, width), nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, count, _ = x.shape
        form = (batch, count, 3, self.heads, self.width // self.heads)
        q, k, v = self.qkv(self.norm(x)).reshape(form).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        x = x + self.proj(y.reshape(batch, count, self.width))
        return x + self.outer(self.inner(x).relu())


class TwoBlocks(nn.Sequential):
    def __init__(self) -> None:
        blocks = (Block(8, 4, 10), nn.Linear(8, 12), Block(12, 4, 14))
        super().__init__(nn.Linear(5, 8), *blocks, nn.Linear(12, 3))


@pytest.mark.slow
def test_blocks_of_other_widths_grow() -> None:
    widths = grown(TwoBlocks, (torch.randn(2, 7, 5),)).widths
    assert {name: widths[name] for name in ("1.qkv", "1.inner", "3.qkv", "3.inner")} == {
        "1.qkv": 6,
        "1.inner": 15,
        "3.qkv": 6,
        "3.inner": 21,
    }


def llama(kind: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=20,
        hidden_size=12,
        intermediate_size=10,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        use_cache=False,
    )
    model: nn.Module = getattr(transformers, f"{kind}ForCausalLM")(config)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Llama", "Gemma"])
@pytest.mark.filterwarnings("ignore::nafi.fusion.FusionWarning")
@pytest.mark.filterwarnings("ignore::nafi.graph.SpecWarning")
def test_grouped_queries_grow_in_multiples(kind: str) -> None:
    """Whole heads: rotation holds what is within them. Two sizes of 2 must be told apart."""
    result = grown(partial(llama, kind), (torch.randint(0, 20, (2, 5)),))
    keys, shared = (result.widths[f"model.layers.0.self_attn.q_proj{n}"] for n in ("", "/2"))
    attention = result.model.model.layers[0].self_attn
    assert attention.k_proj.out_features == 4 * keys > 8
    assert attention.q_proj.out_features == 4 * keys * shared
    assert result.widths["model.layers.0.mlp.gate_proj"] == 15


@pytest.mark.slow
def test_all_of_a_vnet_grows() -> None:
    """The network that repeats its input as often as its first layer has channels."""
    nets = pytest.importorskip("monai.networks.nets")
    vnet = partial(nets.VNet, spatial_dims=2, in_channels=1, out_channels=2, dropout_prob_down=0.0)
    model = vnet(dropout_prob_up=(0.0, 0.0)).eval()
    spec = nafi.groups(model, (torch.randn(1, 1, 32, 32),))
    assert len(spec.groups) == 16
    assert not growth(model, spec).fixed


def normalised(old: bool) -> nn.Module:
    norm = nn.utils.weight_norm if old else nn.utils.parametrizations.weight_norm
    kernel = norm(nn.Conv1d(8, 6, 3, groups=2), dim=2)
    layers = (norm(nn.Conv1d(3, 8, 3)), nn.ReLU(), kernel, nn.ReLU(), norm(nn.Conv1d(6, 4, 3)))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_normalised_weights_grow(old: bool) -> None:
    """Neurons that nobody owns have a direction of zero, and 0/0 is not a number."""
    result = grown(partial(normalised, old), (torch.randn(2, 3, 9),))
    assert result.model[0].out_channels == len(result.model[0].weight) > 8
    assert all(bool(torch.isfinite(p).all()) for p in result.model.parameters())


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_normalised_weights_apart_are_their_mean(old: bool) -> None:
    models, inputs = [normalised(old).double().eval() for _ in range(2)], torch.randn(2, 3, 9)
    doubles = (inputs.double(),)
    networks = prepared(models, doubles, nafi.groups(models[0], doubles))
    assert not shared_groups(networks)
    fused = side_by_side(networks, ())
    wanted = sum(model(inputs.double()) for model in models) / 2
    assert torch.allclose(fused(inputs.double()), wanted, atol=1e-10)


class FixedSlices(nn.Module):
    """The first two channels are treated in their own way, wherever the others begin."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.head(torch.cat([x[:, :2].tanh(), x[:, 2:].relu()], dim=1))


def test_channels_that_the_code_counts_do_not_grow() -> None:
    """New channels are zero, so that only another order shows what the code makes of them."""
    torch.manual_seed(0)
    model, inputs = FixedSlices().eval(), (torch.randn(5, 4),)
    spec = nafi.groups(model, inputs)
    assert sorted(spec.widths.values()) == [2, 4]
    first = next(name for name, width in spec.widths.items() if width == 2)
    assert growth(model, spec).fixed.get(first) == "its code fixes the width"
