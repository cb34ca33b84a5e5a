"""Networks in which a careless rule, self-test or rebuild goes wrong without a sound."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nafi
from nafi.errors import SpecError
from nafi.graph import (
    SpecWarning,
    check_spec,
    fold_batchnorm,
    gather,
    groups,
    permute,
    random_permutations,
    rebuild,
)
from nafi.graph.switches import Switch

VECTORS = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1))
IMAGES = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))


def net(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A network from a function of itself and its inputs, with named submodules or parameters."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, *inputs: Any) -> Any:
            return forward(self, *inputs)

    return Net()


def stirred(model: nn.Module) -> nn.Module:
    """Batch normalisations that do something, in eval mode."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.normal_(module.weight)
            nn.init.normal_(module.bias)
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def groups_of(model: nn.Module, *inputs: Tensor) -> set[str]:
    """The names of the groups; the self-test of `groups` must pass."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SpecWarning)
        return set(nafi.groups(model, inputs).groups)


# ------------------------------------------------------------- what a rule must not overlook


def written_constant(self: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(6, dtype=x.dtype)
    mask[2] = 1
    return self.b(torch.tanh(self.a(x)) * mask)


def filled_columns(self: Any, x: Tensor) -> Tensor:
    columns = torch.empty(len(x), 6, dtype=x.dtype)
    for k in range(6):
        columns[:, k] = x[:, 0] * k
    return self.b(columns)


def learned_start(self: Any, x: Tensor) -> Tensor:
    start = tuple(s.expand(-1, 2, -1).contiguous() for s in (self.h, self.c))
    return self.out(self.lstm(x, start)[0][:, -1])


def causal_tokens(self: Any, x: Tensor) -> Tensor:
    tokens = self.tokens + self.shift(x)[:, None]
    parts = (self.q(tokens), self.k(tokens), self.v(tokens))
    return self.out(F.scaled_dot_product_attention(*parts, is_causal=True).mean(1))


def grouped_queries(self: Any, x: Tensor) -> Tensor:
    heads = [
        layer(x).view(2, 7, count, -1).transpose(1, 2)
        for layer, count in ((self.q, 6), (self.k, 2), (self.v, 2))
    ]
    mixed = F.scaled_dot_product_attention(*heads, enable_gqa=True)
    return self.out(mixed.transpose(1, 2).flatten(2))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, generator=torch.Generator().manual_seed(3)))


@pytest.mark.parametrize(
    ("model", "inputs", "free"),
    [
        (net(written_constant, a=nn.Linear(5, 6), b=nn.Linear(6, 4)), VECTORS, set()),
        (net(filled_columns, b=nn.Linear(6, 4)), VECTORS, set()),
        (
            net(
                lambda self, x: self.out(self.lstm(self.a(x).unsqueeze(-1))[1][0][-1]),
                a=nn.Linear(5, 12),
                lstm=nn.LSTM(1, 6, batch_first=True),
                out=nn.Linear(6, 2),
            ),
            VECTORS,
            {"lstm"},
        ),
        (
            net(
                learned_start,
                lstm=nn.LSTM(8, 6, 2, batch_first=True),
                h=parameter(2, 1, 6),
                c=parameter(2, 1, 6),
                out=nn.Linear(6, 2),
            ),
            TOKENS,
            {"h"},  # one order for both layers: they start from one parameter
        ),
        (
            net(
                causal_tokens,
                tokens=parameter(1, 6, 8),
                shift=nn.Linear(5, 8),
                q=nn.Linear(8, 4),
                k=nn.Linear(8, 4),
                v=nn.Linear(8, 3),
                out=nn.Linear(3, 2),
            ),
            VECTORS,
            {"shift", "q", "v"},
        ),
        (
            net(
                grouped_queries,
                q=nn.Linear(8, 24),
                k=nn.Linear(8, 8),
                v=nn.Linear(8, 10),
                out=nn.Linear(30, 3),
            ),
            TOKENS,
            # two heads of keys and values, three queries in each, the width of a head, of a value
            {"q", "q/2", "q/3", "v"},
        ),
        (
            net(lambda self, x: self.b(self.a(x).flip(-1)), a=nn.Linear(5, 6), b=nn.Linear(6, 2)),
            VECTORS,
            set(),
        ),
        (
            net(lambda self, x: self.b(self.a(x).roll(1)), a=nn.Linear(5, 6), b=nn.Linear(6, 2)),
            VECTORS,
            set(),
        ),
        (
            net(
                lambda self, x: self.b(self.a(x).roll(1, 2).cumsum(2).mean((2, 3))),
                a=nn.Conv2d(3, 6, 1),
                b=nn.Linear(6, 2),
            ),
            IMAGES,
            {"a"},
        ),
        (
            net(
                lambda self, x: self.b(F.channel_shuffle(self.a(x), 2)),
                a=nn.Conv2d(3, 8, 1),
                b=nn.Conv2d(8, 2, 1),
            ),
            IMAGES,
            {"a", "a/2"},
        ),
        (
            net(
                lambda self, x: self.c(
                    torch.relu(self.b(x) + F.pad(self.a(x), (0, 0, 0, 0, 2, 2)))
                ),
                a=nn.Conv2d(3, 4, 1),
                b=nn.Conv2d(3, 8, 1),
                c=nn.Conv2d(8, 2, 1),
            ),
            IMAGES,
            {"b", "b/2", "b/3"},
        ),
        (
            net(lambda self, x: self.out(self.cell(x)), cell=nn.GRUCell(5, 6), out=nn.Linear(6, 2)),
            VECTORS,
            {"cell"},
        ),
        (
            net(
                lambda self, x: torch.einsum("...i,ij", self.a(x), self.w),
                a=nn.Linear(8, 6),
                w=parameter(6, 2),
            ),
            TOKENS,
            {"a"},
        ),
        (
            net(
                lambda self, x: self.b(self.a(x)[torch.arange(2), x[..., 0].argmax(1)]),
                a=nn.Linear(8, 6),
                b=nn.Linear(6, 2),
            ),
            TOKENS,
            {"a"},
        ),
        (
            net(
                lambda self, x: self.b(torch.movedim(self.a(x), 1, -1)),
                a=nn.Conv2d(3, 6, 1),
                b=nn.Linear(6, 2),
            ),
            IMAGES,
            {"a"},
        ),
        (
            net(
                lambda self, x: self.b(torch.cat([self.c.repeat(len(x), 1, 1), self.a(x)], 1)),
                a=nn.Linear(8, 6),
                c=parameter(1, 1, 6),
                b=nn.Linear(6, 2),
            ),
            TOKENS.repeat(300, 1, 1),
            {"a"},
        ),
    ],
)
def test_found_groups_are_just_the_free_ones(
    model: nn.Module, inputs: Tensor, free: set[str]
) -> None:
    assert groups_of(model, inputs) == free


@pytest.mark.parametrize(
    ("forward", "free"),
    [
        (lambda self, x: self.b(self.a(x.float())), {"a"}),  # insists on single precision
        (lambda self, x: self.b(self.a(x)) * self.scalar.softmax(0), {"a"}),  # no dimensions
        (lambda self, x: self.b(self.a(x)) * self.scalar.squeeze(-1), {"a"}),
        (lambda self, x: self.b(torch.frexp(self.a(x))[0]), set()),  # pointwise, two results
        # Random in eval mode: which number a neuron gets depends on its place.
        (lambda self, x: self.b(self.a(x) + torch.randn_like(self.a(x))), set()),
        (lambda self, x: self.b(F.dropout(self.a(x), 0.5, training=True)), set()),
    ],
)
def test_odd_but_legitimate_networks_are_analysed(
    forward: Callable[..., Any], free: set[str]
) -> None:
    scalar = nn.Parameter(torch.tensor(1.0))
    model = net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 2), scalar=scalar)
    assert groups_of(model, VECTORS) == free


@pytest.mark.slow
def test_both_branches_of_a_condition_hold() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return torch.cond(
            x.sum() > 0, lambda y: self.b(self.a(y)), lambda y: -self.b(self.a(y)), (x,)
        )

    assert groups_of(net(forward, a=nn.Linear(5, 6), b=nn.Linear(6, 2)), VECTORS) == {"a"}


def test_complex_weights() -> None:
    def weights(*shape: int) -> nn.Parameter:
        return nn.Parameter(torch.randn(*shape, dtype=torch.cfloat))

    model = net(
        lambda self, x: (x.to(torch.cfloat) @ self.w @ self.v).abs(),
        w=weights(5, 6),
        v=weights(6, 2),
    )
    spec = nafi.groups(model, (VECTORS,))
    assert spec.coverage(model.state_dict()) == 1.0
    assert gather(model.state_dict(), spec, "w").matrix.shape == (6, 7)


def test_a_buffer_that_changes_in_forward_is_put_back() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        hidden = self.a(x)
        self.mean.mul_(0.9).add_(hidden.mean((0, 1)), alpha=0.1)
        return self.b(hidden - self.mean)

    model = net(forward, a=nn.Linear(8, 6), b=nn.Linear(6, 2))
    model.register_buffer("mean", torch.zeros(6))
    assert groups_of(model, TOKENS) == {"a"}
    assert model.mean.abs().max() == 0


def test_a_state_that_is_no_tensor_is_left_alone() -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"version": 1}

        def set_extra_state(self, state: object) -> None:
            assert state == {"version": 1}

    model = nn.Sequential(Extra(5, 6), nn.ReLU(), nn.Linear(6, 2))
    spec = nafi.groups(model, (VECTORS,))
    assert rebuild(model, spec, {"0": 9})[0].out_features == 9


# ----------------------------------------------------------------- the self-test itself


def test_an_output_without_a_finite_number_proves_nothing() -> None:
    model = net(
        lambda self, x: self.b(self.a(x)) * float("nan"), a=nn.Linear(5, 6), b=nn.Linear(6, 2)
    )
    with pytest.raises(SpecError, match="nothing finite"):
        nafi.groups(model, (VECTORS,))


def test_no_neuron_keeps_its_place_in_the_self_test() -> None:
    """With two neurons, half of all random orders would be the old one."""
    model = nn.Sequential(nn.Linear(5, 2), nn.Tanh(), nn.Linear(2, 3))
    data = nafi.groups(model, (VECTORS,)).to_dict()
    data["axes"]["2.weight"][1] = [[2]]
    wrong = nafi.ModelSpec.from_dict(data)
    for seed in range(10):
        with pytest.raises(SpecError, match="permuting group 0"):
            check_spec(model, (VECTORS,), wrong, seed=seed)


def test_inputs_of_zeros_do_not_hide_the_first_layer() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 3, bias=False))
    data = nafi.groups(model, (torch.zeros(2, 3, 8, 8),)).to_dict()
    data["axes"]["2.weight"][1] = [[4]]
    with pytest.raises(SpecError, match="permuting group 0"):
        check_spec(model, (torch.zeros(2, 3, 8, 8),), nafi.ModelSpec.from_dict(data))


# ------------------------------------------------------------------------- batch norms


class NormAndActivation(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class IgnoresBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = parameter(6, 5), None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


def twice_registered() -> nn.Module:
    conv, norm = nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6)
    body = nn.Sequential(conv, norm, nn.ReLU(), nn.Conv2d(6, 2, 3))
    return net(lambda self, x: self.body(x), conv=conv, norm=norm, body=body)


def tied_biases() -> nn.Module:
    a, b = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 3)
    b.bias = a.bias
    return net(
        lambda self, x: self.c(torch.relu(self.b(torch.relu(self.norm(self.a(x)))))),
        a=a,
        norm=nn.BatchNorm2d(6),
        b=b,
        c=nn.Conv2d(6, 2, 1),
    )


def over_tokens() -> nn.Module:
    return net(
        lambda self, x: self.b(torch.relu(self.norm(self.a(x)))),
        a=nn.Linear(8, 7),
        norm=nn.BatchNorm1d(7),
        b=nn.Linear(7, 2),
    )


def bias_read_elsewhere() -> nn.Module:
    return net(
        lambda self, x: self.b(torch.relu(self.norm(self.a(x)))) + self.a.bias.sum(),
        a=nn.Linear(5, 6),
        norm=nn.BatchNorm1d(6),
        b=nn.Linear(6, 2),
    )


@pytest.mark.parametrize(
    ("build", "inputs", "folded"),
    [
        (
            lambda: nn.Sequential(nn.Conv2d(3, 6, 3), NormAndActivation(6), nn.Conv2d(6, 2, 3)),
            IMAGES,
            0,
        ),
        (twice_registered, IMAGES, 1),
        (over_tokens, TOKENS, 0),
        (bias_read_elsewhere, VECTORS, 0),
        (tied_biases, IMAGES, 0),
        (lambda: nn.Sequential(IgnoresBias(), nn.BatchNorm1d(6), nn.Linear(6, 2)), VECTORS, 0),
    ],
)
def test_folding_never_changes_the_function(
    build: Callable[[], nn.Module], inputs: Tensor, folded: int
) -> None:
    torch.manual_seed(0)
    model = stirred(build())
    spec = nafi.groups(model, (inputs,))
    result, result_spec = fold_batchnorm(model, spec)
    with torch.no_grad():
        assert (result(inputs) - model(inputs)).abs().max() < 1e-5
    assert len(result_spec.folded) == folded
    check_spec(result, (inputs,), result_spec)


# ------------------------------------------------------------------------------ rebuild


class Attention(nn.Module):
    """Four heads of four, however the code comes by them."""

    def __init__(self, by_width: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.embed, self.out = nn.Linear(8, 12), nn.Linear(12, 3)
        self.q, self.k, self.v = nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(12, 16)
        self.o = nn.Linear(16, 12)
        self.scale, self.by_width = scale, by_width

    def split(self, x: Tensor) -> Tensor:
        shape = (-1, 4) if self.by_width else (4, -1)
        return x.view(*x.shape[:2], *shape).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        mixed = F.scaled_dot_product_attention(q, k, v, scale=self.scale)
        return self.out(x + self.o(mixed.transpose(1, 2).flatten(2)))


def test_a_rigid_group_is_not_taken_apart_in_the_old_way() -> None:
    """Shapes agree, but the code still cuts heads of four."""
    model = Attention(by_width=True)
    spec = nafi.groups(model, (TOKENS,))
    assert spec.groups["q/2"].rigid
    with pytest.raises(SpecError, match=r"takes its neurons apart in another way.*size with 4"):
        rebuild(model, spec, {"q/2": 8, "v": 8})


def test_a_layer_that_starts_at_zero_does_not_hide_a_fixed_number_of_heads() -> None:
    model = Attention(scale=0.5)
    nn.init.zeros_(model.o.weight)
    spec = nafi.groups(model, (TOKENS,))
    with pytest.raises(
        SpecError, match=r"computes something else.*view to a size with 4 \(group q\)"
    ):
        rebuild(model, spec, {"q": 2})


def test_a_norm_without_weights_follows() -> None:
    model = net(
        lambda self, x: self.b(self.norm(self.a(x))),
        a=nn.Linear(5, 6),
        norm=nn.LayerNorm(6, elementwise_affine=False),
        b=nn.Linear(6, 2),
    )
    spec = nafi.groups(model, (VECTORS,))
    assert spec.groups["a"].rigid == "layer_norm"
    wide = rebuild(model, spec, {"a": 8})
    assert tuple(wide.norm.normalized_shape) == (8,)
    assert tuple(model.norm.normalized_shape) == (6,)


def test_a_fixed_slice_is_named() -> None:
    model = net(lambda self, x: self.b(self.a(x)[:, 2:6]), a=nn.Linear(5, 6), b=nn.Linear(4, 2))
    spec = nafi.groups(model, (VECTORS,))
    with pytest.raises(SpecError, match=r"slice to a size with 6 \(group a\)"):
        rebuild(model, spec, {"a": 5})


def test_a_layer_under_two_names_is_rebuilt_once() -> None:
    conv, depthwise = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, groups=6)
    body = nn.Sequential(conv, depthwise, nn.Conv2d(6, 2, 1))
    model = net(lambda self, x: self.body(x), conv=conv, depthwise=depthwise, body=body)
    spec = nafi.groups(model, (IMAGES,))
    wide = rebuild(model, spec, {"conv": 8})
    assert wide.depthwise is wide.body[1]
    assert (wide.depthwise.groups, wide.depthwise.in_channels) == (8, 8)


# ---------------------------------------------------------------------------- arguments


def test_bad_arguments_are_named() -> None:
    model = nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 2))
    spec = nafi.groups(model, (VECTORS,))
    state = model.state_dict()
    other = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2))
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: gather(state, spec, "zz"), "no group 'zz'"),
        (lambda: gather({}, spec, "0"), "lacks 0.weight"),
        (lambda: gather(model, spec, "0"), r"found Sequential; write model.state_dict\(\)"),  # type: ignore[arg-type]
        (lambda: permute(state, spec, {}), "expected an nn.Module, found OrderedDict"),  # type: ignore[arg-type]
        (lambda: fold_batchnorm(state, spec), "expected an nn.Module"),  # type: ignore[arg-type]
        (lambda: gather(other.state_dict(), spec, "0"), r"0.weight: found shape \(4, 5\)"),
        (lambda: permute(model, spec, {"0": torch.arange(6.0)}), "torch.float32"),
        (lambda: permute(model, spec, {"0": "abc"}), "found 'abc'"),  # type: ignore[dict-item]
        (lambda: rebuild(model, spec, {"0": 3}, (torch.zeros(2, 3),)), "does not run"),
        (lambda: rebuild(model, spec, {"0": 3}, VECTORS), r"write \(x,\)"),  # type: ignore[arg-type]
        (lambda: rebuild(model, spec, None), "expected group -> width"),  # type: ignore[arg-type]
        (lambda: check_spec(model, (TOKENS,), spec), "does not run on the example inputs"),
        (lambda: fold_batchnorm(nn.Linear(2, 3), spec), "lacks 0.weight"),
        (lambda: nafi.ModelSpec.from_dict({"groups": [], "axes": {}}), "not a ModelSpec"),
        (
            lambda: nafi.ModelSpec.from_dict(
                {"groups": {"g": {"width": 2, "parent": "p"}}, "axes": {}}
            ),
            "unknown parent 'p'",
        ),
    ]
    for call, message in calls:
        with pytest.raises(SpecError, match=message):
            call()


def test_threads_can_look_at_networks_at_once() -> None:
    """torch.export alone cannot: servers and clients of a simulation share a process."""
    networks = [
        nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 2)) for width in range(3, 9)
    ]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda network: nafi.groups(network, (VECTORS,)), networks))
    assert [list(spec.widths.values()) for spec in found] == [[width] for width in range(3, 9)]


def test_threads_leave_logging_and_fast_kernels_as_they_were() -> None:
    """A thread that waits for another to record must not take its settings for the usual ones."""
    before = logging.root.manager.disable, torch.backends.mha.get_fastpath_enabled()
    networks = [nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 2)) for _ in range(3)]
    start = Barrier(len(networks))
    usual = logging.NOTSET, True

    def look(network: nn.Module) -> None:
        start.wait(60)
        nafi.groups(network, (VECTORS,))

    try:
        logging.disable(usual[0])
        torch.backends.mha.set_fastpath_enabled(usual[1])
        with ThreadPoolExecutor(len(networks)) as threads:
            for _ in range(3):
                list(threads.map(look, networks))
        after = logging.root.manager.disable, torch.backends.mha.get_fastpath_enabled()
    finally:
        logging.disable(before[0])
        torch.backends.mha.set_fastpath_enabled(before[1])
    assert after == usual


def test_a_kernel_stays_off_until_the_last_thread_is_done() -> None:
    """The first to come leaves first, while the second is still at work."""
    kernel = {"on": True}
    switch = Switch(lambda: kernel["on"], lambda value: kernel.update(on=value))
    first, second = switch.off(), switch.off()
    seen = []
    for step in (first.__enter__, second.__enter__):
        step()
        seen.append(kernel["on"])
    for one in (first, second):
        one.__exit__(None, None, None)
        seen.append(kernel["on"])
    assert seen == [False, False, False, True]


class Places(nn.Module):
    """A table of places of which short inputs use a part only."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.randn(9, 6))
        self.layer, self.head = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.layer(x) + self.places[: x.shape[1]]))


def test_places_beyond_the_example_inputs_keep_their_order() -> None:
    """Longer inputs use them, so that they are no neurons that may be permuted."""
    model = Places()
    spec = groups(model, (torch.zeros(2, 5, 4),))
    assert spec.widths == {"layer": 6}
    orders = random_permutations(spec, torch.Generator().manual_seed(0))
    long = torch.randn(2, 9, 4)
    torch.testing.assert_close(permute(model, spec, orders)(long), model(long))
