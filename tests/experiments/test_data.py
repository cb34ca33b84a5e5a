"""Data and partitions."""

from __future__ import annotations

import gzip
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import numpy as np
import pytest
import torch

from nafi.errors import InputError
from nafi.experiments import load_data
from nafi.experiments.data import cifar10, digits, mnist, nuclei
from nafi.experiments.partition import (
    class_counts,
    class_partition,
    dirichlet_partition,
    site_partition,
)


def test_digits_are_split_without_overlap() -> None:
    data = digits(3)
    assert len(data.train) + len(data.test) == 1797
    assert data.train.inputs.shape[1] == 64
    assert float(data.train.inputs.min()) == 0
    assert float(data.train.inputs.max()) == 1
    rows = {tuple(row) for row in data.train.inputs.tolist()}
    shared = sum(tuple(row) in rows for row in data.test.inputs.tolist())
    assert shared < 5  # equal pictures, not the same samples


@pytest.mark.usefixtures("real_data")
def test_mnist_is_whole() -> None:
    data = mnist()
    assert data.train.inputs.shape == (60000, 784)
    assert data.test.inputs.shape == (10000, 784)
    # The published numbers of each digit.
    assert torch.bincount(data.train.labels).tolist() == [
        5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949
    ]  # fmt: skip
    assert float(data.train.inputs.mean()) == pytest.approx(0.1307, abs=1e-4)


@pytest.mark.slow
@pytest.mark.usefixtures("real_data")
def test_cifar10_is_whole() -> None:
    data = cifar10()
    assert data.train.inputs.shape == (50000, 3, 32, 32)
    assert data.test.inputs.shape == (10000, 3, 32, 32)
    assert torch.bincount(data.train.labels).tolist() == [5000] * 10
    assert torch.bincount(data.test.labels).tolist() == [1000] * 10
    assert data.train.inputs.mean(dim=(0, 2, 3)).abs().max() < 1e-3
    assert (data.train.inputs.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-2
    # The first picture of the training data is a frog.
    assert int(data.train.labels[0]) == 6
    part = load_data("cifar10", 100, 1)
    assert part.train.inputs.shape == (100, 3, 32, 32)
    assert not torch.equal(part.train.labels, load_data("cifar10", 100, 2).train.labels)


def test_a_cifar10_file_that_was_cut_off_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAFI_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"data_batch_1.bin does not exist"):
        cifar10()
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    (folder / "data_batch_1.bin").write_bytes(b"\0" * 5000)
    with pytest.raises(InputError, match=r"data_batch_1.bin holds 5000 bytes, not rows of 3073"):
        cifar10()


def test_files_that_cannot_be_used_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NAFI_DATA", str(tmp_path))
    with pytest.raises(InputError, match=r"train-images-idx3-ubyte.gz does not exist"):
        mnist()
    (tmp_path / "mnist").mkdir()
    file = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    for content, told in [
        (b"plain", "cannot be read"),
        (gzip.compress(b"\1\2\3\4 and more"), "not an IDX file"),
        (gzip.compress(b"\0\0\x08\1\0\0\0\5abc"), "holds 3 bytes"),
    ]:
        file.write_bytes(content)
        with pytest.raises(InputError, match=told):
            mnist()


def test_every_sample_falls_to_one_client() -> None:
    labels = digits().train.labels.numpy()
    parts = dirichlet_partition(labels, 8, 0.5, np.random.default_rng(0))
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(labels)))
    assert min(map(len, parts)) >= 10
    counts = class_counts(labels, parts, 10)
    assert counts.sum() == len(labels)
    assert counts[2, 3] == (labels[parts[2]] == 3).sum()
    again = dirichlet_partition(labels, 8, 0.5, np.random.default_rng(0))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_a_client_with_its_part_gets_no_more_of_later_classes() -> None:
    labels = np.repeat(np.arange(6), 100)
    refused = 0
    for seed in range(5):
        parts = dirichlet_partition(labels, 4, 0.3, np.random.default_rng(seed), least=1)
        counts = class_counts(labels, parts, 6)
        held = np.cumsum(counts, axis=1) - counts  # before each class
        full = held >= len(labels) / 4
        assert (counts[full] == 0).all()
        refused += int(full.sum())
    assert refused > 5


def test_less_skew_with_larger_alpha() -> None:
    labels = np.repeat(np.arange(10), 1000)

    def skew(alpha: float) -> float:
        parts = dirichlet_partition(labels, 5, alpha, np.random.default_rng(1))
        return float(class_counts(labels, parts, 10).std())

    assert skew(0.1) > skew(1.0) > skew(100.0)


def test_impossible_partitions() -> None:
    labels = np.zeros(50, dtype=np.int64)
    with pytest.raises(InputError, match="too few"):
        dirichlet_partition(labels, 6, 0.5, np.random.default_rng(0))
    with pytest.raises(InputError, match="no partition"):
        dirichlet_partition(np.zeros(61, dtype=np.int64), 6, 1e-3, np.random.default_rng(0))


def test_downloads_are_checked_against_the_published_digests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mirror that serves something else is refused; here it is a folder of this machine."""
    (tmp_path / "mirror").mkdir()
    (tmp_path / "mirror" / "train-images-idx3-ubyte.gz").write_bytes(b"something else")
    monkeypatch.delenv("NAFI_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "mirror"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        monkeypatch.setattr("nafi.experiments.data._MNIST_MIRROR", address)
        with pytest.raises(InputError, match=r"cannot download .*train-images.*NAFI_DATA"):
            mnist()
        server.shutdown()
    assert not list((tmp_path / "cache").rglob("*.gz"))


@pytest.mark.usefixtures("real_data")
def test_nuclei_come_from_six_labs() -> None:
    data = nuclei(32, 32)
    assert data.sites is not None
    assert data.test_sites is not None
    assert len(data.train) + len(data.test) == 664
    # Of 334, 107, 90, 90, 27 and 16 images every fifth is for testing, the first of all.
    assert np.bincount(data.sites).tolist() == [267, 85, 72, 72, 21, 12]
    assert np.bincount(data.test_sites).tolist() == [67, 22, 18, 18, 6, 4]
    assert data.site_names[:2] == ("fluorescence-256", "stained")
    assert data.train.inputs.shape == (529, 3, 32, 32)
    assert set(data.train.labels.unique().tolist()) == {0, 1}
    parts = site_partition(data.sites, 6, np.random.default_rng(0))
    assert sorted(np.concatenate(parts).tolist()) == list(range(529))
    # Labs differ in their inputs: fluorescence is dark, stained tissue is not.
    means = [float(data.train.inputs[torch.from_numpy(part)].float().mean()) for part in parts]
    assert max(means) > 3 * min(means)
    some = load_data("nuclei", 100, size=(32, 32))
    assert some.sites is not None
    assert len(some.sites) == len(some.train) == 100


SITES = np.random.default_rng(0).permutation(np.repeat([0, 1, 2], [20, 31, 6]))


def test_the_largest_site_is_cut_in_two() -> None:
    whole = site_partition(SITES, 3, np.random.default_rng(1))
    assert [len(part) for part in whole] == [20, 31, 6]
    parts = site_partition(SITES, 4, np.random.default_rng(1))
    assert [len(part) for part in parts] == [20, 16, 15, 6]
    assert [np.unique(SITES[part]).tolist() for part in parts] == [[0], [1], [1], [2]]
    assert sorted(np.concatenate(parts).tolist()) == list(range(57))
    # Drawn: neither the first half, nor the same with another generator.
    assert parts[1].max() > parts[2].min()
    again, other = (site_partition(SITES, 4, np.random.default_rng(seed)) for seed in (1, 2))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    assert not np.array_equal(parts[1], other[1])


def test_with_still_more_clients_the_next_largest_part_is_cut() -> None:
    parts = site_partition(SITES, 6, np.random.default_rng(1))
    assert [len(part) for part in parts] == [10, 10, 8, 8, 15, 6]
    assert sorted(np.concatenate(parts).tolist()) == list(range(57))


def test_sites_that_cannot_be_shared_out() -> None:
    rng = np.random.default_rng(0)
    with pytest.raises(InputError, match="found 2, but the data come from 3 sites"):
        site_partition(SITES, 2, rng)
    with pytest.raises(InputError, match="found 2, but the data come from 0 sites"):
        site_partition(None, 2, rng)
    with pytest.raises(InputError, match="a client would have 1 samples; it needs 2 or more"):
        site_partition(np.array([0, 0, 0, 1]), 2, rng)


def test_nuclei_that_are_not_there_are_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("NAFI_DATA", str(tmp_path))
    with pytest.raises(InputError, match="NAFI_DATA to a folder with nuclei/images"):
        nuclei(32, 32)


def test_every_class_goes_to_one_client() -> None:
    labels = np.random.default_rng(0).integers(0, 10, 400)
    parts = class_partition(labels, 3, np.random.default_rng(1))
    owned = [set(labels[part].tolist()) for part in parts]
    assert sorted(map(len, owned)) == [3, 3, 4]
    assert sorted(label for classes in owned for label in classes) == list(range(10))
    assert sorted(np.concatenate(parts).tolist()) == list(range(400))
    with pytest.raises(InputError, match="found 11, expected at most one for each of the 10"):
        class_partition(labels, 11, np.random.default_rng(1))
