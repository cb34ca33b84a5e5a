"""Data sets as tensors.

Hides: file formats and where the files are. Promises: images and labels for training and for
testing, checked to be whole, or an error that says how to get them.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nafi.errors import InputError
from nafi.federated import Samples
from nafi.files import atomic_path


@dataclass(frozen=True, eq=False)
class Dataset:
    """What to train on and what to look at once, at the end.

    sites, test_sites: where each training and test sample comes from, counted from 0, if the data
        say so; site_names: what these are called
    """

    name: str
    train: Samples
    test: Samples
    sites: npt.NDArray[np.intp] | None = None
    test_sites: npt.NDArray[np.intp] | None = None
    site_names: tuple[str, ...] = ()

    def first(self, order: npt.NDArray[np.intp]) -> Dataset:
        """With some of the training samples, in this order."""
        sites = None if self.sites is None else self.sites[order]
        return replace(self, train=self.train[order], sites=sites)

    def tested_at(self, used: npt.NDArray[np.intp]) -> Dataset:
        """Without test samples of sites that none of the training samples used come from."""
        if self.sites is None or self.test_sites is None:
            return self
        index = np.flatnonzero(np.isin(self.test_sites, self.sites[used]))
        return replace(self, test=self.test[index], test_sites=self.test_sites[index])

    def test_by_site(self, count: int | None = None) -> dict[str, Samples]:
        """Site -> its samples among the first test samples; nothing if the data do not say."""
        if self.test_sites is None:
            return {}
        seen = self.test_sites[:count]
        names = self.site_names or tuple(map(str, range(seen.max() + 1)))
        return {names[site]: self.test[np.flatnonzero(seen == site)] for site in np.unique(seen)}


def digits(seed: int = 0) -> Dataset:
    """scikit-learn's 1,797 digits of 8 x 8 pixels in [0, 1], a quarter of them for testing."""
    from sklearn.datasets import load_digits

    bundle = load_digits()
    order = np.random.default_rng(seed).permutation(len(bundle.target))
    inputs = torch.from_numpy(bundle.data[order] / 16).float()
    samples = Samples(inputs, torch.from_numpy(bundle.target[order]).long())
    cut = len(samples) // 4
    return Dataset("digits", samples[cut:], samples[:cut])


# The SHA-256 of each compressed file as its publisher made it.
_MNIST = {
    f"{name}-ubyte.gz": digest
    for name, digest in [
        ("train-images-idx3", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        ("train-labels-idx1", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        ("t10k-images-idx3", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        ("t10k-labels-idx1", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ]
}
_MNIST_MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist/"


def mnist() -> Dataset:
    """60,000 and 10,000 digits of 28 x 28 pixels in [0, 1], flattened."""
    folder = _mnist_folder()
    parts = []
    for part in ("train", "t10k"):
        images = _idx(folder / f"{part}-images-idx3-ubyte.gz")
        labels = _idx(folder / f"{part}-labels-idx1-ubyte.gz")
        if len(images) != len(labels):
            raise InputError(f"{folder}: {len(images)} images but {len(labels)} labels in {part}")
        inputs = torch.from_numpy(images).reshape(len(images), -1).float() / 255
        parts.append(Samples(inputs, torch.from_numpy(labels).long()))
    train, test = parts
    return Dataset("mnist", train, test)


def _mnist_folder() -> Path:
    """The folder under NAFI_DATA; without that, a cache that is filled from the usual mirror."""
    folder = os.environ.get("NAFI_DATA")
    if folder:
        return Path(folder) / "mnist"
    import pooch

    store = pooch.create(pooch.os_cache("nafi") / "mnist", _MNIST_MIRROR, registry=_MNIST)
    for name in _MNIST:
        try:
            store.fetch(name)
        except (OSError, ValueError) as error:
            raise _not_downloaded(f"{_MNIST_MIRROR}{name}", error, "mnist") from None
    return Path(store.path)


_CIFAR10 = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR10_MD5 = "c32a1d4ab5d03f1284b67883e8d87530"
_CIFAR10_FOLDER = "cifar-10-batches-bin"
# Mean and deviation of the training pixels, for red, green and blue.
_CIFAR10_PIXELS = torch.tensor([[0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]])


def cifar10() -> Dataset:
    """50,000 and 10,000 photos of 3 x 32 x 32 pixels, standardised by channel; ten classes."""
    folder = _cifar10_folder()
    train = [_cifar10_batch(folder / f"data_batch_{k}.bin") for k in range(1, 6)]
    inputs, labels = (torch.cat(parts) for parts in zip(*train, strict=True))
    return Dataset(
        "cifar10", Samples(inputs, labels), Samples(*_cifar10_batch(folder / "test_batch.bin"))
    )


def _cifar10_batch(path: Path) -> tuple[Tensor, Tensor]:
    """A file of rows: a byte for the class, then the pixels of each channel."""
    row = 1 + 3 * 32 * 32
    try:
        content = path.read_bytes()
    except OSError:
        raise InputError(f"{path} does not exist; NAFI_DATA names the folder above it") from None
    if not content or len(content) % row:
        raise InputError(f"{path} holds {len(content)} bytes, not rows of {row}; get it again")
    rows = torch.frombuffer(bytearray(content), dtype=torch.uint8).reshape(-1, row)
    pixels = rows[:, 1:].reshape(-1, 3, 32, 32).float() / 255
    mean, deviation = _CIFAR10_PIXELS.reshape(2, 3, 1, 1)
    return (pixels - mean) / deviation, rows[:, 0].long()


def _cifar10_folder() -> Path:
    folder = os.environ.get("NAFI_DATA")
    if folder:
        return Path(folder) / _CIFAR10_FOLDER
    import pooch

    try:
        files = pooch.retrieve(
            _CIFAR10,
            known_hash=f"md5:{_CIFAR10_MD5}",
            path=pooch.os_cache("nafi"),
            processor=pooch.Untar(extract_dir="."),
        )
    except (OSError, ValueError) as error:
        raise _not_downloaded(_CIFAR10, error, _CIFAR10_FOLDER) from None
    return Path(files[0]).parent


CARVANA_SIZE = (240, 160)
_CARVANA_TEST_CARS = 32


def carvana(width: int, height: int) -> Dataset:
    """Photos of cars, bytes of (n, 3, height, width), and masks, (n, 1, height, width) of 0 and 1.

    The last 32 cars by their identifiers are the test data: the 16 views of a car are too much
    alike to be on both sides. Decoded once; the images of a size are then kept in a file.
    """
    above = os.environ.get("NAFI_DATA")
    if not above:
        raise InputError(
            "the Carvana photos cannot be downloaded without an account of their competition: set "
            "NAFI_DATA to a folder with carvana/train/ and carvana/train_masks/ in it"
        )
    folder = Path(above) / "carvana"
    photos = sorted((folder / "train").glob("*.jpg"))
    if not photos:
        raise InputError(f"{folder / 'train'} holds no photos; NAFI_DATA names the folder above it")
    masks_of = [folder / "train_masks" / f"{photo.stem}_mask.gif" for photo in photos]
    images, masks = _decoded("carvana", photos, masks_of, width, height)
    cars = [photo.stem.rpartition("_")[0] for photo in photos]
    last = set(sorted(set(cars))[-_CARVANA_TEST_CARS:])
    test = torch.tensor([car in last for car in cars])
    return Dataset(
        "carvana", Samples(images[~test], masks[~test]), Samples(images[test], masks[test])
    )


NUCLEI_SIZE = (128, 128)
_NUCLEI_TEST = 5


def nuclei(width: int, height: int) -> Dataset:
    """Microscope images, bytes of (n, 3, height, width), and masks of cell nuclei.

    `sites` are the labs, those with most images first. Every fifth image of a lab is for testing.
    """
    above = os.environ.get("NAFI_DATA")
    folder = Path(above or ".") / "nuclei"
    try:
        lines = (folder / "labs.csv").read_text().splitlines()[1:]
    except OSError:
        raise InputError(
            "the nuclei cannot be downloaded: set NAFI_DATA to a folder with nuclei/images/, "
            "nuclei/masks/ and nuclei/labs.csv in it"
        ) from None
    names, labs = zip(*(line.split(",")[:2] for line in lines), strict=True)
    images, masks = _decoded(
        "nuclei",
        [folder / "images" / f"{name}.png" for name in names],
        [folder / "masks" / f"{name}.png" for name in names],
        width,
        height,
    )
    known = sorted(set(labs), key=lambda lab: (-labs.count(lab), lab))
    seen = dict.fromkeys(known, 0)
    test = torch.zeros(len(labs), dtype=torch.bool)
    for place, lab in enumerate(labs):
        test[place] = seen[lab] % _NUCLEI_TEST == 0
        seen[lab] += 1
    sites = np.array([known.index(lab) for lab in labs], dtype=np.intp)
    return Dataset(
        "nuclei",
        Samples(images[~test], masks[~test]),
        Samples(images[test], masks[test]),
        sites[~test.numpy()],
        sites[test.numpy()],
        tuple(known),
    )


def _decoded(
    name: str, photos: list[Path], masks_of: list[Path], width: int, height: int
) -> tuple[Tensor, Tensor]:
    """All photos and masks at one size, from a file if they were decoded before."""
    for photo in photos[:1]:
        if not photo.is_file():
            raise InputError(f"{photo} does not exist; NAFI_DATA names the folder above it")
    files = "".join(f"{p.name} {p.stat().st_size}\n" for p in photos)
    digest = hashlib.sha256(f"{width} {height}\n{files}".encode()).hexdigest()[:16]
    file = cache_folder() / f"{name}-{width}x{height}-{digest}.safetensors"
    if not file.is_file():
        images = torch.empty(len(photos), 3, height, width, dtype=torch.uint8)
        masks = torch.empty(len(photos), 1, height, width, dtype=torch.uint8)
        for place, (photo, mask) in enumerate(zip(photos, masks_of, strict=True)):
            images[place] = _picture(photo, "RGB", width, height).movedim(-1, 0)
            masks[place, 0] = _picture(mask, "L", width, height) > 0
        file.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(file) as partial:
            save_file({"images": images, "masks": masks}, partial)
    decoded = load_file(file)
    return decoded["images"], decoded["masks"]


def _picture(path: Path, mode: str, width: int, height: int) -> Tensor:
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as image:
            how = Image.Resampling.BOX if mode == "RGB" else Image.Resampling.NEAREST
            return torch.from_numpy(np.array(image.convert(mode).resize((width, height), how)))
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; every photo needs its mask") from None
    except (OSError, UnidentifiedImageError) as error:
        raise InputError(f"{path} cannot be read: {error}; get it again") from None


def cache_folder() -> Path:
    """Where trained clients and decoded images are kept: NAFI_CACHE, else the user's cache."""
    default = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "nafi" / "clients"
    return Path(os.environ.get("NAFI_CACHE", default))


def _not_downloaded(address: str, error: Exception, folder: str) -> InputError:
    return InputError(
        f"cannot download {address}: {type(error).__name__}; set NAFI_DATA to a folder with "
        f"{folder}/ in it instead"
    )


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
