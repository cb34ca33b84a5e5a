"""Data sets as tensors.

Hides: file formats and where the files are. Promises: images and labels for training and for
testing, checked to be whole, or an error that says how to get them.
"""

from __future__ import annotations

import gzip
import os
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nafi.errors import InputError


@dataclass(frozen=True, eq=False)
class Samples:
    """inputs: (n, ...) numbers; labels: (n,) classes."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Tensor | npt.NDArray[np.intp] | slice) -> Samples:
        chosen = torch.from_numpy(index) if isinstance(index, np.ndarray) else index
        return Samples(self.inputs[chosen], self.labels[chosen])

    @property
    def classes(self) -> int:
        return int(self.labels.max()) + 1


@dataclass(frozen=True, eq=False)
class Dataset:
    """What to train on and what to look at once, at the end."""

    name: str
    train: Samples
    test: Samples


def digits(seed: int = 0) -> Dataset:
    """scikit-learn's 1,797 digits of 8 x 8 pixels in [0, 1], a quarter of them for testing."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    order = np.random.default_rng(seed).permutation(len(bundle.target))
    inputs = torch.from_numpy(bundle.data[order] / 16).float()
    samples = Samples(inputs, torch.from_numpy(bundle.target[order]).long())
    cut = len(samples) // 4
    return Dataset("digits", samples[cut:], samples[:cut])


def mnist() -> Dataset:
    """60,000 and 10,000 digits of 28 x 28 pixels in [0, 1], flattened."""
    folder = data_folder() / "mnist"
    parts = []
    for part in ("train", "t10k"):
        images = _idx(folder / f"{part}-images-idx3-ubyte.gz")
        labels = _idx(folder / f"{part}-labels-idx1-ubyte.gz")
        if len(images) != len(labels):
            raise InputError(f"{folder}: {len(images)} images but {len(labels)} labels in {part}")
        inputs = torch.from_numpy(images).reshape(len(images), -1).float() / 255
        parts.append(Samples(inputs, torch.from_numpy(labels).long()))
    return Dataset("mnist", *parts)


def data_folder() -> Path:
    """Where data sets are: the variable NAFI_DATA."""
    folder = os.environ.get("NAFI_DATA")
    if not folder:
        raise InputError("set NAFI_DATA to the folder that holds the data sets, such as mnist/")
    return Path(folder)


def _idx(path: Path) -> npt.NDArray[np.uint8]:
    """An array in the IDX format: two zeros, a type, the number of sizes, the sizes, the bytes."""
    try:
        content = gzip.decompress(path.read_bytes())
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; NAFI_DATA names the folder above it") from None
    except (OSError, EOFError) as error:
        raise InputError(f"{path} cannot be read: {error}; get it again") from None
    zeros, kind, ndim = struct.unpack_from(">HBB", content)
    if zeros != 0 or kind != 8:
        raise InputError(f"{path} is not an IDX file of bytes")
    sizes = struct.unpack_from(f">{ndim}I", content, 4)
    values = np.frombuffer(content, dtype=np.uint8, offset=4 + 4 * ndim)
    if values.size != np.prod(sizes):
        raise InputError(f"{path} holds {values.size} bytes, expected {sizes}; get it again")
    return values.reshape(sizes).copy()
