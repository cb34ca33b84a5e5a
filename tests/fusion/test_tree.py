"""Groups of models matched apart, then with each other."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import nafi
from nafi.errors import InputError
from nafi.fusion.clients import check_clients
from nafi.fusion.cluster import map_on_ray
from nafi.fusion.merge import merge_tensors
from nafi.fusion.networks import prepare_networks
from nafi.graph import Positions, named_tensors
from tests.fusion.networks import MLP, gap, seeded

INPUTS = (torch.zeros(2, 7),)


def descendants(count: int, noise: float = 0.02, seed: int = 0) -> list[nn.Module]:
    """Copies of one network with neurons in other orders and a little noise."""
    torch.manual_seed(seed)
    truth = MLP(7, 9, 6, 3)
    with torch.no_grad():
        for tensor in truth.parameters():
            tensor.mul_(2)
    models = []
    for _ in range(count):
        model = MLP(7, 9, 6, 3)
        one, two = torch.randperm(9), torch.randperm(6)
        first, second, last = truth.layers
        state = {
            "layers.0.weight": first.weight[one],
            "layers.0.bias": first.bias[one],
            "layers.1.weight": second.weight[two][:, one],
            "layers.1.bias": second.bias[two],
            "layers.2.weight": last.weight[:, two],
            "layers.2.bias": last.bias,
        }
        model.load_state_dict({n: t + noise * torch.randn_like(t) for n, t in state.items()})
        models.append(model.eval())
    return models


@pytest.mark.parametrize("method", ["nafi", "pfnm"])
@pytest.mark.parametrize("size", [2, 4, 5])
def test_a_tree_finds_what_all_at_once_find(method: str, size: int) -> None:
    models = descendants(11)
    flat = nafi.fuse(models, INPUTS, method)
    tree = nafi.fuse(models, INPUTS, method, tree=size)
    assert flat.widths == tree.widths == {"layers.0": 9, "layers.1": 6}
    # Merging is exact: the same neurons meet, so the network is the same up to their order.
    assert gap(flat.model, tree.model, [torch.randn(20, 7)]) < 1e-5
    for group in tree.widths:
        np.testing.assert_array_equal(tree.owners(group), tree.matchings[group].counts)
        assert tree.matchings[group].models == 11


def test_a_tree_depends_on_no_order_of_models() -> None:
    models = [seeded(s, 7, 8, 3) for s in range(9)]
    forward = nafi.fuse(models, INPUTS, tree=3)
    back = nafi.fuse(models[::-1], INPUTS, tree=3)
    assert forward.widths == back.widths
    assert gap(forward.model, back.model, [torch.randn(20, 7)]) < 1e-5


@pytest.mark.parametrize("counts", [None, "classes", "samples"])
def test_a_tree_of_files_gives_the_bytes_of_models_in_memory(
    counts: str | None, tmp_path: Path
) -> None:
    models = descendants(9, noise=0.3)
    rng = np.random.default_rng(0)
    known = {
        None: {},
        "classes": {"class_counts": rng.integers(1, 9, size=(9, 3))},
        "samples": {"sample_counts": rng.integers(1, 9, size=9)},
    }[counts]
    for s, model in enumerate(models):
        nafi.save(model, tmp_path / f"{s}.safetensors")
    files = nafi.open_models(tmp_path / "*.safetensors", lambda: MLP(7, 9, 6, 3))
    held = nafi.fuse(models, INPUTS, tree=4, **known)
    read = nafi.fuse(files, INPUTS, tree=4, **known)
    theirs = named_tensors(read.model)
    for name, tensor in named_tensors(held.model).items():
        assert torch.equal(tensor, theirs[name])


def test_groups_larger_than_all_models_are_no_groups() -> None:
    models = [seeded(s, 7, 8, 3) for s in range(3)]
    flat, tree = nafi.fuse(models, INPUTS), nafi.fuse(models, INPUTS, tree=3)
    assert all(
        torch.equal(one, two)
        for one, two in zip(flat.model.parameters(), tree.model.parameters(), strict=True)
    )


def test_a_limit_of_width_holds_for_groups_and_for_all() -> None:
    models = [seeded(s, 7, 8, 3) for s in range(9)]
    found = nafi.fuse(models, INPUTS, tree=3, max_width=10, penalty=0.0)
    assert found.widths == {"layers.0": 10}


@pytest.mark.parametrize("weighted", [False, True])
def test_parts_are_summed_to_what_all_are(weighted: bool) -> None:
    models = [seeded(s, 7, 8, 3) for s in range(9)]
    counts = np.random.default_rng(0).integers(1, 9, size=(9, 3)) if weighted else None
    found = nafi.fuse(models, INPUTS, tree=4, class_counts=counts)
    clients = check_clients(models, counts, None, None)
    networks = prepare_networks(clients, INPUTS, None, "attach")
    placements = [
        {name: Positions(torch.from_numpy(places[s]), found.widths[name])}
        for s in range(9)
        for name, places in found.assignments.items()
    ]
    at_once = merge_tensors(networks, placements, restore_norm=True)
    for name, tensor in named_tensors(found.model).items():
        torch.testing.assert_close(tensor, at_once[name], rtol=1e-5, atol=1e-6)


def test_a_client_is_weighed_among_all_wherever_it_is_placed() -> None:
    counts = np.random.default_rng(1).integers(1, 9, size=(6, 3))
    clients = check_clients([seeded(s, 7, 8, 3) for s in range(6)], counts, None, None)
    networks = prepare_networks(clients, INPUTS, None, "attach")
    part = networks.part([4, 1])
    assert clients.class_weights is not None
    np.testing.assert_array_equal(part.clients.class_weights, clients.class_weights[[4, 1]])
    np.testing.assert_array_equal(part.clients.model_weights, clients.model_weights[[4, 1]])
    # The order of all holds for the part, without reading anything again.
    assert [[4, 1][k] for k in part.ranking] == [s for s in networks.ranking if s in (1, 4)]


def test_no_neuron_of_a_tree_is_without_an_owner() -> None:
    models = descendants(12, noise=0.6)
    found = nafi.fuse(models, INPUTS, tree=4, penalty=0.1)
    for group, matching in found.matchings.items():
        assert matching.width == found.widths[group]
        assert matching.counts.min() >= 1
        np.testing.assert_array_equal(matching.counts, found.owners(group))
        for assigned in matching.assignments:
            assert len(set(assigned.tolist())) == len(assigned)


class _Recurrent(nn.Module):
    """Two layers of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.out = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.layers(x)[0][:, -1])
        return out


def test_widths_that_must_agree_do_so_after_a_tree() -> None:
    models = []
    for seed in range(7):
        torch.manual_seed(seed)
        models.append(_Recurrent().eval())
    found = nafi.fuse(models, (torch.zeros(2, 4, 5),), tree=3, penalty=0.1)
    assert len(set(found.widths.values())) == 1
    assert torch.isfinite(found.model(torch.randn(2, 4, 5))).all()


def test_what_groups_cannot_stand_for_is_refused() -> None:
    models = [seeded(s, 7, 8, 3) for s in range(4)]
    with pytest.raises(InputError, match="tree: groups are matched by their weights alone"):
        nafi.fuse(models, INPUTS, tree=2, probe=torch.randn(9, 7))
    with pytest.raises(InputError, match="tree: found 1"):
        nafi.fuse(models, INPUTS, tree=1)


def network() -> MLP:
    return MLP(7, 9, 6, 3)


def test_ray_needs_a_tree_or_a_probe() -> None:
    with pytest.raises(InputError, match=r"ray: .*give tree or a probe"):
        nafi.fuse(descendants(4), INPUTS, ray="local")


@pytest.fixture
def on_ray() -> Iterator[Any]:
    """Ray with two workers on this machine."""
    ray = pytest.importorskip("ray")
    paths = os.pathsep.join(dict.fromkeys(path or os.getcwd() for path in sys.path))
    ray.init(
        address="local",
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="error",
        runtime_env={"env_vars": {"PYTHONPATH": paths}},
    )
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_gives_the_same_bytes_also_if_a_worker_is_killed(on_ray: Any, tmp_path: Path) -> None:
    for s, model in enumerate(descendants(9, noise=0.3)):
        nafi.save(model, tmp_path / f"{s}.safetensors")
    files = nafi.open_models(tmp_path / "*.safetensors", network)
    here = nafi.fuse(files, INPUTS, tree=3)
    there = nafi.fuse(files, INPUTS, tree=3, ray="local")
    theirs = named_tensors(there.model)
    for name, tensor in named_tensors(here.model).items():
        assert torch.equal(tensor, theirs[name])
    probe = torch.randn(30, 7, generator=torch.Generator().manual_seed(0))
    one, two = (
        nafi.fuse(descendants(4, noise=0.3), INPUTS, probe=probe, **options).model
        for options in ({}, {"ray": "local"})
    )
    assert gap(one, two, (probe,)) < 1e-6  # workers may have another number of threads
    killed = list(map_on_ray("local", _dies_once, str(tmp_path), [0, 1, 2, 3]))
    assert killed == [0, 1, 4, 9]
    assert (tmp_path / "died").exists()


def _dies_once(folder: str, task: int) -> int:
    mark = Path(folder) / "died"
    if task == 2 and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return task**2
