"""What the rules say of tensors, against what the modules that hold them are."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nafi
from nafi.errors import SpecError
from nafi.graph import (
    Kind,
    Layer,
    ModelSpec,
    Normalisation,
    SpecWarning,
    TensorSpec,
    attach_batchnorm,
    fold_batchnorm,
    rules,
)
from tests.graph import zoo
from tests.graph.test_zoo import analysed

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
LAYERS = (nn.Linear, nn.modules.conv._ConvNd)
OF_NORMS = {
    "weight": Kind.GAIN,
    "bias": Kind.BIAS,
    "running_mean": Kind.MEAN,
    "running_var": Kind.VARIANCE,
    "num_batches_tracked": Kind.COUNTER,
}
VECTORS = torch.zeros(2, 5)
OLD_SPECS = json.loads((Path(__file__).parent / "specs-0.1.0.json").read_text())
RULES_PAGE = Path(__file__).parents[2] / "docs" / "rules.md"


def kinds_by_module(model: nn.Module) -> dict[str, Kind]:
    """The kinds of all tensors whose module is one of torch's own, by the type of that module."""
    found = {}
    for path, module in model.named_modules():
        held = [module.named_parameters(recurse=False), module.named_buffers(recurse=False)]
        names = [name for tensors in held for name, _ in tensors]
        kinds: dict[str, Kind] = {}
        if isinstance(module, NORMS):
            kinds = OF_NORMS
        elif isinstance(module, (*LAYERS, nn.Embedding)) or type(module).__name__ == "Conv1D":
            kinds = {"weight": Kind.WEIGHT, "bias": Kind.BIAS}
        elif isinstance(module, nn.PReLU):
            kinds = {"weight": Kind.GAIN}
        elif isinstance(module, nn.RNNBase):
            kinds = {n: Kind.WEIGHT if n.startswith("weight") else Kind.BIAS for n in names}
        found |= {f"{path}.{n}".removeprefix("."): kinds[n] for n in names if n in kinds}
    return found


def used(spec: ModelSpec) -> set[str]:
    """The tensors that the network computes with, and counters."""
    return set(spec.tensors) - {
        pin.tensor for pin in spec.pinned if pin.reason == "the network does not use it"
    }


@pytest.mark.parametrize("name", zoo.tested())
def test_kinds_are_those_of_the_modules(name: str) -> None:
    model, _, spec = analysed(name)
    expected = kinds_by_module(model)
    for tensor in used(spec):
        if tensor in expected:
            assert spec.tensors[tensor].kind is expected[tensor], tensor
        assert spec.tensors[tensor].neutral == float(expected.get(tensor) is Kind.VARIANCE)


@pytest.mark.parametrize("name", zoo.tested())
def test_biases_are_those_of_the_modules(name: str) -> None:
    model, _, spec = analysed(name)
    for path, module in model.named_modules():
        pairs = [("weight", "bias")] if isinstance(module, (*LAYERS, *NORMS)) else []
        if isinstance(module, nn.RNNBase):
            pairs = [(n, n.replace("weight", "bias")) for n, _ in module.named_parameters()]
        for weight, bias in ((f"{path}.{w}", f"{path}.{b}") for w, b in pairs if w != b):
            kept = spec.aliases.get(weight, weight)
            if bias not in used(spec) or name == "tied_autoencoder":
                continue
            assert spec.tensors[kept].bias == bias
            assert spec.bias_of(kept) in (bias, None)


def test_a_weight_with_two_biases_has_none() -> None:
    """The inner layer of the tied autoencoder is also the last one, transposed, with its bias."""
    _, _, spec = analysed("tied_autoencoder")
    assert spec.tensors["inner.weight"].bias is None
    assert spec.tensors["inner.weight"].layer is None
    assert spec.tensors["bias"].kind is spec.tensors["inner.bias"].kind is Kind.BIAS


@pytest.mark.parametrize("name", zoo.tested())
def test_rows_columns_and_layers_are_those_of_the_modules(name: str) -> None:
    model, _, spec = analysed(name)
    for path, module in model.named_modules():
        weight = f"{path}.weight"
        if not isinstance(module, LAYERS) or weight not in used(spec) or name.startswith("tied"):
            continue
        tensor = spec.tensors[weight]
        transposed = bool(getattr(module, "transposed", False))
        outputs = 1 if transposed else 0
        # A layer that feeds itself has one group on both axes, and no rows.
        assert tensor.rows in ((outputs,), ())
        if tensor.groups_on([outputs]) and not tensor.groups_on([0]) & tensor.groups_on([1]):
            assert tensor.rows == (outputs,)
            others = tuple(i for i in range(len(tensor.axes)) if i != outputs)
            assert tensor.columns == (others if tensor.whole_rows else ())
        if isinstance(module, nn.Linear):
            assert tensor.layer == Layer("linear")
        else:
            assert tensor.layer == Layer(
                f"conv{'_transpose' * transposed}{len(module.kernel_size)}d",
                module.stride,
                module.padding,
                module.output_padding if transposed else (),
                module.dilation,
                module.groups,
                transposed,
            )


def test_a_layer_says_how_to_unfold_its_inputs() -> None:
    """The outputs of a convolution from its weight, its bias and patches of its inputs."""
    conv = nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2))
    net = nn.Sequential(conv, nn.ReLU(), nn.Conv2d(4, 2, 1))
    spec = nafi.groups(net, (torch.zeros(2, 3, 9, 9),))
    layer = spec.tensors["0.weight"].layer
    assert layer is not None
    x = torch.randn(2, 3, 9, 9)
    patches = F.unfold(x, (3, 2), layer.dilation, layer.padding, layer.stride)  # type: ignore[arg-type]
    made = conv.weight.flatten(1) @ patches + conv.bias[:, None]
    torch.testing.assert_close(made.reshape(conv(x).shape), conv(x))


# ------------------------------------------------------------------------------- by hand


class Renamed(nn.Module):
    """A perceptron by hand, its tensors called by names that mislead."""

    def __init__(self, like: nn.Sequential) -> None:
        super().__init__()
        self.bias = nn.Parameter(like[0].weight.detach().T.clone())
        self.weight = nn.Parameter(like[0].bias.detach().clone())
        self.running_var = nn.Parameter(like[2].weight.detach().T.clone())
        self.offset = nn.Parameter(like[2].bias.detach().clone())
        self.matrix = nn.Parameter(like[4].weight.detach().clone())
        self.last = nn.Parameter(like[4].bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(x @ self.bias + self.weight)
        x = torch.relu(torch.addmm(self.offset, x, self.running_var))
        return self.last + F.linear(x, self.matrix)


def perceptron(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3))


def test_products_and_sums_are_layers_whatever_their_names() -> None:
    model = Renamed(perceptron(0))
    model.offset = nn.Parameter(model.offset.detach()[None])  # (1, 7)
    spec = nafi.groups(model, (VECTORS,))
    by_kind = {kind: [n for n, t in spec.tensors.items() if t.kind is kind] for kind in Kind}
    assert by_kind[Kind.WEIGHT] == ["bias", "running_var", "matrix"]
    assert by_kind[Kind.BIAS] == ["weight", "offset", "last"]
    biases = {name: tensor.bias for name, tensor in spec.tensors.items() if tensor.bias}
    assert biases == {"bias": "weight", "running_var": "offset", "matrix": "last"}
    assert spec.bias_of("running_var") == "offset"
    assert spec.bias_of("matrix") is None  # the output layer has no rows
    assert spec.tensors["bias"].layer == Layer("linear", transposed=True)
    assert spec.tensors["matrix"].layer == Layer("linear")


@pytest.mark.parametrize("method", ["nafi", "pfnm", "rebasin"])
def test_fusion_does_not_depend_on_names(method: str) -> None:
    plain = [perceptron(seed) for seed in range(3)]
    one = nafi.fuse(plain, (VECTORS,), method=method).model
    two = nafi.fuse([Renamed(model) for model in plain], (VECTORS,), method=method).model
    x = torch.randn(4, 5)
    torch.testing.assert_close(two(x), one(x))


class NormsByHand(nn.Module):
    """Statistics and scales that no module of torch's own holds."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(5, 6), nn.Linear(6, 7), nn.Linear(7, 3)
        self.register_buffer("centre", torch.randn(6))
        self.register_buffer("spread", torch.rand(6))
        self.stretch = nn.Parameter(torch.rand(6))
        self.shift = nn.Parameter(torch.rand(6))
        self.scale = nn.Parameter(torch.rand(7))
        self.steps: Tensor
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x: Tensor) -> Tensor:
        x = (self.one(x) - self.centre) * torch.rsqrt(self.spread + 1e-5)
        x = torch.relu(x * self.stretch + self.shift)
        x = self.two(x) * (1 + self.scale)
        return self.three(F.normalize(x, dim=-1))


def test_a_normalisation_by_hand() -> None:
    spec = nafi.groups(NormsByHand(), (VECTORS,))
    kinds = {name: spec.tensors[name].kind for name in spec.tensors if "." not in name}
    assert kinds == {
        "stretch": Kind.GAIN,
        "shift": Kind.BIAS,
        "scale": Kind.GAIN,
        "centre": Kind.MEAN,
        "spread": Kind.VARIANCE,
        "steps": Kind.COUNTER,
    }
    assert spec.tensors["stretch"].bias == "shift"
    assert spec.tensors["one.weight"].bias == "one.bias"


def test_weight_norm() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(5, 6))
    spec = nafi.groups(nn.Sequential(layer, nn.ReLU(), nn.Linear(6, 3)), (VECTORS,))
    gain, direction = (f"0.parametrizations.weight.original{i}" for i in (0, 1))
    assert spec.tensors[gain].kind is Kind.GAIN
    assert spec.tensors[direction].kind is Kind.WEIGHT
    assert spec.tensors["0.bias"].kind is Kind.BIAS
    # Its length means nothing: what scales with the bias is the gain.
    assert spec.tensors[direction].bias is None


def test_a_weight_that_is_standardised_is_no_variance() -> None:
    class Standardised(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
            weight = weight / torch.sqrt(weight.square().sum((1, 2, 3), keepdim=True) + 1e-5)
            return F.conv2d(x, weight, self.bias)

    net = nn.Sequential(Standardised(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 1))
    spec = nafi.groups(net, (torch.zeros(2, 3, 8, 8),))
    assert spec.tensors["0.weight"].kind is Kind.WEIGHT
    assert spec.tensors["0.bias"].kind is Kind.BIAS


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells(kind: type[nn.Module]) -> None:
    class Step(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell: Any = kind(5, 6)
            self.out = nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = self.cell(x)
            return self.out(state[0] if isinstance(state, tuple) else state)

    spec = nafi.groups(Step(), (VECTORS,))
    for part in ("ih", "hh"):
        assert spec.tensors[f"cell.weight_{part}"].kind is Kind.WEIGHT
        assert spec.tensors[f"cell.weight_{part}"].bias == f"cell.bias_{part}"
        assert spec.tensors[f"cell.bias_{part}"].kind is Kind.BIAS


def test_a_piece_of_a_bias_belongs_to_no_whole_weight() -> None:
    _, _, spec = analysed("cross_attention")
    assert spec.tensors["attention.q_proj_weight"].bias is None
    assert spec.tensors["attention.in_proj_bias"].kind is Kind.BIAS
    _, _, packed = analysed("self_attention")
    assert packed.tensors["attention.in_proj_weight"].bias == "attention.in_proj_bias"


# --------------------------------------------------------------------- derived and saved


def test_the_class_axis_is_that_of_the_last_layer() -> None:
    _, _, spec = analysed("lenet_flatten")
    found = {n: t.class_axis(10) for n, t in spec.tensors.items() if t.class_axis(10) is not None}
    assert found == {"fc3.weight": 0, "fc3.bias": 0}


def test_children_are_the_groups_within_another() -> None:
    _, _, spec = analysed("vit_fused")
    name = "blocks.0.attention.qkv"
    assert spec.children(name) == [f"{name}/2", f"{name}/3"]
    assert spec.children(f"{name}/2") == []
    assert sum(len(spec.children(group)) for group in spec.groups) == sum(
        group.parent is not None for group in spec.groups.values()
    )


def test_rows_of_a_transposed_convolution_in_groups_are_not_whole() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 1), nn.ConvTranspose2d(8, 12, 2, groups=4), nn.Conv2d(12, 2, 1)
    )
    spec = nafi.groups(net, (torch.zeros(2, 3, 5, 5),))
    tensor = spec.tensors["1.weight"]
    assert (tensor.rows, tensor.whole_rows, tensor.columns) == ((1,), False, ())
    assert (tensor.bias, spec.bias_of("1.weight")) == ("1.bias", None)


@pytest.mark.parametrize("name", list(OLD_SPECS))
def test_specs_of_version_0_1_0_are_read(name: str) -> None:
    """All but the layers, which were not known then, what is read and what is rigid, which are
    known better."""
    _, _, spec = analysed(name)
    old = ModelSpec.from_dict(OLD_SPECS[name])
    groups = {n: replace(g, rigid=old.groups[n].rigid or g.rigid) for n, g in spec.groups.items()}
    assert groups == spec.groups
    tensors = {
        n: replace(tensor, layer=None, reads=old.tensors[n].reads)
        for n, tensor in spec.tensors.items()
    }
    older = {n: replace(g, rigid=spec.groups[n].rigid) for n, g in old.groups.items()}
    assert replace(old, groups=older) == replace(spec, tensors=tensors)


@pytest.mark.parametrize("name", list(OLD_SPECS))
def test_what_is_read_is_known_better_than_in_version_0_1_0(name: str) -> None:
    """Inputs of the network are read, too; what makes neurons of its own kind reads one axis."""
    _, _, spec = analysed(name)
    old = ModelSpec.from_dict(OLD_SPECS[name])
    for tensor, now in spec.tensors.items():
        before = set(old.tensors[tensor].reads)
        assert not any(now.groups_on([axis]) for axis in set(now.reads) - before)
        lost = before - set(now.reads)
        assert lost == ({0} if tensor.startswith("lstm.weight_hh") else set())


@pytest.mark.parametrize("name", list(OLD_SPECS))
def test_version_0_1_0_reads_what_is_written(name: str) -> None:
    """It knows no other keys than these, and leaves others out."""
    spec = analysed(name)[2]
    data = json.loads(json.dumps(spec.to_dict()))
    old = {k: v for k, v in OLD_SPECS[name].items() if k not in ("consumed", "groups")}
    assert {key: data[key] for key in old} == old
    for group, fields in OLD_SPECS[name]["groups"].items():
        assert data["groups"][group] == {**fields, "rigid": spec.groups[group].rigid}
    assert {(tensor, axis) for tensor, axis in data["consumed"]} == {
        (tensor, axis) for tensor, meaning in spec.tensors.items() for axis in meaning.reads
    }


@pytest.mark.parametrize("name", ["unet_transposed", "vit_fused", "tied_autoencoder"])
def test_kinds_biases_and_layers_survive_json(name: str) -> None:
    _, _, spec = analysed(name)
    assert ModelSpec.from_dict(json.loads(json.dumps(spec.to_dict()))) == spec


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("kinds", {"0.weight": "heavy"}, "not a ModelSpec: 'heavy' is not a valid Kind"),
        ("biases", {"0.weight": "nowhere"}, "0.weight has an unknown bias 'nowhere'"),
        ("layers", {"0.weight": {"op": "linear", "hue": 3}}, "not a ModelSpec: .*hue"),
        ("consumed", [["0.weight", 4]], r"0.weight reads axes \[4\], but has 2"),
    ],
)
def test_what_does_not_fit_is_refused(key: str, value: object, message: str) -> None:
    data = nafi.groups(perceptron(0), (VECTORS,)).to_dict()
    data[key] = value
    with pytest.raises(SpecError, match=message):
        ModelSpec.from_dict(data)


@pytest.mark.parametrize(
    "name", ["vgg", "resnet_basic", "unet_transposed", "mobilenet", "densenet"]
)
def test_folding_and_putting_back_states_the_same_tensors(name: str) -> None:
    model, _, spec = analysed(name)
    folded, folded_spec = fold_batchnorm(model, spec)
    assert spec.batchnorms
    for layer, norm in spec.batchnorms:
        assert folded_spec.tensors[f"{layer}.weight"].bias == f"{layer}.bias"
        assert folded_spec.tensors[f"{layer}.bias"].kind is Kind.BIAS
        assert f"{norm}.running_var" not in folded_spec.tensors
    _, back = attach_batchnorm(folded, folded_spec, like=model)
    assert back.tensors == spec.tensors


def test_normalisation_has_three_ways() -> None:
    assert [way.value for way in Normalisation] == ["attach", "fold", "average"]
    model, _, spec = analysed("vgg")
    for way in Normalisation:
        folded, folded_spec = way.for_matching(model, spec)
        assert (folded_spec.batchnorms, folded_spec.folded) == ((), spec.batchnorms)
        _, returned = way.put_back(folded, folded_spec, like=model)
        assert (returned.tensors == spec.tensors) == (way is Normalisation.ATTACH)
        assert way.merges_unfolded == (way is Normalisation.AVERAGE)


# ------------------------------------------------------------------------------ own rules


def test_the_page_on_rules_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands; and without its rule, the same network is covered less, with a warning."""
    (block,) = re.findall(r"```python\n(.*?)```", RULES_PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(block, names)
    model, known = names["Net"](), names["spec"]
    fused = nafi.fuse([names["Net"]() for _ in range(2)], (VECTORS,), spec=known)
    assert fused.widths["directions"] >= 6
    monkeypatch.delitem(rules.RULES, "cosine_linear")
    with pytest.warns(SpecWarning, match="no rule for cosine_linear"):
        assert nafi.groups(model, (VECTORS,)).groups.keys() == set()


def test_a_spec_by_hand_needs_axes_only() -> None:
    data = {
        "groups": {"h": {"width": 8}},
        "axes": {"0.weight": [[["h"]], [[5]]], "0.bias": [[["h"]]], "2.weight": [[[3]], [["h"]]]},
        "consumed": [["2.weight", 1]],
    }
    spec = ModelSpec.from_dict(data)
    assert spec.tensors["0.weight"] == TensorSpec(spec.axes["0.weight"], (), Kind.WEIGHT, "0.bias")
    assert spec.tensors["0.bias"].kind is Kind.BIAS
    assert spec.tensors["2.weight"].reads == (1,)
