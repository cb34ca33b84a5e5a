"""Every network of the zoo: its groups can be permuted, gathered, widened and narrowed."""

from __future__ import annotations

import copy
import warnings
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from nafi.errors import SpecError
from nafi.graph import ModelSpec, SpecWarning, gather, groups, permute, rebuild, scatter
from nafi.graph.permute import permute_in_place
from nafi.graph.spec import Place
from nafi.graph.trace import copy_network, named_tensors
from tests.graph import zoo

ENTRIES = {entry.name: entry for entry in zoo.OURS + zoo.FOREIGN}

# Groups and share of the parameters in tensors with at least one group, of which nothing was given
# up. What is missing from 1 is the last layer's bias, and hidden states that a network returns.
COVERAGE = {
    "mlp_1": (1, 0.952),
    "mlp_2": (2, 0.972),
    "mlp_3": (3, 0.979),
    "glu_chunk": (2, 0.985),
    "glu_product": (2, 0.987),
    "shared_layer": (1, 0.978),
    "tied_autoencoder": (2, 1.000),
    "two_inputs": (3, 0.991),
    "lenet_flatten": (4, 1.000),
    "lenet_sequential": (4, 1.000),
    "lenet_view": (4, 1.000),
    "lenet_hard_coded": (4, 1.000),
    "vgg": (7, 0.999),
    "unet_bilinear": (18, 1.000),
    "unet_transposed": (22, 1.000),
    "resnet_basic": (9, 1.000),
    "resnet_bottleneck": (16, 1.000),
    "mobilenet": (10, 0.997),
    "grouped_conv": (2, 0.000),
    "grouped_conv_nested": (6, 0.999),
    "squeeze_excite": (4, 0.996),
    "group_norm": (3, 0.996),
    "instance_norm": (2, 0.996),
    "prelu": (2, 0.996),
    "conv1d": (3, 0.996),
    "conv3d": (3, 0.992),
    "pixel_shuffle": (2, 0.997),
    "densenet": (12, 0.999),
    "convnext": (5, 0.999),
    "scaled": (2, 0.994),
    "detached_skip": (2, 0.996),
    "frozen": (4, 0.996),
    "tuple_outputs": (4, 0.990),
    "dict_outputs": (1, 0.750),
    "vit_fused": (9, 0.999),
    "vit_sdpa": (9, 0.999),
    "self_attention": (4, 0.992),
    "cross_attention": (7, 0.994),
    "encoder_post_norm": (9, 0.997),
    "encoder_pre_norm": (9, 0.997),
    "einsum": (4, 0.994),
    "lstm": (3, 0.996),
    "lstm_bidirectional": (5, 0.998),
    "gru": (3, 0.996),
    "tied_language_model": (2, 0.985),
    "graph_net": (3, 0.985),
    "bag_of_words": (2, 0.991),
    "block_attention": (2, 0.915),
    "fourier": (2, 0.994),
    "prototypes": (2, 1.000),
    "two_towers": (3, 1.000),
    "spatial_transformer": (3, 0.993),
    "shuffle": (5, 0.994),
    "temporal_shift": (4, 0.974),
    "rotary": (2, 0.995),
    "experts": (2, 0.992),
    "lstm_projected": (6, 0.996),
    "monai_unet": (7, 0.975),
    "monai_basic_unet": (22, 1.000),
    "monai_densenet": (22, 1.000),
    "monai_segresnet": (18, 1.000),
    "monai_vit": (8, 0.746),
    "bert_eager": (8, 0.795),
    "bert_sdpa": (8, 0.795),
    "gpt2": (8, 0.852),
    "gpt2_language_model": (9, 1.000),
    "transformers_vit": (9, 0.999),
}


@cache
def analysed(name: str) -> tuple[nn.Module, tuple[Tensor, ...], ModelSpec]:
    """The network in float64 and eval mode, its inputs, and a spec that has not been checked."""
    model, given = zoo.seeded(name)
    model = model.double().eval()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in given)
    with warnings.catch_warnings(), zoo.rules_that_work():
        warnings.simplefilter("ignore", SpecWarning)
        return model, inputs, groups(model, inputs, check=False)


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return [t for t in pytree.tree_leaves(model(*inputs)) if isinstance(t, Tensor)]


def gap(one: list[Tensor], two: list[Tensor]) -> float:
    return max(
        float((a - b).abs().max() / b.abs().max().clamp(min=1e-9))
        for a, b in zip(one, two, strict=True)
        if a.is_floating_point()
    )


def random_orders(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    """Orders in which no neuron keeps its place: random, then moved on by one."""
    generator = torch.Generator().manual_seed(seed)
    orders = {}
    for name, group in spec.groups.items():
        rows = []
        for _ in range(spec.groups[group.parent].width if group.parent else 1):
            names = torch.randperm(group.width, generator=generator)
            rows.append(names.roll(1)[names.argsort()])
        assert all((row != torch.arange(group.width)).all() for row in rows)
        orders[name] = torch.stack(rows) if group.parent else rows[0]
    return orders


def together(spec: ModelSpec, model: nn.Module, group: str) -> list[str]:
    """Groups that the architecture forces to have one width: layers of one recurrent module, and
    query, key and value of one projection."""
    recurrent = {n for n, m in model.named_modules() if isinstance(m, nn.RNNBase)}
    owners = {tensor.rpartition(".")[0] for tensor in spec.tensors_of(group)} & recurrent
    width, parent = spec.groups[group].width, spec.groups[group].parent
    return [
        name
        for name, other in spec.groups.items()
        if name == group
        or (
            owners & {t.rpartition(".")[0] for t in spec.tensors_of(name)}
            and other.width == width
            and any("weight_hh" in t for t in spec.tensors_of(name))
            and any("weight_hh" in t for t in spec.tensors_of(group))
        )
        or (parent is not None and other.parent == parent and other.width == width)
    ]


@pytest.mark.parametrize("name", zoo.tested())
def test_permuting_every_group_leaves_the_function(name: str) -> None:
    model, inputs, spec = analysed(name)
    expected = outputs(model, inputs)
    permuted = permute(model, spec, random_orders(spec, 1))
    assert gap(outputs(permuted, inputs), expected) < 1e-9
    twin = copy_network(model)
    permute_in_place(twin, spec, random_orders(spec, 1))
    moved = named_tensors(twin)
    for name_of, tensor in named_tensors(permuted).items():
        assert torch.equal(moved[name_of], tensor), name_of


@pytest.mark.parametrize("name", zoo.tested())
def test_coverage(name: str) -> None:
    model, _, spec = analysed(name)
    count, share = COVERAGE[name]
    assert len(spec.groups) == count
    assert spec.coverage(model.state_dict()) == pytest.approx(share, abs=6e-4)


@pytest.mark.parametrize("name", ["mlp_1", "mlp_2", "mlp_3", "lenet_flatten", "unet_bilinear"])
def test_all_hidden_units_of_the_papers_networks_are_in_groups(name: str) -> None:
    """Only inputs, outputs and places of a filter are pinned."""
    _, _, spec = analysed(name)
    for pin in spec.pinned:
        places = pin.reason.startswith(("position within", "made by max_pool2d"))
        assert places or pin.reason in ("model input", "model output"), pin


@pytest.mark.parametrize("name", zoo.tested())
def test_gather_and_scatter_are_inverse(name: str) -> None:
    model, _, spec = analysed(name)
    state = dict(model.state_dict())
    for group in spec.groups:
        neurons = gather(state, spec, group)
        back = scatter(neurons, {k: torch.zeros_like(v) for k, v in state.items()}, spec)
        held = gather(back, spec, group)
        assert torch.equal(held.matrix, neurons.matrix)
        again = scatter(neurons, state, spec)
        assert all(torch.equal(again[key], state[key]) for key in state)


def widened(name: str) -> list[tuple[dict[str, int], nn.Module]]:
    """The network with each group that is not rigid two neurons wider.

    Only code that fixes a size, and attention modules that tie widths, may refuse.
    """
    model, _, spec = analysed(name)
    made = []
    refused = []
    for group in spec.groups:
        names = together(spec, model, group)
        if any(spec.groups[n].rigid for n in names):
            continue
        widths = {n: spec.groups[n].width + 2 for n in names}
        try:
            made.append((widths, rebuild(model, spec, widths)))
        except SpecError as error:
            refused.append(str(error))
    for message in refused:
        tied = "MultiheadAttention" in message and "change these groups together" in message
        assert tied or (not ENTRIES[name].resizable and "at other widths of" in message), message
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", zoo.tested())
def test_wider_with_zeros_or_unread_neurons_is_the_same_function(name: str) -> None:
    model, inputs, spec = analysed(name)
    expected = outputs(model, inputs)
    made = widened(name)
    assert made or any(g.rigid for g in spec.groups.values())
    for widths, wide in made:
        assert gap(outputs(wide, inputs), expected) < 1e-9
        target = spec.resized(widths)
        for tensor, shape in ((t, target.shape(t)) for t in spec.axes):
            assert wide.state_dict()[tensor].shape == shape
        if all(any(p in spec.consumed for p in spec.places(g)) for g in widths):
            fill_unread(wide, spec, widths)
            assert gap(outputs(wide, inputs), expected) < 1e-9
    if made:
        is_like_one_made_so(model, made[-1][1], inputs)


def fill_unread(wide: nn.Module, spec: ModelSpec, widths: dict[str, int]) -> None:
    """Random numbers for all that makes the new neurons, zeros for all that reads them.

    Written with index masks over whole tensors, apart from the code under test.
    """
    generator = torch.Generator().manual_seed(0)
    target = spec.resized(widths)
    with torch.no_grad():
        for name, axes in target.axes.items():
            tensor = wide.state_dict()[name]
            made = torch.zeros(tensor.shape, dtype=torch.bool)
            read = torch.zeros(tensor.shape, dtype=torch.bool)
            for index, axis in enumerate(axes):
                new = torch.cat([new_positions(s.factors, spec, target) for s in axis])
                shape = [1] * tensor.ndim
                shape[index] = len(new)
                mask = new.reshape(shape).expand(tensor.shape)
                if Place(name, index) in spec.consumed:
                    read = read | mask
                else:
                    made = made | mask
            if tensor.is_floating_point():
                noise = torch.rand(tensor.shape, generator=generator, dtype=tensor.dtype) + 0.1
                tensor.copy_(torch.where(made & ~read, noise, tensor))


def new_positions(factors, spec: ModelSpec, target: ModelSpec) -> Tensor:  # type: ignore[no-untyped-def]
    """Which positions of a segment belong to neurons that were not there before."""
    new = torch.zeros(1, dtype=torch.bool)
    for factor in factors:
        size = target.widths[factor] if isinstance(factor, str) else factor
        old = spec.widths[factor] if isinstance(factor, str) else factor
        own = torch.arange(size) >= old
        new = (new[:, None] | own[None, :]).reshape(-1)
    return new


def is_like_one_made_so(model: nn.Module, wide: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """Copies, reloads, exports, trains, and its modules tell the truth about their sizes."""
    expected = outputs(wide, inputs)
    twin = copy.deepcopy(wide)
    twin.load_state_dict(wide.state_dict())
    assert gap(outputs(twin, inputs), expected) == 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = torch.export.export(wide, inputs).module()
    assert gap(outputs(exported, inputs), expected) < 1e-9
    for module in wide.modules():
        tell_the_truth(module)
    assert [p.requires_grad for p in wide.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    trainable = [p for p in twin.parameters() if p.requires_grad]
    if trainable:
        loss = sum(
            t.square().mean()
            for t in pytree.tree_leaves(twin.train()(*inputs))
            if isinstance(t, Tensor) and t.requires_grad
        )
        loss.backward()
        torch.optim.SGD(trainable, lr=0.01).step()
        assert all(torch.isfinite(t).all() for t in outputs(twin.eval(), inputs))


def tell_the_truth(module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    if isinstance(module, nn.Linear):
        assert (module.out_features, module.in_features) == weight.shape
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        assert (module.out_channels, module.in_channels // module.groups) == weight.shape[:2]
        assert module.in_channels % module.groups == 0 == module.out_channels % module.groups
    elif isinstance(module, nn.ConvTranspose2d | nn.ConvTranspose3d):
        assert (module.in_channels, module.out_channels // module.groups) == weight.shape[:2]
    elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
        assert module.num_features == len(module.running_mean)
    elif isinstance(module, nn.LayerNorm):
        assert tuple(module.normalized_shape) == tuple(weight.shape)
    elif isinstance(module, nn.Embedding):
        assert (module.num_embeddings, module.embedding_dim) == weight.shape
    elif isinstance(module, nn.RNNBase):
        assert (module.proj_size or module.hidden_size) == module.weight_hh_l0.shape[1]
        assert module.input_size == module.weight_ih_l0.shape[1]


def test_narrower_keeps_the_first_neurons() -> None:
    model, inputs, spec = analysed("lenet_flatten")
    narrow = rebuild(model, spec, {"conv2": 9, "fc1": 50})
    assert narrow.fc1.weight.shape == (50, 9 * 25)
    assert torch.equal(narrow.fc1.weight, model.fc1.weight[:50, : 9 * 25])
    # Cutting neurons that nothing reads changes nothing.
    silent = copy.deepcopy(model)
    with torch.no_grad():
        silent.fc1.weight[:, 9 * 25 :] = 0
    again = rebuild(silent, spec, {"conv2": 9})
    assert gap(outputs(again, inputs), outputs(silent, inputs)) < 1e-12
