"""Sums over clients' own samples: what they are, who may send them, and what comes of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import nafi
from nafi.errors import InputError
from nafi.federated import (
    Acceptance,
    Architecture,
    Noise,
    Request,
    Samples,
    Strategy,
    Task,
    Trainer,
    Training,
    Update,
    UpdateError,
    in_batches,
    make_strategy,
    simulate,
)
from nafi.federated.architecture import load_tensors
from nafi.federated.checkpoint import read_state, write_state
from nafi.federated.refit import RefitState
from nafi.federated.statistics import expected_sums, read_head, read_layer, sums_of
from nafi.fusion import (
    RIDGES,
    LayerStatistics,
    Targets,
    bounded_sums,
    empty_head,
    layer_statistics,
    pooled_deviation,
    pooled_fit,
    ridge_errors,
    solve_head,
)
from nafi.fusion.held_out import held_out
from nafi.fusion.statistics import are_sums
from nafi.graph import named_tensors, permute, random_permutations
from tests.federated.networks import CLASSES, FEATURES, normed, pictures, population, small
from tests.fusion.test_rotation import gap, original, turned_copy
from tests.graph.zoo import named

pytestmark = pytest.mark.filterwarnings("ignore::nafi.fusion.FusionWarning")
CLIENTS = list(population())
RULES = Acceptance(classes=CLASSES)
TRAINING = Training(epochs=2, batch=8, rate=0.05, momentum=0.9)


def made(name: str, architecture: Architecture | None = None, **options: Any) -> Strategy:
    rounds = options.pop("rounds", 1)
    return make_strategy(name, architecture or small(), TRAINING, rounds=rounds, **options)


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(samples: Samples) -> Iterable[tuple[Tensor]]:
    return [(samples.inputs[:7],), (samples.inputs[7:],)]


# ------------------------------------------------------------------------------------ the sums


def test_sums_of_a_layer_are_those_over_all_its_inputs() -> None:
    model, _ = small().network(small().form)
    samples = population()["0"]
    sums = layer_statistics(model, inputs(samples), ["two.weight"])["two.weight"].whole
    with torch.no_grad():
        h = model.one(samples.inputs).relu().double()  # type: ignore[operator, union-attr]
    torch.testing.assert_close(sums.gram[0], h.T @ h, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.sums[0], h.sum(dim=0), rtol=1e-5, atol=1e-6)
    assert float(sums.count) == len(samples)
    assert sums.cross.shape == (1, 5, 0)


def test_later_batches_run_up_to_the_last_layer_that_is_summed() -> None:
    """The first batch of a form runs to its end: it tells how often the layers run."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    ends: list[int] = []
    model[2].register_forward_hook(lambda *_: ends.append(1))
    batches = [(torch.randn(n, 3, generator=drawn(n)),) for n in (5, 5, 2)]
    one_by_one = [layer_statistics(model, [b], ["1.weight"])["1.weight"].whole for b in batches]
    assert len(ends) == 3
    together = layer_statistics(model, batches, ["1.weight"])["1.weight"].whole
    assert len(ends) == 3 + 2  # the first of five inputs, and the one of two
    torch.testing.assert_close(together.gram, sum(part.gram for part in one_by_one))
    assert float(together.count) == 12


def test_texts_of_other_lengths_are_summed_to_their_ends() -> None:
    """A recurrent layer runs once for each step, so batches of another form run to their end."""

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.RNNCell(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = x.new_zeros(len(x), 3)
            for step in x.unbind(1):
                state = self.cell(step, state)
            return state

    batches = [(torch.randn(4, steps, 2, generator=drawn(steps)),) for steps in (2, 2, 5, 2, 5)]
    sums = layer_statistics(Reader(), batches, ["cell.weight_hh"])["cell.weight_hh"].whole
    assert float(sums.count) == 4 * (2 + 2 + 5 + 2 + 5)


class UntilPadding(nn.Module):
    """Reads as far as the longest text of a batch; zeros pad."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(11, 4), nn.GRUCell(4, 6)

    def forward(self, texts: Tensor) -> Tensor:
        state = self.embed.weight.new_zeros(len(texts), 6)
        for step in range(int((texts != 0).sum(1).max())):
            state = self.cell(self.embed(texts[:, step]), state)
        return state


@pytest.mark.parametrize("first", [1, 3])
def test_texts_whose_values_tell_their_length_are_summed_to_their_ends(first: int) -> None:
    short = torch.randint(1, 11, (8, 7), generator=drawn())
    short[:, first:] = 0
    long = torch.randint(1, 11, (8, 7), generator=drawn())
    for batches in ([short, long, long], [long, short, long]):
        weights = ["cell.weight_ih", "cell.weight_hh"]
        sums = layer_statistics(UntilPadding(), [(texts,) for texts in batches], weights)
        assert [float(sums[w].whole.count) for w in weights] == [8 * (first + 7 + 7)] * 2


def test_compiled_parts_run_to_their_ends() -> None:
    part = torch.jit.script(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4)))
    model = nn.Sequential(part, nn.Linear(4, 2))
    batches = [(torch.randn(5, 3, generator=drawn()),) for _ in range(3)]
    assert float(layer_statistics(model, batches, ["0.0.weight"])["0.0.weight"].whole.count) == 15


def test_a_convolution_reads_patches() -> None:
    conv = nn.Sequential(nn.Conv2d(2, 3, 3, padding=1))
    images = torch.randn(5, 2, 4, 4, generator=drawn())
    sums = layer_statistics(conv, [(images,)], ["0.weight"])["0.weight"].whole
    patches = nn.functional.unfold(images, 3, padding=1).movedim(1, 2).flatten(0, 1).double()
    torch.testing.assert_close(sums.gram[0], patches.T @ patches, rtol=1e-5, atol=1e-4)
    assert float(sums.count) == 5 * 16


def test_what_a_layer_lacks_is_counted_for_its_owners_outputs_alone() -> None:
    architecture = small()
    (fused, spec), (own, _) = (architecture.network(architecture.form) for _ in range(2))
    for model, seed in ((fused, 1), (own, 2)):
        load_tensors(model, architecture.drawn(architecture.form, seed))
    samples = population()["1"]
    owned = torch.tensor([[1, 0, 1, 1]], dtype=torch.uint8)
    targets = Targets(own, spec, {"two.weight": owned})
    sums = layer_statistics(fused, inputs(samples), ["two.weight"], targets)["two.weight"].whole
    with torch.no_grad():
        read = fused.one(samples.inputs).relu()  # type: ignore[operator, union-attr]
        wanted = own.two(own.one(samples.inputs).relu())  # type: ignore[operator, union-attr]
        lacking = (wanted - fused.two(read)) * owned  # type: ignore[operator]
    torch.testing.assert_close(
        sums.cross[0], read.double().T @ lacking.double(), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(sums.totals[0], lacking.double().sum(dim=0), rtol=1e-4, atol=1e-5)
    assert bool((sums.cross[0, :, 1] == 0).all())


@pytest.mark.parametrize("with_bias", [True, False])
def test_a_pooled_fit_is_least_squares_over_the_samples_of_the_owners(with_bias: bool) -> None:
    """Against numpy, on the rows of the owners of each output stacked."""
    rng = np.random.default_rng(0)
    rows = [rng.normal(size=(n, 4)) for n in (9, 12, 7)]
    wanted = [rng.normal(size=(n, 3)) for n in (9, 12, 7)]
    owned = np.array([[1, 0, 1], [1, 1, 0], [0, 1, 0]], dtype=bool)
    parts = [
        LayerStatistics.of(torch.from_numpy(h)[None], torch.from_numpy(z)[None])
        for h, z in zip(rows, wanted, strict=True)
    ]
    change, shifts = pooled_fit(
        parts, torch.from_numpy(owned)[:, None], ridge=1e-12, with_bias=with_bias
    )
    for output in range(3):
        have = [s for s in range(3) if owned[s, output]]
        h = np.concatenate([rows[s] for s in have])
        h = np.column_stack([h, np.ones(len(h))]) if with_bias else h
        z = np.concatenate([wanted[s][:, output] for s in have])
        expected = np.linalg.lstsq(h, z, rcond=None)[0]
        np.testing.assert_allclose(change[0, :, output], expected[:4], rtol=1e-6, atol=1e-8)
        np.testing.assert_allclose(shifts[0, output], expected[4] if with_bias else 0, atol=1e-8)


def test_a_pooled_fit_varies_as_what_its_owners_compute() -> None:
    """Against the samples of the owners of each output: their means, and their deviations."""
    rows = [2 + torch.randn(1, n, 4, generator=drawn(), dtype=torch.float64) for n in (90, 120, 70)]
    made = [torch.randn(1, h.shape[1], 3, generator=drawn(), dtype=torch.float64) for h in rows]
    made = [z + h[:, :, :3] for h, z in zip(rows, made, strict=True)]
    now = torch.randn(1, 4, 3, generator=drawn(), dtype=torch.float64)
    parts = [LayerStatistics.of(h, z - h @ now) for h, z in zip(rows, made, strict=True)]
    owned = torch.tensor([[1, 0, 1], [1, 1, 0], [0, 1, 0]], dtype=torch.bool)
    fit = pooled_fit(parts, owned[:, None], ridge=0.1, with_bias=True)
    change, shifts = pooled_deviation(parts, owned[:, None], now, *fit)
    for output in range(3):
        have = [s for s in range(3) if owned[s, output]]
        h, z = (torch.cat([each[s][0] for s in have]) for each in (rows, made))
        least = h @ (now + fit[0])[0, :, output]
        found = h @ (now + change)[0, :, output] + shifts[0, output]
        assert float(least.std()) < 0.95 * float(z[:, output].std())
        torch.testing.assert_close(found.std(), z[:, output].std())
        torch.testing.assert_close(found.mean(), z[:, output].mean())


def test_an_output_that_nobody_owns_stays() -> None:
    part = LayerStatistics.of(torch.randn(1, 9, 2, generator=drawn()), torch.ones(1, 9, 2))
    owned = torch.tensor([[[True, False]]])
    change, shifts = pooled_fit([part], owned, ridge=0.01, with_bias=True)
    assert float(shifts[0, 0]) == pytest.approx(1.0)
    assert bool((change[0, :, 1] == 0).all())
    assert float(shifts[0, 1]) == 0


def test_batches_of_any_size_hold_the_same_inputs_out() -> None:
    """Also where a layer has the steps of a sequence before the inputs, as in attention."""
    torch.manual_seed(0)
    own, fused = (nn.TransformerEncoderLayer(4, 2, 8, batch_first=True) for _ in range(2))
    rows = torch.randn(26, 5, 4, generator=drawn())
    spec = nafi.groups(own.eval(), (rows[:2],))
    weights = ["self_attn.in_proj_weight", "linear2.weight"]
    owned = {"self_attn.in_proj_weight": torch.ones(1, 12), "linear2.weight": torch.ones(1, 4)}
    one, other = (
        layer_statistics(
            fused, [(part,) for part in rows.split(size)], weights, Targets(own, spec, owned)
        )
        for size in (26, 8)
    )
    for name in weights:
        assert float(one[name].held_out.count) == 5 * int(held_out(torch.arange(26)).sum())
        for part in ("rest", "held_out"):
            for sums in ("gram", "cross"):
                found = [getattr(getattr(each[name], part), sums) for each in (one, other)]
                torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    chosen = rows[held_out(torch.arange(26))].flatten(0, 1).double()
    read = one["self_attn.in_proj_weight"].held_out
    torch.testing.assert_close(read.gram[0], chosen.T @ chosen, rtol=1e-5, atol=1e-5)


def test_a_client_with_one_sample_has_no_say_about_ridges() -> None:
    sums = layer_statistics(nn.Sequential(nn.Linear(3, 2)), [(torch.ones(1, 3),)], ["0.weight"])
    parts = sums["0.weight"]
    assert float(parts.held_out.count) == 0
    assert not ridge_errors(parts.rest, parts.held_out, with_bias=True).any()


def test_nobody_can_tell_a_ridge_without_something_to_fit_and_something_to_judge_by() -> None:
    some = LayerStatistics.of(torch.randn(1, 9, 3, generator=drawn()), torch.ones(1, 9, 2))
    none = LayerStatistics.zeros(1, 3, 2)
    for with_bias in (False, True):
        assert ridge_errors(some, some, with_bias=with_bias).isfinite().all()
        for fitted, judge in ((some, none), (none, some), (none, none)):
            found = ridge_errors(fitted, judge, with_bias=with_bias)
            assert torch.equal(found, torch.zeros(len(RIDGES), dtype=torch.float64))


def test_sums_of_samples_are_symmetric() -> None:
    rows = torch.randn(20, 3, generator=drawn()).double()
    reads, writes = rows[:, :2], rows[:, 2:]
    gram, cross, outer = reads.T @ reads, reads.T @ writes, writes.T @ writes
    assert are_sums(gram, cross, outer)
    gram[0, 1] += 0.01 * gram.diagonal().mean()
    assert not are_sums(gram, cross, outer)


def test_errors_of_ridges_tell_what_can_be_foretold() -> None:
    truth = torch.randn(1, 6, 4, generator=drawn(1))
    h = [torch.randn(1, 200, 6, generator=drawn(k)) for k in range(2)]
    noise = [torch.randn(1, 200, 4, generator=drawn(9 + k)) for k in range(2)]
    told = [LayerStatistics.of(x, x @ truth) for x in h]
    random = [LayerStatistics.of(x, z) for x, z in zip(h, noise, strict=True)]
    assert RIDGES[int(ridge_errors(*told, with_bias=True).argmin())] < 0.001
    assert RIDGES[int(ridge_errors(*random, with_bias=True).argmin())] >= 1


# ------------------------------------------------------------------------------- on the wire


@pytest.mark.parametrize(
    ("precision", "error"), [("float64", 0), ("float32", 1e-6), ("float16", 1e-3)]
)
def test_messages_hold_sums_in_the_precision_that_was_asked_for(
    precision: Any, error: float
) -> None:
    architecture = small()
    model, _ = architecture.network(architecture.form)
    samples = population()["0"]
    request = Request(head=True, inputs=("two.weight",), precision=precision)
    message = sums_of(model, samples, request)
    expected = expected_sums(model, architecture.example_inputs, request)
    assert {n: (tuple(t.shape), t.dtype) for n, t in message.items()} == {
        n: (e.shape, e.dtype) for n, e in expected.items()
    }
    batches = [(part,) for part, _ in in_batches(samples)]
    exact = layer_statistics(model, batches, ["two.weight"])["two.weight"].whole
    read = read_layer(message, "two.weight", request)
    size = exact.gram.diagonal(dim1=1, dim2=2).max()
    # The upper half is sent; a product in float32 need not be symmetric to the last bit.
    assert float((read.gram - exact.gram).triu().abs().max() / size) <= error + 1e-12
    assert torch.equal(read.gram, read.gram.mT)
    head = read_head(message, request, empty_head(model, (samples.inputs,)))
    whole = nafi.statistics(model, [(samples.inputs, samples.labels)])
    assert float((head.gram - whole.gram).abs().max() / whole.gram.max()) <= error + 1e-9
    assert float((head.cross - whole.cross).abs().max() / whole.cross.abs().max()) <= error + 1e-6


def masked(messages: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Each pair of clients adds and subtracts the same random numbers."""
    generator = drawn(5)
    hidden = [{n: t.clone() for n, t in message.items()} for message in messages]
    for one in range(len(hidden)):
        for other in range(one):
            for name, tensor in hidden[one].items():
                mask = 100 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor += mask
                hidden[other][name] -= mask
    return hidden


def added(messages: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(m[name] for m in messages) for name in messages[0]}  # type: ignore[misc]


def test_masked_sums_give_the_same_head_and_the_same_layer() -> None:
    """What secure aggregation relies on: masks that cancel, added to sums in double precision."""
    architecture = small()
    model, spec = architecture.network(architecture.form)
    own = [
        architecture.filled(architecture.form, architecture.drawn(architecture.form, s))
        for s in range(3)
    ]
    request = Request(head=True, inputs=("two.weight",), outputs=True, precision="float64")
    everyone = {"two.weight": torch.ones(1, 4, dtype=torch.uint8)}
    messages = [
        sums_of(model, samples, request, Targets(network, spec, everyone))
        for samples, network in zip(population().values(), own, strict=True)
    ]
    hidden = masked(messages)
    assert float((hidden[0]["sums/head/gram"] - messages[0]["sums/head/gram"]).abs().max()) > 10
    empty = empty_head(model, (population()["0"].inputs,))
    solved, fits = [], []
    for sent in (messages, hidden):
        total = added(sent)
        solved.append(named_tensors(solve_head(model, [read_head(total, request, empty)])))
        whole = read_layer(total, "two.weight", request)
        owned = torch.ones(1, 1, 4, dtype=torch.bool)
        fits.append(pooled_fit([whole], owned, ridge=0.01, with_bias=True)[0])
    torch.testing.assert_close(
        solved[0]["out.weight"], solved[1]["out.weight"], rtol=1e-5, atol=1e-6
    )
    torch.testing.assert_close(fits[0], fits[1], rtol=1e-6, atol=1e-8)


# ------------------------------------------------------------------------------ the last layer


@pytest.mark.parametrize("name", ["fedavg", "match-then-average", "layerwise", "fedadam"])
def test_a_head_from_statistics_is_the_one_that_nafi_solves(name: str) -> None:
    plain, solved = (made(name, rounds=3, head=h) for h in ("trained", "statistics"))
    one, two = (
        simulate(s, CLIENTS, Trainer(s.architecture, population(), CLASSES))
        for s in (plain, solved)
    )
    parts = [nafi.statistics(one.model, [(d.inputs, d.labels)]) for d in population().values()]
    expected = nafi.solve_head(one.model, parts).state_dict()
    assert set(two.state.head) == {"out.weight", "out.bias"}
    for key, tensor in two.model.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-3, atol=1e-4)
    last, before = two.records[-1], one.records[-1]
    assert last["messages"] == 2
    assert last["bytes_up"] > before["bytes_up"]


def test_clients_leave_a_frozen_head_as_it_is() -> None:
    strategy = made("fedavg", rounds=3, head="statistics", head_start="frozen")
    work = Trainer(strategy.architecture, population(), CLASSES)
    state = simulate(replace(strategy, rounds=1), CLIENTS, work).state
    task = strategy.next_task(state, "0")
    assert task.frozen == {"out.weight", "out.bias"}
    for name in task.frozen:
        torch.testing.assert_close(task.tensors[name], state.head[name], rtol=0, atol=0)
    update, _ = work("0", task)
    assert set(update.tensors) == set(task.tensors) - task.frozen
    after = strategy.advance(state, [update])
    assert after.awaiting == "head"
    torch.testing.assert_close(after.tensors["out.weight"], state.head["out.weight"])


def test_a_solved_head_is_for_the_model_and_training_goes_on_from_the_trained_one() -> None:
    plain, solved = (made("fedavg", rounds=2, head=h) for h in ("trained", "statistics"))
    one, two = (
        simulate(s, CLIENTS, Trainer(s.architecture, population(), CLASSES))
        for s in (plain, solved)
    )
    for name, tensor in one.state.tensors.items():
        torch.testing.assert_close(two.state.tensors[name], tensor, rtol=0, atol=0)
    assert not torch.equal(two.model.state_dict()["out.weight"], one.state.tensors["out.weight"])


def test_a_start_from_a_head_that_is_not_solved_is_refused() -> None:
    with pytest.raises(InputError, match="head_start: no head is solved; give head='statistics'"):
        made("fedavg", head_start="frozen")
    with pytest.raises(InputError, match="head: found 'best', expected one of trained, statistics"):
        made("fedavg", head="best")


# ---------------------------------------------------------------------------------- layer-wise


def layerwise_exchange(**options: Any) -> tuple[Strategy, Any, list[Update], Trainer]:
    strategy = made("layerwise", rounds=3, moments=True, **options)
    work = Trainer(strategy.architecture, population(), CLASSES)
    state = strategy.start()
    updates = [work(client, strategy.next_task(state, client))[0] for client in CLIENTS]
    return strategy, state, updates, work


def test_moments_are_asked_for_where_layers_read_what_is_settled() -> None:
    strategy, state, updates, work = layerwise_exchange()
    assert strategy.next_task(state, "0").sums.inputs == ("one.weight",)
    state = strategy.advance(state, updates)
    assert strategy.next_task(state, "0").sums.inputs == ("two.weight",)
    updates = [work(client, strategy.next_task(state, client))[0] for client in CLIENTS]
    state = strategy.advance(state, updates)
    assert not strategy.next_task(state, "0").sums


def test_a_merged_layer_is_the_posterior_mean_by_clients_moments() -> None:
    """Every client has all neurons, so that the closed form is one system for all of them."""
    strategy, state, updates, _ = layerwise_exchange(penalty=1e9, ridge=0.02)
    after = strategy.advance(state, updates)
    plain = replace(strategy, moments=False).advance(state, updates)
    request = strategy.next_task(state, "0").sums
    width = after.form.widths[next(iter(after.form.widths))]
    assert width == 5
    systems, wanted = [], []
    for update in updates:
        sums = read_layer(update.extras, "one.weight", request)
        mean = sums.scaled(1 / float(sums.count))
        h = torch.cat([mean.sums[0], mean.count])
        system = torch.zeros(FEATURES + 1, FEATURES + 1, dtype=torch.float64)
        system[:-1, :-1], system[-1], system[:, -1] = mean.gram[0], h, h
        places = _places(strategy, state, updates, update)
        own = torch.cat([update.tensors["one.weight"], update.tensors["one.bias"][:, None]], dim=1)
        lifted = torch.empty_like(own)
        lifted[places] = own
        systems.append(system)
        wanted.append(system @ lifted.double().T)
    prior = torch.cat([plain.tensors["one.weight"], plain.tensors["one.bias"][:, None]], dim=1)
    total = sum(systems)
    assert isinstance(total, Tensor)
    ridge = torch.diag(torch.tensor([1.0] * FEATURES + [0.0], dtype=torch.float64))
    ridge = 0.02 * total.diagonal()[:-1].mean() * ridge
    expected = torch.linalg.solve(total + ridge, sum(wanted) + ridge @ prior.double().T).T
    torch.testing.assert_close(
        after.tensors["one.weight"].double(), expected[:, :-1], rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(
        after.tensors["one.bias"].double(), expected[:, -1], rtol=1e-3, atol=1e-4
    )


def _places(strategy: Strategy, state: Any, updates: list[Update], update: Update) -> Tensor:
    """Where a client's first neurons went: its outgoing weights follow them."""
    after = replace(strategy, moments=False).advance(state, updates)  # type: ignore[type-var]
    moved = after.members[update.client].tensors["two.weight"]
    own = update.tensors["two.weight"]
    return (own.T[:, None] - moved.T[None]).abs().sum(dim=2).argmin(dim=1)


def test_clients_that_are_the_same_keep_their_layer() -> None:
    strategy, state, updates, _ = layerwise_exchange()
    same = [replace(updates[0], client=u.client, extras=u.extras) for u in updates]
    after = strategy.advance(state, same)
    plain = replace(strategy, moments=False).advance(state, same)
    for name in ("one.weight", "one.bias"):
        torch.testing.assert_close(after.tensors[name], plain.tensors[name], rtol=1e-4, atol=1e-5)


def test_a_client_that_sent_no_moments_counts_with_the_mean_of_the_others() -> None:
    strategy, state, updates, work = layerwise_exchange()
    state = strategy.advance(state, updates)
    tasks = {client: strategy.next_task(state, client) for client in CLIENTS}
    some = [work(client, tasks[client])[0] for client in CLIENTS[:2]]
    after = strategy.advance(state, some)
    assert set(after.members) == set(CLIENTS)
    assert all(bool(t.isfinite().all()) for t in after.tensors.values())


def test_moments_need_frozen_layers_and_no_trimming() -> None:
    with pytest.raises(InputError, match="moments: they need settled layers that stay"):
        made("layerwise", moments=True, freeze=False)
    with pytest.raises(InputError, match="moments: they would fit outliers that trim leaves out"):
        made("layerwise", moments=True, trim=0.2)


# ---------------------------------------------------------------------------------- match-refit


def matched_state(strategy: Strategy, models: list[nn.Module], data: dict[str, Samples]) -> Any:
    """After the first message, in which clients with these models send them."""
    names = strategy.architecture.spec.axes
    updates: Iterable[Update] = [
        Update(client, 0, {n: named_tensors(model)[n].detach() for n in names}, len(data[client]))
        for client, model in zip(data, models, strict=True)
    ]
    return strategy.advance(strategy.start(), updates)


def layers_refitted(strategy: Strategy, state: Any, data: dict[str, Samples]) -> Any:
    """After all messages that are left of a round."""
    work = Trainer(strategy.architecture, data, CLASSES)
    while state.awaiting:
        state = strategy.advance(state, [work(c, strategy.next_task(state, c))[0] for c in data])
    return state


def refit_state(strategy: Strategy, models: list[nn.Module], data: dict[str, Samples]) -> Any:
    """After all messages of the first round, of clients with these models."""
    return layers_refitted(strategy, matched_state(strategy, models, data), data)


@pytest.mark.parametrize("pool", ["all", "owners"])
@pytest.mark.parametrize("kind", ["small", "normed"])
def test_permuted_copies_are_refitted_to_themselves(kind: str, pool: str) -> None:
    architecture, data = small(), population()
    if kind == "normed":
        architecture, data = normed(), {str(s): pictures(20, s) for s in range(3)}
    model = architecture.filled(architecture.form, architecture.drawn(architecture.form, 3)).eval()
    if kind == "normed":
        _disturb(model)
    spec = replace(architecture.spec)
    copies = [
        permute(model, spec, random_permutations(spec, drawn(seed))) for seed in range(len(data))
    ]
    strategy = made("match-refit", architecture, pool=pool)
    state = refit_state(strategy, copies, dict(data))
    x = next(iter(data.values())).inputs
    with torch.no_grad():
        expected, found = model(x), strategy.global_model(state)(x)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def network(model: nn.Module, examples: tuple[Tensor, ...]) -> Architecture:
    return Architecture(lambda: deepcopy(model), examples)


def drawn_apart(name: str, clients: int = 3) -> tuple[list[nn.Module], Any]:
    """Networks of the zoo with weights of their own, and example inputs."""
    models = []
    for seed in range(clients):
        torch.manual_seed(seed)
        models.append(named(name).build().eval())
    return models, original(name)[1]


def sequences(examples: tuple[Tensor, ...], clients: int = 3) -> dict[str, Samples]:
    """Clients with noise like these examples."""
    shape = (20, *examples[0].shape[1:])
    labels = torch.zeros(20, dtype=torch.int64)
    return {str(s): Samples(torch.randn(shape, generator=drawn(s)), labels) for s in range(clients)}


@pytest.mark.parametrize("pool", ["all", "owners"])
@pytest.mark.parametrize("name", ["encoder_pre_norm", "self_attention"])
def test_copies_in_other_bases_are_refitted_to_themselves(name: str, pool: str) -> None:
    """What layers are to write means the same for all once every client's own bases are turned."""
    model, examples = original(name)
    data = sequences(examples)
    copies = [turned_copy(model, examples, seed) for seed in range(len(data))]
    strategy = made("match-refit", network(model, examples), pool=pool, max_width=1.0)
    found = strategy.global_model(refit_state(strategy, copies, data))
    assert gap(model, found, (data["0"].inputs,)) < 1e-4


@pytest.mark.parametrize("name", ["encoder_pre_norm", "einsum"])
def test_a_client_s_own_network_stays_its_function_while_layers_are_refitted(name: str) -> None:
    """Where its neurons went and in bases that were turned; in einsum, heads are kept apart."""
    models, examples = drawn_apart(name)
    data = sequences(examples)
    strategy = made("match-refit", network(models[0], examples), penalty=0.0, evidence=1e9)
    state = matched_state(strategy, models, data)
    widths = strategy.architecture.spec.widths
    assert set(state.members["0"].places) == set(widths)
    if name == "einsum":
        assert state.form.widths["q"] == 3 * widths["q"]
    for own, member in zip(models, state.members.values(), strict=True):
        kept = strategy.architecture.filled(state.form, member.tensors).eval()
        assert gap(own, kept, examples) < 1e-5


def test_a_state_with_turned_bases_goes_on_from_a_file(tmp_path: Path) -> None:
    models, examples = drawn_apart("self_attention")
    data = sequences(examples)
    strategy = made("match-refit", network(models[0], examples), max_width=1.0)
    state = matched_state(strategy, models, data)
    write_state(tmp_path / "run.safetensors", state, [])
    again, _, _ = read_state(tmp_path / "run.safetensors", RefitState)
    strategy.check_state(again)
    one, two = (layers_refitted(strategy, each, data).tensors for each in (state, again))
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)


def _disturb(model: nn.Module) -> None:
    """Statistics of a normalisation that has seen something."""
    generator = drawn(8)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_(generator=generator)
            module.running_var.uniform_(0.5, 2.0, generator=generator)


def test_layers_are_refitted_in_the_order_in_which_they_run() -> None:
    strategy = made("match-refit", max_width=1.5)
    data = population()
    work = Trainer(strategy.architecture, data, CLASSES)
    state = strategy.start()
    seen = []
    while not strategy.finished(state):
        seen.append(state.awaiting)
        tasks = {client: strategy.next_task(state, client) for client in data}
        if state.awaiting:
            later = {"layer one.weight": 2, "layer two.weight": 1}.get(state.awaiting, 0)
            assert len(tasks["0"].tensors) == 6 - 2 * later
            assert tasks["0"].frozen == set(strategy.architecture.spec.axes)
        state = strategy.advance(state, [work(c, task)[0] for c, task in tasks.items()])
    assert seen == ["", "layer one.weight", "layer two.weight", "layer out.weight"]
    assert isinstance(state, RefitState)
    assert not state.members


class Reader(nn.Module):
    """Reads the features one by one, and looks at the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.LSTM(1, 5, batch_first=True)
        self.out = nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.body(x[:, :, None])[0][:, -1])
        return found


def test_a_recurrence_takes_three_messages_as_each_fit_changes_what_it_reads() -> None:
    architecture = Architecture(Reader, (torch.zeros(2, FEATURES),))
    strategy, data = made("match-refit", architecture, max_width=1.0), population()
    work = Trainer(architecture, data, CLASSES)
    state, seen = strategy.start(), []
    while not strategy.finished(state):
        seen.append(state.awaiting.removeprefix("layer "))
        tasks = {client: strategy.next_task(state, client) for client in data}
        state = strategy.advance(state, [work(c, task)[0] for c, task in tasks.items()])
    assert seen == ["", "body.weight_ih_l0", *["body.weight_hh_l0"] * 3, "out.weight"]


def test_a_refit_brings_outputs_closer_to_those_of_the_clients() -> None:
    """On the samples that were summed, least squares cannot be worse than what was merged."""
    data = population()
    sums = []
    for name, options in (("match-then-average", {}), ("match-refit", {"ridge": 1e-6})):
        strategy = made(name, max_width=1.0, **options)
        work = Trainer(strategy.architecture, data, CLASSES)
        run = simulate(strategy, CLIENTS, work)
        error = 0.0
        for client in CLIENTS:
            update, _ = work(client, strategy.next_task(strategy.start(), client))
            own = strategy.architecture.filled(strategy.architecture.form, update.tensors)
            x = data[client].inputs
            with torch.no_grad():
                error += float((own(x) - run.model(x)).square().sum())
        sums.append(error)
    assert sums[1] < sums[0]


def test_layers_that_train_on_are_fitted_with_a_larger_ridge() -> None:
    """Clients would choose a small one: there are few weights for their samples."""
    data = population()

    def fitted(rounds: int, **options: Any) -> nn.Module:
        strategy = made("match-refit", rounds=rounds, max_width=1.5, **options)
        network = strategy.architecture
        models = [
            network.filled(network.form, network.drawn(network.form, s)).eval()
            for s in range(len(data))
        ]
        return strategy.global_model(refit_state(strategy, models, data))

    x = torch.cat([samples.inputs for samples in data.values()])
    with torch.no_grad():
        alone, on, set_to, small_one = (
            model(x)
            for model in (fitted(1), fitted(2), fitted(1, ridge=0.3), fitted(2, ridge=1e-6))
        )
    assert torch.equal(on, set_to)
    assert not torch.allclose(alone, on, rtol=1e-2)
    assert not torch.allclose(small_one, on, rtol=1e-2)  # what the user sets is kept


def test_a_run_killed_between_two_layers_ends_with_the_same_bytes(tmp_path: Path) -> None:
    whole, halves = tmp_path / "whole.safetensors", tmp_path / "halves.safetensors"

    class StopError(Exception):
        pass

    def stop(step: str, done: int, total: int) -> None:
        if step.startswith("round 1 of 2, layer two.weight, client 1"):
            raise StopError

    strategy = made("match-refit", rounds=2, head="statistics")
    work = Trainer(strategy.architecture, population(), CLASSES)
    run = simulate(strategy, CLIENTS, work, checkpoint=whole)
    with pytest.raises(StopError):
        simulate(strategy, CLIENTS, work, checkpoint=halves, progress=stop)
    again = simulate(
        made("match-refit", rounds=2, head="statistics"),
        CLIENTS,
        work,
        checkpoint=halves,
        resume=True,
    )
    one, two = load_file(whole), load_file(halves)
    assert set(one) == set(two)
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert [r["messages"] for r in again.records] == [r["messages"] for r in run.records] == [5, 2]
    assert [r["bytes_up"] for r in again.records] == [r["bytes_up"] for r in run.records]


def test_clients_that_were_not_fused_are_not_asked_for_layers() -> None:
    strategy = made("match-refit")
    work = Trainer(strategy.architecture, population(), CLASSES)
    state = strategy.start()
    state = strategy.advance(state, [work(c, strategy.next_task(state, c))[0] for c in CLIENTS[:2]])
    assert strategy.select(state, CLIENTS) == CLIENTS[:2]


# ------------------------------------------------------------------------------ what is refused


def lying(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> tuple[Task, Update]:
    strategy = made("fedavg", head="statistics")
    work = Trainer(strategy.architecture, population(), CLASSES)
    state = strategy.start()
    state = strategy.advance(state, [work(c, strategy.next_task(state, c))[0] for c in CLIENTS])
    task = strategy.next_task(state, "0")
    update, _ = work("0", task)
    return task, replace(update, extras=change(dict(update.extras)))


def with_entry(name: str, value: Callable[[Tensor], Tensor]) -> Any:
    return lambda extras: {**extras, name: value(extras[name].clone())}


def indefinite(gram: Tensor) -> Tensor:
    gram[0] = -gram[0]
    return gram


BAD: dict[str, tuple[Any, str]] = {
    "not a number": (
        with_entry("sums/head/gram", lambda g: g * float("nan")),
        "extra sums/head/gram holds values that are NaN or infinite",
    ),
    "indefinite": (
        with_entry("sums/head/gram", indefinite),
        "the sums for head are not those of any samples",
    ),
    "too large for its means": (
        with_entry("sums/head/cross", lambda c: 1000 * c),
        "the sums for head are not those of any samples",
    ),
    "half a sample": (
        with_entry("sums/head/class_counts", lambda c: c + 0.5),
        "counts or losses of the sums at the last layer are not such",
    ),
    "another layer": (
        lambda extras: {n.replace("head", "two.weight"): t for n, t in extras.items()},
        r"it lacks .*sums/head.* among its extras",
    ),
    "another size": (
        with_entry("sums/head/gram", lambda g: g[1:]),
        r"extra sums/head/gram: found shape \(9,\)",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_sums_is_refused(name: str) -> None:
    change, reason = BAD[name]
    task, update = lying(change)
    shapes = small().shapes(task.form)
    with pytest.raises(UpdateError, match=reason):
        RULES.check(update, "0", task, shapes)


def test_a_round_names_the_client_whose_sums_are_refused() -> None:
    strategy = made("fedavg", head="statistics")
    honest = Trainer(strategy.architecture, population(), CLASSES)

    def work(client: str, task: Task) -> tuple[Update, float]:
        update, loss = honest(client, task)
        if client == "1" and task.sums:
            bad = {n: -t if n.endswith("gram") else t for n, t in update.extras.items()}
            update = replace(update, extras=bad)
        return update, loss

    run = simulate(strategy, CLIENTS, work, acceptance=Acceptance(quorum=2, classes=CLASSES))
    assert list(run.records[0]["refused"]) == ["1"]
    assert "not those of any samples" in run.records[0]["refused"]["1"]


def test_the_screen_bounds_sums_of_the_wrong_scale() -> None:
    """A client that says its inputs are a thousand times as large decides nothing alone."""
    truth, lie = torch.ones(1, 3, 1), -torch.ones(1, 3, 1)
    inputs = [torch.randn(1, 50, 3, generator=drawn(k)) for k in range(5)]
    honest = [LayerStatistics.of(h, h @ truth) for h in inputs[:4]]
    liar = LayerStatistics.of(1000 * inputs[4], 1000 * inputs[4] @ lie)
    owned = torch.ones(5, 1, 1, dtype=torch.bool)
    plain, _ = pooled_fit([*honest, liar], owned, ridge=1e-6, with_bias=False)
    held, _ = pooled_fit(bounded_sums([*honest, liar], 2.0), owned, ridge=1e-6, with_bias=False)
    assert float(plain.mean()) < -0.9
    assert float(held.mean()) > 0.1
    for before, after in zip(honest, bounded_sums([*honest, liar], 2.0), strict=False):
        torch.testing.assert_close(after.gram, before.gram, rtol=0, atol=0)


def test_a_client_may_refuse_to_send_sums_and_noise_is_not_mixed_with_them() -> None:
    strategy = made("fedavg", head="statistics")
    silent = Trainer(strategy.architecture, population(), CLASSES, statistics=False)
    noisy = Trainer(strategy.architecture, population(), CLASSES, noise=Noise(1.0, 0.1, seed=0))
    state = replace(strategy.start(), awaiting="head")
    task = strategy.next_task(state, "0")
    with pytest.raises(InputError, match="asks for sums over samples, which this client refuses"):
        silent("0", task)
    with pytest.raises(InputError, match="sums over samples would leave without noise"):
        noisy("0", task)


def test_sums_of_few_samples_are_warned_of_at_the_client() -> None:
    strategy = made("fedavg", head="statistics")
    few = {"0": population()["0"][slice(4)]}
    task = strategy.next_task(replace(strategy.start(), awaiting="head"), "0")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        Trainer(strategy.architecture, few, CLASSES)("0", task)
    assert any("the sums are over few samples" in str(w.message) for w in caught)
