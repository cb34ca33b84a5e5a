"""Rebuilding refuses what the network's code cannot do, with the line and what to write."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import nafi
from nafi.errors import SpecError
from nafi.graph import groups, rebuild
from tests.graph import zoo


def test_a_hard_coded_view_is_named_with_its_line() -> None:
    model = zoo.LeNetHardCoded()
    spec = nafi.groups(model, (torch.zeros(4, 3, 32, 32),))
    with pytest.raises(SpecError) as caught:
        rebuild(model, spec, {"conv2": 20})
    message = str(caught.value)
    assert "view to a size with 400 (group conv2)" in message
    assert "zoo.py, line" in message
    assert "x.flatten(1)" in message
    assert rebuild(model, spec, {"conv1": 9, "fc1": 60}).conv1.out_channels == 9


def test_one_group_may_grow_by_as_much_as_another_shrinks() -> None:
    """What reads both side by side then has the shape that it had, and is another tensor."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(5, 8), nn.Linear(5, 6)
            self.head = nn.Linear(14, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([self.one(x), self.two(x)], dim=1).relu())

    torch.manual_seed(0)
    model, x = Two(), torch.randn(4, 5)
    spec = nafi.groups(model, (x,))
    found = rebuild(model, spec, {"one": 6, "two": 8})
    assert found.head.weight.shape == model.head.weight.shape
    kept = torch.cat([model.one(x)[:, :6], model.two(x)], dim=1).relu()
    columns = [*range(6), *range(8, 14)]
    expected = kept @ model.head.weight[:, columns].T + model.head.bias
    torch.testing.assert_close(found(x), expected)


@pytest.mark.parametrize("normalised", [nn.utils.weight_norm, parametrizations.weight_norm])
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated")
def test_normalised_weights_become_narrower(normalised: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(normalised(nn.Linear(5, 7)), nn.ReLU(), nn.Linear(7, 3)).eval()
    x = torch.randn(4, 5)
    spec = nafi.groups(model, (x,))
    (group,) = spec.groups
    narrow = rebuild(model, spec, {group: 4})
    expected = model[1](model[0](x))[:, :4] @ model[2].weight[:, :4].T + model[2].bias
    torch.testing.assert_close(narrow(x), expected)


def test_a_batch_is_never_regrouped_in_silence() -> None:
    """Nothing fails here: 2 x 400 numbers are as good as 4 x 200 to a mean over columns."""

    class Regroups(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.Linear(5, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.one(x)).view(-1, 8).amax(dim=1)

    model = Regroups()
    spec = nafi.groups(model, (torch.ones(2, 5),))
    with pytest.raises(
        SpecError, match=r"returns shapes \[\(4,\)\] instead of \[\(2,\)\].*size with 8"
    ):
        rebuild(model, spec, {"one": 16})


def test_heads_of_a_hand_written_attention_follow() -> None:
    model, inputs = zoo.seeded("vit_fused")
    spec = nafi.groups(model, inputs)
    wide = rebuild(model, spec, {"blocks.0.attention.qkv": 6})
    assert wide.blocks[0].attention.heads == 6
    assert wide.blocks[1].attention.heads == 4
    assert model.blocks[0].attention.heads == 4


def test_recurrent_layers_change_together() -> None:
    model, inputs = zoo.seeded("lstm")
    spec = nafi.groups(model, inputs)
    with pytest.raises(SpecError, match="one hidden_size for all layers"):
        rebuild(model, spec, {"lstm": 9})
    assert rebuild(model, spec, {"lstm": 9, "lstm/2": 9}).lstm.hidden_size == 9


def test_attention_modules_change_together_with_the_residual_stream() -> None:
    """A rigid group may change if asked for; only its shapes can be checked then."""
    model, inputs = zoo.seeded("self_attention")
    spec = nafi.groups(model, inputs)
    with pytest.raises(SpecError, match="MultiheadAttention needs heads x head width"):
        rebuild(model, spec, {"embed": 15})
    wide = rebuild(model, spec, {"embed": 15, "attention": 5})
    attention = wide.attention
    assert (attention.embed_dim, attention.num_heads, attention.head_dim) == (15, 5, 3)


@pytest.mark.parametrize("width", [0, -3, 2.5, True])
def test_impossible_widths(width: object) -> None:
    model = zoo.MLP(5, 8, 4)
    spec = nafi.groups(model, (torch.zeros(2, 5),))
    with pytest.raises(SpecError, match=r"width of group layers.0: found .* at least 1"):
        rebuild(model, spec, {"layers.0": width})  # type: ignore[dict-item]


def test_without_inputs_there_is_nothing_to_check_with() -> None:
    model = zoo.MLP(5, 8, 4)
    spec = nafi.ModelSpec.from_dict(nafi.groups(model, (torch.zeros(2, 5),)).to_dict())
    with pytest.raises(SpecError, match="needs example_inputs"):
        rebuild(model, spec, {"layers.0": 9})
    wide = rebuild(model, spec, {"layers.0": 9}, (torch.zeros(2, 5),))
    assert wide.layers[0].out_features == 9


def test_half_precision_and_devices_stay() -> None:
    model = zoo.MLP(5, 8, 4).half()
    spec = nafi.groups(zoo.MLP(5, 8, 4), (torch.zeros(2, 5),))
    wide = rebuild(model, spec, {"layers.0": 9})
    assert {p.dtype for p in wide.parameters()} == {torch.float16}


def test_normalisations_without_tensors_learn_their_size() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 3))
    inputs = (torch.randn(2, 3, 8, 8),)
    wide = rebuild(model, nafi.groups(model, inputs), {"0": 7})
    assert wide[1].num_features == 7  # type: ignore[index]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        wide.train()(*inputs)
    assert not wide[1]._forward_pre_hooks  # type: ignore[index]


class Windowed(nn.Module):
    """Two numbers of the same value: a size, and one that has nothing to do with it."""

    def __init__(self, hidden: int = 8, window: int = 8) -> None:
        super().__init__()
        self.hidden, self.window = hidden, window
        self.inner, self.outer = nn.Linear(5, hidden), nn.Linear(hidden, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, : self.window]  # the example is shorter
        return self.outer(self.inner(x).relu().view(len(x), -1, self.hidden))


class Hopping(Windowed):
    """The same, where the other number matters for the example."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.repeat(1, 4, 1))


@pytest.mark.parametrize("kind", [Windowed, Hopping])
def test_a_number_that_equals_a_size_is_left_alone(kind: type[Windowed]) -> None:
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 6, 5)
    spec = groups(model, (x,))
    wider = rebuild(model, spec, {"inner": 12})
    assert (wider.hidden, wider.window) == (12, 8)
    longer = torch.randn(2, 11, 5)
    assert torch.allclose(wider(longer), model(longer), atol=1e-6)


class Own(nn.Module):
    """Keeps a weight, and its width beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.width, self.first = 8, nn.Parameter(torch.randn(5, 8))
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last((x @ self.first).relu().view(-1, self.width))


def test_a_module_remembers_the_size_of_its_own_tensor() -> None:
    model, x = Own(), torch.randn(4, 5)
    wide = rebuild(model, nafi.groups(model, (x,)), {"first": 11})
    assert wide.width == 11
    assert torch.allclose(wide(x), model(x), atol=1e-6)


class Grouped(nn.Module):
    """As many heads as queries share each of them, in two attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.shared = 2, 2
        self.queries, self.keys = nn.Linear(5, 12), nn.Linear(5, 6)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries(x).view(len(x), self.heads, self.shared, -1)
        keys = self.keys(x).view(len(x), self.heads, 1, -1)
        return self.out((queries * keys).flatten(1))


def test_equal_sizes_that_come_to_differ_are_told_apart() -> None:
    model, x = Grouped(), torch.randn(4, 5)
    spec = nafi.groups(model, (x,))
    heads, shared = (name for name, group in spec.groups.items() if group.width == 2)
    wide = rebuild(model, spec, {heads: 3, shared: 5})
    assert (wide.heads, wide.shared) == (3, 5)
    assert torch.allclose(wide(x), model(x), atol=1e-6)


class Renamed(nn.Sequential):
    """Its state dict has other names than its modules, as those of Opacus have."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
        self.register_state_dict_post_hook(_rename)
        self.register_load_state_dict_pre_hook(_name_back)


def _rename(module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
    for name in [name for name in state if not name.startswith("layer")]:
        state[f"layer{name}"] = state.pop(name)


def _name_back(module: nn.Module, state: dict[str, Tensor], *_: object) -> None:
    for name in list(state):
        state[name.removeprefix("layer")] = state.pop(name)


def test_tensors_are_found_where_modules_keep_them() -> None:
    model, x = Renamed(), torch.randn(4, 5)
    spec = nafi.groups(model, (x,))
    assert set(spec.tensors) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    wide = rebuild(model, spec, {"0": 11})
    assert wide[0].out_features == 11
    assert torch.allclose(wide(x), model(x), atol=1e-6)


def test_what_wraps_a_network_is_taken_off() -> None:
    model, x = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(4, 5)
    spec = nafi.groups(nn.DataParallel(model), (x,))
    assert spec.axes == nafi.groups(model, (x,)).axes
    wide = rebuild(nn.DataParallel(model), spec, {"0": 11})
    assert torch.allclose(wide(x), model(x), atol=1e-6)


def test_a_module_of_an_unknown_shape_is_named() -> None:
    """Some libraries keep another tensor as the weight of a torch module."""

    class Stacked(nn.Embedding):
        def __init__(self) -> None:
            super().__init__(4, 8)
            self.weight = nn.Parameter(torch.randn(2, 4, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight.sum(0)[x]

    model = nn.Sequential(Stacked(), nn.Linear(8, 3))
    x = torch.randint(0, 4, (6,))
    with pytest.raises(SpecError, match="0: Stacked cannot be given other sizes"):
        rebuild(model, nafi.groups(model, (x,)), {"0": 11})


class Quiet(nn.Module):
    """As many heads as each is wide, in one attribute; what they do hardly matters yet."""

    def __init__(self) -> None:
        super().__init__()
        self.size = 3
        self.q, self.k, self.v = (nn.Linear(5, 9) for _ in range(3))
        self.out, self.skip = nn.Linear(9, 3), nn.Linear(5, 3)
        nn.init.constant_(self.out.weight, 1e-12)

    def forward(self, x: Tensor) -> Tensor:
        form = (*x.shape[:2], -1, self.size)
        q, k, v = (layer(x).view(form).transpose(1, 2) for layer in (self.q, self.k, self.v))
        mixed = (q @ k.transpose(2, 3)).softmax(-1) @ v
        return self.skip(x) + 1e-9 * self.out(mixed.transpose(1, 2).flatten(2))


def test_heads_are_not_read_as_their_width() -> None:
    """5 heads of 7 have the shapes of 7 heads of 5, and here all but the same outputs."""
    model, x = Quiet(), torch.randn(2, 4, 5)
    spec = nafi.groups(model, (x,))
    widths = {name: 5 if group.parent is None else 7 for name, group in spec.groups.items()}
    assert rebuild(model, spec, widths).size == 7
