"""One small network for each rule: just the groups that are free, as known by hand.

`nafi.groups` tests what it finds by permuting; what it must find is written here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import nafi
from nafi.graph import SpecWarning, rules
from tests.graph.test_traps import IMAGES, TOKENS, VECTORS, net, parameter
from tests.graph.zoo import rules_that_work

EDGES = torch.tensor([[0, 1, 2, 2], [1, 2, 0, 1]])
NUMBERS = torch.tensor([[0, 3, 1], [2, 2, 4]])


def two(forward: Callable[..., Any], inputs: int = 5, **more: Any) -> nn.Module:
    """A layer of six neurons, something in between, and a layer that reads it."""
    return net(forward, a=nn.Linear(inputs, 6), b=nn.Linear(6, 2), **more)


def images(forward: Callable[..., Any], **more: Any) -> nn.Module:
    return net(forward, a=nn.Conv2d(3, 6, 1), b=nn.Conv2d(6, 2, 1), **more)


def spread(edges: Tensor) -> Tensor:
    return edges[1][:, None].expand(-1, 6)


def in_place(self: Any, x: Tensor) -> Tensor:
    hidden = self.a(x)
    hidden[:, 1:].mul_(2)
    hidden[:, 0] += 1
    hidden.view(-1, 6)[:3].zero_()
    return self.b(hidden)


def shifted(self: Any, x: Tensor) -> Tensor:
    """A part of the channels moves on by one step, as in temporal shift modules."""
    hidden = self.a(x)
    moved = torch.zeros_like(hidden)
    moved[:, 1:, :2] = hidden[:, :-1, :2]
    moved[:, :, 2:] = hidden[:, :, 2:]
    return self.b(moved)


def masked(self: Any, x: Tensor) -> Tensor:
    hidden = self.a(x)
    hidden[hidden < 0] = 0.0
    return self.b(hidden)


def fused_heads(self: Any, x: Tensor) -> Tensor:
    """Query, key and value side by side within each head, as in GPT-NeoX."""
    q, k, v = self.qkv(x).view(2, 7, 4, 18).transpose(1, 2).chunk(3, dim=-1)
    return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def rotary(self: Any, x: Tensor) -> Tensor:
    """A quarter of each head is rotated."""
    angles = torch.arange(7, dtype=x.dtype)[:, None] * torch.tensor([1.0, 0.1], dtype=x.dtype)
    angles = torch.cat([angles, angles], dim=-1)
    heads = [layer(x).view(2, 7, 3, 16).transpose(1, 2) for layer in (self.q, self.k, self.v)]

    def turn(t: Tensor) -> Tensor:
        turned, kept = t[..., :4], t[..., 4:]
        crossed = torch.cat([-turned[..., 2:], turned[..., :2]], dim=-1)
        return torch.cat([turned * angles.cos() + crossed * angles.sin(), kept], dim=-1)

    mixed = F.scaled_dot_product_attention(turn(heads[0]), turn(heads[1]), heads[2])
    return self.out(mixed.transpose(1, 2).flatten(2))


def experts(self: Any, x: Tensor) -> Tensor:
    """Three experts, four rows for each."""
    rows = self.a(x).relu().to(torch.bfloat16)
    ends = torch.tensor([4, 8, 12], dtype=torch.int32)
    hidden = torch._grouped_mm(rows, self.up.to(torch.bfloat16), offs=ends).relu()
    return self.b(torch._grouped_mm(hidden, self.down.to(torch.bfloat16), offs=ends).to(x.dtype))


def two_kinds_of_heads(self: Any, x: Tensor) -> Tensor:
    """Channels attend to channels in each head; two of five heads have gains of their own."""
    q, k, v = (layer(x).view(2, 7, 5, 4).transpose(1, 2) for layer in (self.q, self.k, self.v))
    mixed = q @ (k.softmax(dim=2).mT @ v)
    gained = torch.cat([v[:, :2] * self.few[:, None], v[:, 2:] * self.many[:, None]], dim=1)
    return self.out((mixed + q * gained).transpose(1, 2).flatten(2))


def short_time(self: Any, x: Tensor) -> Tensor:
    window = torch.hann_window(16, dtype=x.dtype)
    waves = torch.stft(self.a(x).flatten(0, 1), 16, window=window, return_complex=True)
    signals = torch.istft(waves * waves.abs(), 16, window=window)
    return self.b(signals.unflatten(0, (len(x), -1)).abs().mean(dim=2))


def under_autocast(self: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        hidden = self.a(x).relu()
        with torch.enable_grad():
            hidden = self.c(hidden)
    return self.b(hidden)


def projected(self: Any, x: Tensor) -> Tensor:
    states, (last, cells) = self.lstm(x)
    return self.out(torch.cat([states[:, -1], last[0], last[-1], cells[-1]], dim=-1))


CASES: dict[str, tuple[nn.Module, tuple[Tensor, ...], set[str]]] = {
    "where with a number": (
        two(lambda self, x: self.b(torch.where(self.a(x) > 0, self.a(x), -0.1))),
        (VECTORS,),
        {"a"},
    ),
    "log_sigmoid": (two(lambda self, x: self.b(F.logsigmoid(self.a(x)))), (VECTORS,), {"a"}),
    "logic": (
        two(
            lambda self, x: self.b(self.a(x) * ((self.a(x) > 0) & (self.a(x) < 1) | (x[:, :1] > 0)))
        ),
        (VECTORS,),
        {"a"},
    ),
    "reshape_as": (
        two(lambda self, x: self.b(self.a(x).flatten(1).reshape_as(self.a(x)).view_as(self.a(x)))),
        (VECTORS,),
        {"a"},
    ),
    "empty slice": (
        two(lambda self, x: self.b(torch.cat([self.a(x)[:, :0], self.a(x)[:, 6:], self.a(x)], 1))),
        (VECTORS,),
        {"a"},
    ),
    "empty piece": (
        two(lambda self, x: self.b(torch.cat(self.a(x).split([0, 2, 4], dim=1), 1))),
        (VECTORS,),
        {"a", "a/2"},
    ),
    "scatter_add": (
        two(lambda self, x, e: self.b(self.a(x).scatter_add(0, spread(e), self.a(x)[e[0]]))),
        (VECTORS, EDGES),
        {"a"},
    ),
    "scatter_add into zeros": (
        two(
            lambda self, x, e: self.b(x.new_zeros(3, 6).scatter_add_(0, spread(e), self.a(x)[e[0]]))
        ),
        (VECTORS, EDGES),
        {"a"},
    ),
    "scatter_reduce": (
        two(
            lambda self, x, e: self.b(
                self.a(x).scatter_reduce(0, spread(e), self.a(x)[e[0]], "amax")
            )
        ),
        (VECTORS, EDGES),
        {"a"},
    ),
    "scatter along neurons": (
        two(lambda self, x: self.b(self.a(x).scatter(1, torch.tensor([[0], [3], [5]]), 1.0))),
        (VECTORS,),
        set(),
    ),
    "index_add": (
        two(lambda self, x, e: self.b(self.a(x).index_add(0, e[1], self.a(x)[e[0]]))),
        (VECTORS, EDGES),
        {"a"},
    ),
    "index_put": (
        two(lambda self, x, e: self.b(self.a(x).index_put((e[1][:2],), self.a(x)[:2]))),
        (VECTORS, EDGES),
        {"a"},
    ),
    "index_put with a mask": (two(masked), (VECTORS,), {"a"}),
    "gather places": (
        two(
            lambda self, x: self.b(self.a(x).gather(1, x[..., :1].argsort(1).expand(-1, -1, 6))),
            inputs=8,
        ),
        (TOKENS,),
        {"a"},
    ),
    "gather neurons": (
        two(lambda self, x: self.b(self.a(x).gather(1, self.a(x).argsort(1)))),
        (VECTORS,),
        set(),
    ),
    "embedding_bag": (
        net(lambda self, x: self.b(self.bag(x)), bag=nn.EmbeddingBag(5, 6), b=nn.Linear(6, 2)),
        (NUMBERS,),
        {"bag"},
    ),
    "one_hot": (
        two(lambda self, x: self.b(self.a(F.one_hot(x, 5).to(self.a.weight.dtype)))),
        (NUMBERS,),
        {"a"},
    ),
    "experts": (
        net(
            experts,
            a=nn.Linear(5, 8),
            up=parameter(3, 8, 16),
            down=parameter(3, 16, 8),
            b=nn.Linear(8, 2),
        ),
        (torch.randn(12, 5, generator=torch.Generator().manual_seed(1)),),
        {"a", "up", "down"},
    ),
    "fft over places": (
        images(
            lambda self, x: self.b(torch.fft.irfft2(torch.fft.rfft2(self.a(x)) * self.w)),
            w=parameter(6, 1, 1),
        ),
        (IMAGES,),
        {"a"},
    ),
    "fft over neurons": (
        two(lambda self, x: self.b(torch.fft.fft(self.a(x)).real)),
        (VECTORS,),
        set(),
    ),
    "short-time spectra": (
        net(short_time, a=nn.Conv1d(7, 6, 1), b=nn.Linear(6, 2)),
        (torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(0)),),
        {"a"},
    ),
    "complex pairs": (
        two(
            lambda self, x: self.b(
                torch.view_as_real(torch.complex(self.a(x), x[:, :1]) * self.w)[..., 1]
            ),
            w=parameter(6),
        ),
        (VECTORS,),
        {"a"},
    ),
    "cosine_similarity": (
        net(
            lambda self, x: F.cosine_similarity(self.a(x)[:, None], self.p[None], dim=-1),
            a=nn.Linear(5, 6),
            p=parameter(3, 6),
        ),
        (VECTORS,),
        {"a"},
    ),
    "cdist": (
        net(lambda self, x: torch.cdist(self.a(x), self.p), a=nn.Linear(5, 6), p=parameter(3, 6)),
        (VECTORS,),
        {"a"},
    ),
    "norms": (
        two(
            lambda self, x: (
                self.b(F.normalize(self.a(x)))
                + torch.linalg.norm(self.a(x), dim=1, keepdim=True)
                + torch.linalg.matrix_norm(self.a(x)[:, None])[:, None]
            )
        ),
        (VECTORS,),
        {"a"},
    ),
    "std_mean": (
        two(
            lambda self, x: self.b(
                self.a(x) * torch.std_mean(self.a(x), dim=1, keepdim=True)[0]
                + torch.var_mean(self.a(x), dim=1, keepdim=True)[1]
            )
        ),
        (VECTORS,),
        {"a"},
    ),
    "unfold and fold": (
        net(
            lambda self, x: self.b(
                F.fold(self.c(F.unfold(self.a(x), 3, padding=1)), (8, 8), kernel_size=2)
            ),
            a=nn.Conv2d(3, 6, 1),
            c=nn.Conv1d(54, 20, 1),
            b=nn.Conv2d(5, 2, 1),
        ),
        (IMAGES[..., :7, :7],),
        {"a", "c"},
    ),
    "windows": (
        images(lambda self, x: self.b(self.a(x).unfold(2, 2, 2).unfold(3, 2, 2).mean((-1, -2)))),
        (IMAGES,),
        {"a"},
    ),
    "grid_sample": (
        images(
            lambda self, x: self.b(
                F.grid_sample(
                    self.a(x),
                    F.affine_grid(self.t(x.mean((2, 3))).view(-1, 2, 3), (2, 6, 5, 4), False),
                    align_corners=False,
                )
            ),
            t=nn.Linear(3, 6),
        ),
        (IMAGES,),
        {"a"},
    ),
    "max_unpool": (
        images(
            lambda self, x: self.b(
                F.max_unpool2d(*F.max_pool2d(self.a(x), 2, return_indices=True), 2)
            )
        ),
        (IMAGES,),
        {"a"},
    ),
    "maximum over neurons": (
        images(lambda self, x: self.b(self.a(x) * torch.max(self.a(x), dim=1, keepdim=True)[0])),
        (IMAGES,),
        {"a"},
    ),
    "position of the maximum": (
        two(lambda self, x: self.b(self.a(x)) + self.a(x).max(dim=1, keepdim=True)[1]),
        (VECTORS,),
        set(),
    ),
    "sorted values": (
        two(lambda self, x: self.b(self.a(x).sort(dim=1).values * self.a(x).topk(1)[0])),
        (VECTORS,),
        {"a"},
    ),
    "in place": (two(in_place, inputs=8), (TOKENS,), {"a"}),
    "in place on a part": (two(shifted, inputs=8), (TOKENS,), {"a", "a/2"}),
    "triangle": (
        two(lambda self, x: self.b((self.a(x) @ self.a(x).mT).tril() @ self.a(x)), inputs=8),
        (TOKENS,),
        {"a"},
    ),
    "operations that consist of others": (
        two(
            lambda self, x: self.b(
                torch.hsplit(torch.column_stack([self.a(x), self.a(x)]), 2)[1]
                * torch.inner(self.a(x), self.w)[:, None]
                * self.a(x).quantile(0.5, dim=1, keepdim=True)
            ),
            w=parameter(6),
        ),
        (VECTORS,),
        {"a"},
    ),
    "diagonal": (
        two(lambda self, x: self.b(self.a(x) @ torch.diag(self.w)), w=parameter(6)),
        (VECTORS,),
        {"a"},
    ),
    "written slices": (
        two(
            lambda self, x: self.b(
                torch.slice_scatter(self.a(x), -self.a(x)[:, :2], 1, 0, 2).select_scatter(
                    self.w, 0, 1
                )
            ),
            w=parameter(6),
        ),
        (VECTORS,),
        {"a", "a/2"},
    ),
    "short rows": (
        net(
            lambda self, x: self.b(self.e(x)), e=nn.Embedding(5, 6, max_norm=1.0), b=nn.Linear(6, 2)
        ),
        (NUMBERS,),
        {"e"},
    ),
    "turned images": (images(lambda self, x: self.b(self.a(x).rot90(1, (2, 3)))), (IMAGES,), {"a"}),
    "buckets": (
        two(lambda self, x: self.b(torch.bucketize(self.a(x), x[0].sort()[0]).to(x.dtype))),
        (VECTORS,),
        {"a"},
    ),
    "distances of pairs": (
        two(
            lambda self, x: self.b(self.a(x)) * F.pairwise_distance(self.a(x), self.w)[:, None],
            w=parameter(6),
        ),
        (VECTORS,),
        {"a"},
    ),
    "fused heads": (
        net(fused_heads, qkv=nn.Linear(8, 72), out=nn.Linear(24, 2)),
        (TOKENS,),
        {"qkv", "qkv/2"},
    ),
    "rotary": (
        net(
            rotary,
            q=nn.Linear(8, 48),
            k=nn.Linear(8, 48),
            v=nn.Linear(8, 48),
            out=nn.Linear(48, 2),
        ),
        (TOKENS,),
        {"q", "v"},
    ),
    "two kinds of heads": (
        net(
            two_kinds_of_heads,
            q=nn.Linear(8, 20),
            k=nn.Linear(8, 20),
            v=nn.Linear(8, 20),
            few=parameter(2, 4),
            many=parameter(3, 4),
            out=nn.Linear(20, 2),
        ),
        (TOKENS,),
        {"q", "q/2", "q/3"},
    ),
    "regions": (two(under_autocast, c=nn.Linear(6, 6)), (VECTORS,), {"a", "c"}),
    "projected lstm": (
        net(
            projected,
            lstm=nn.LSTM(8, 6, 2, batch_first=True, proj_size=3),
            out=nn.Linear(15, 2),
        ),
        (TOKENS,),
        {"lstm", "lstm/2", "lstm/3", "lstm/4"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_just_what_is_free_is_found(case: str) -> None:
    model, inputs, free = CASES[case]
    with warnings.catch_warnings(), rules_that_work():
        warnings.simplefilter("error", SpecWarning)
        warnings.filterwarnings("ignore", message=".*tells positions apart", category=SpecWarning)
        assert set(nafi.groups(model, inputs).groups) == free


def failing(call: rules.Call) -> rules.Value:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (failing, r"the rule for erf .*fails with RuntimeError\('out of luck'\) in .*test_traps"),
        (lambda call: None, r"the rule for erf .*returns no Value"),
        (lambda call: rules.Value(call["self"].axes[:1]), r"returns axes of \[\[3\]\]"),
    ],
)
def test_a_rule_that_fails_pins_and_says_so(
    rule: rules.Rule, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(rules.RULES, "erf", rule)
    model = two(lambda self, x: self.b(torch.erf(self.a(x))))
    with pytest.warns(SpecWarning, match=message):
        spec = nafi.groups(model, (VECTORS,))
    assert not spec.groups


def test_constants_that_are_not_saved_are_named() -> None:
    """They cannot be permuted, so what they are added to keeps its order; a buffer can."""
    model = two(lambda self, x: self.b(self.a(x) + self.places))
    model.places = torch.randn(6)
    with pytest.warns(SpecWarning, match=r"places, which is not saved .*left unmatched a.weight"):
        assert not nafi.groups(model, (VECTORS,)).groups
    places = model.places
    del model.places
    model.register_buffer("places", places)
    with warnings.catch_warnings():
        warnings.simplefilter("error", SpecWarning)
        assert set(nafi.groups(model, (VECTORS,)).groups) == {"a"}


def test_constants_that_are_even_tell_nothing_apart() -> None:
    """A key bias of zeros beside learnt ones, as in BEiT; a scale for each token."""

    def forward(self: Any, x: Tensor) -> Tensor:
        bias = torch.cat([self.first, self.zeros])
        return self.b((F.linear(x, self.a.weight) + bias).relu() * self.scale)

    model = net(forward, a=nn.Linear(8, 6, bias=False), b=nn.Linear(6, 2), first=parameter(3))
    model.register_buffer("zeros", torch.zeros(3), persistent=False)
    model.register_buffer("scale", torch.rand(7, 1).expand(7, 6).contiguous(), persistent=False)
    assert nafi.groups(model, (TOKENS,)).widths == {"a": 3, "a/2": 3}


def test_a_tensor_is_covered_if_nothing_of_it_was_given_up() -> None:
    """Six neurons of eight pass, two meet an operation without a rule."""

    def forward(self: Any, x: Tensor) -> Tensor:
        free, lost = self.a(x).split([6, 2], dim=1)
        return self.b(torch.cat([free, torch.renorm(lost, 2, 0, 1.0)], dim=1)) + self.c(x)

    model = net(
        forward,
        a=nn.Linear(5, 8),
        b=nn.Linear(8, 2),
        c=net(hidden, d=nn.Linear(5, 3), e=nn.Linear(3, 2)),
    )
    with pytest.warns(SpecWarning, match="no rule for renorm"):
        spec = nafi.groups(model, (VECTORS,))
    assert spec.widths == {"a": 6, "c.d": 3}
    covered = 5 * 3 + 3 + 3 * 2
    everything = sum(p.numel() for p in model.parameters())
    assert spec.coverage(model.state_dict()) == pytest.approx(covered / everything)


def hidden(self: Any, x: Tensor) -> Tensor:
    return self.e(torch.relu(self.d(x)))
