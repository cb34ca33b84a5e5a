"""The local training loop: freezing, batches, optimisers, what is computed once."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.federated import Samples, Training, train
from nafi.federated.prefix import split
from nafi.federated.training import batches
from nafi.graph.trace import named_tensors
from tests.federated.networks import Normed, Small, blobs, pictures

PLAIN = Training(epochs=3, batch=8, rate=0.05, momentum=0.9)


def seeded(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def test_sgd_without_momentum_is_plain_gradient_descent() -> None:
    samples = blobs(16, 1)
    model = seeded(Small)
    expected = copy.deepcopy(model)
    train(model, samples, Training(epochs=4, batch=16, rate=0.1), seed=3)
    for _ in range(4):
        loss = F.cross_entropy(expected(samples.inputs), samples.labels)
        gradients = torch.autograd.grad(loss, list(expected.parameters()))
        with torch.no_grad():
            for parameter, gradient in zip(expected.parameters(), gradients, strict=True):
                parameter -= 0.1 * gradient
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_the_proximal_term_pulls_to_the_start() -> None:
    """Of a loss that is linear in the weights, `w = w0 - (g / mu) (1 - (1 - r mu)^k)`."""
    model = nn.Linear(2, 1, bias=False)
    start = model.weight.detach().clone()
    samples = Samples(torch.ones(4, 2), torch.zeros(4))
    rate, mu, steps = 0.1, 0.5, 7
    train(
        model,
        samples,
        Training(epochs=steps, batch=4, rate=rate, proximal=mu),
        seed=0,
        loss=lambda outputs, targets: outputs.mean(),
    )
    moved = (1 - (1 - rate * mu) ** steps) / mu
    torch.testing.assert_close(model.weight.detach(), start - moved, rtol=1e-5, atol=1e-6)


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, 0.02, momentum=0.5, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, 0.02, weight_decay=0.1, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, 0.02, momentum=0.5, weight_decay=0.1),
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_every_optimiser_is_that_of_torch(optimiser: str) -> None:
    samples = blobs(12, 2)
    model, expected = seeded(Small), seeded(Small)
    settings = {"epochs": 6, "batch": 12, "rate": 0.02, "momentum": 0.5, "decay": 0.1}
    train(model, samples, Training(optimiser=optimiser, **settings), seed=0)  # type: ignore[arg-type]
    steps = OPTIMISERS[optimiser](expected.parameters())
    for _ in range(6):
        steps.zero_grad()
        F.cross_entropy(expected(samples.inputs), samples.labels).backward()
        steps.step()
    for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_an_unknown_optimiser_is_named() -> None:
    with pytest.raises(InputError, match="lion"):
        train(seeded(Small), blobs(5, 0), Training(optimiser="lion"), seed=0)  # type: ignore[arg-type]


def test_frozen_tensors_are_bit_identical_statistics_included() -> None:
    model = seeded(Normed)
    train(model, pictures(20, 0), Training(epochs=1, batch=8), seed=0)  # statistics of their own
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    frozen = {name for name in before if name.startswith(("conv1", "norm1", "conv2", "norm2"))}
    train(model, pictures(20, 1), Training(epochs=2, batch=8, decay=0.1), seed=1, frozen=frozen)
    after = named_tensors(model)
    for name in frozen:
        assert torch.equal(before[name], after[name]), name
    for name in ("conv3.weight", "norm3.running_mean", "out.weight"):
        assert not torch.equal(before[name], after[name]), name
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize(("kind", "data"), [(Small, blobs), (Normed, pictures)])
def test_computing_the_frozen_part_once_changes_nothing(kind, data) -> None:  # type: ignore[no-untyped-def]
    samples = data(30, 4)
    models = [seeded(kind) for _ in range(2)]
    layers = ("one",) if kind is Small else ("conv1", "norm1", "conv2", "norm2")
    frozen = {name for name in named_tensors(models[0]) if name.startswith(layers)}
    for model, limit in zip(models, (2**30, 0), strict=True):
        train(model, samples, PLAIN, seed=5, frozen=frozen, cache_bytes=limit)
    for found, wanted in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Counting(nn.Module):
    """Counts how often its frozen layer is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Small()
        self.asked = 0
        self.body.one.register_forward_hook(lambda *_: setattr(self, "asked", self.asked + 1))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.body(x)
        return found


def test_the_frozen_part_is_asked_once_and_not_in_every_epoch() -> None:
    model = Counting()
    frozen = {"body.one.weight", "body.one.bias"}
    train(model, blobs(40, 0), Training(epochs=20, batch=8), seed=0, frozen=frozen)
    assert model.asked < 10  # a few to see that it works; there are 100 batches


class Odd(nn.Module):
    """Sizes, a random part and a path around the frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(14, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu().view(x.size(0), 2, 4).reshape(x.size(0), -1)
        found: Tensor = self.second(torch.cat([self.dropout(y), x], dim=1))
        return found


def test_what_is_random_is_not_computed_once() -> None:
    model = Odd().train()
    x = torch.randn(2, 6)
    found = split(model, {"first.weight", "first.bias"}, x)
    assert found is not None
    y, same = found.known(x, "cpu")
    assert {tuple(y.shape), tuple(same.shape)} == {(2, 8), (2, 6)}
    assert not torch.equal(found.rest(y, same), found.rest(y, same))  # dropout is in the rest
    model.eval()
    torch.testing.assert_close(found.rest(y, same), model(x))


class Branching(nn.Module):
    """What it does depends on the values that it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        found: Tensor = self.second(y if float(y.sum()) > 0 else -y)
        return found


def test_a_network_that_cannot_be_taken_apart_trains_all_the_same() -> None:
    frozen = {"first.weight", "first.bias"}
    model = Branching()
    assert split(model, frozen, torch.randn(2, 6)) is None
    before = model.first.weight.clone()
    train(model, blobs(10, 0), PLAIN, seed=0, frozen=frozen)
    assert torch.equal(before, model.first.weight)


@pytest.mark.parametrize("device", ["cuda", "abacus", "mps"])
def test_a_device_that_is_not_here_is_named(device: str) -> None:
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is here")
    if device == "mps" and torch.backends.mps.is_available():
        pytest.skip("it is here")
    with pytest.raises(InputError, match=f"device: '{device}'"):
        train(seeded(Small), blobs(5, 0), PLAIN, seed=0, device=device)


def test_batches_hold_every_sample_once_and_never_one_alone() -> None:
    for count in range(1, 40):
        for size in (1, 2, 5, 8):
            found = list(batches(count, size, np.random.default_rng(0)))
            assert sorted(torch.cat(found).tolist()) == list(range(count))
            if size > 1 and count > 1:
                assert min(len(batch) for batch in found) > 1, (count, size)


def test_small_and_one_sided_clients_train() -> None:
    model = seeded(Small)
    before = model.out.weight.clone()  # type: ignore[union-attr, operator]
    train(model, blobs(1, 0), PLAIN, seed=0)
    assert not torch.equal(before, model.out.weight)  # type: ignore[arg-type]
    linear = nn.Linear(6, 3)  # convex: from whatever start, it comes to know one class only
    train(linear, blobs(9, 0, classes=(1,)), Training(epochs=200, batch=8, rate=0.05), seed=0)
    with torch.no_grad():
        assert (linear(blobs(9, 0, classes=(1,)).inputs).argmax(dim=1) == 1).all()
    with pytest.raises(InputError, match="without samples"):
        train(model, blobs(5, 0)[slice(0)], PLAIN, seed=0)


class Dropping(nn.Module):
    """Random while it trains, with a normalisation that follows no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.dropout, self.out = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.dropout(self.norm(self.one(x).relu())))
        return found


def test_dropout_depends_on_the_seed_alone() -> None:
    found = []
    for disturbed in (1, 2):
        model = seeded(Dropping)
        torch.manual_seed(disturbed)
        before = torch.random.get_rng_state()
        train(model, blobs(20, 0), PLAIN, seed=3)
        assert torch.equal(before, torch.random.get_rng_state())
        found.append(model.out.weight.detach().clone())  # type: ignore[union-attr, operator]
    assert torch.equal(*found)


def test_statistics_of_a_frozen_normalisation_stay() -> None:
    model = seeded(Dropping)
    train(model, blobs(20, 0), PLAIN, seed=0)
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    settled = {n for n in before if n.startswith(("one", "norm"))} - {"norm.num_batches_tracked"}
    train(model, blobs(20, 1), PLAIN, seed=1, frozen=settled)
    after = named_tensors(model)
    assert all(torch.equal(before[name], after[name]) for name in settled)
    assert not torch.equal(before["out.weight"], after["out.weight"])


class Unsteady(nn.Module):
    """Frozen layers whose values change from epoch to epoch, or with the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = {
            "recurrent": nn.LSTM(6, 6, 2, dropout=0.5, batch_first=True),
            "batch": nn.BatchNorm1d(6, affine=False, track_running_stats=False),
        }[kind]
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        recurrent = isinstance(self.middle, nn.LSTM)
        x = self.middle(x[:, None])[0][:, 0] if recurrent else self.middle(x)
        found: Tensor = self.out(x)
        return found


@pytest.mark.parametrize("kind", ["recurrent", "batch"])
def test_what_changes_in_training_is_not_computed_once(kind: str) -> None:
    model = Unsteady(kind).train()
    frozen = {name for name in named_tensors(model) if not name.startswith("out")}
    assert split(model, frozen, torch.randn(2, 6)) is None
    train(model, blobs(10, 0), PLAIN, seed=0, frozen=frozen)


def test_volumes_train_too() -> None:
    """Convolutions over 3-D volumes of pictures that come without a channel."""
    model = nn.Sequential(
        nn.Unflatten(1, (1, 4)), nn.Conv3d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(512, 3)
    )
    samples = Samples(torch.randn(6, 4, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2]))
    assert train(model, samples, Training(epochs=1, batch=3), seed=0) > 0


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 0}, {"epochs": -1}, {"epochs": 1.5}, {"rate": -0.1}, {"decay": float("nan")}],
)
def test_settings_that_cannot_be_are_named(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        Training(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("frozen", [(), ("two.weight", "two.bias")])
def test_what_the_user_froze_stays_frozen(frozen: tuple[str, ...]) -> None:
    model = seeded(Small)
    model.one.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    flags = {name: p.requires_grad for name, p in model.named_parameters()}
    before = {name: tensor.clone() for name, tensor in named_tensors(model).items()}
    train(model, blobs(20, 0), PLAIN, seed=0, frozen=frozen)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == flags
    for name, tensor in named_tensors(model).items():
        assert torch.equal(tensor, before[name]) == (name in ("one.weight", *frozen)), name


def test_flags_are_put_back_after_an_error_and_where_nothing_learns() -> None:
    model = seeded(Small)

    def broken(outputs: Tensor, labels: Tensor) -> Tensor:
        raise RuntimeError("broken")

    names = list(named_tensors(model))
    with pytest.raises(RuntimeError, match="broken"):
        train(model, blobs(20, 0), PLAIN, seed=0, frozen=names[:2], loss=broken)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert np.isnan(train(model, blobs(20, 0), PLAIN, seed=0, frozen=names))
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
