"""Unlabelled inputs by name: a file, a folder of images, or `package.module:function`.

Hides: the formats. Promises: what `nafi.fuse(probe=...)` takes, or a one-line error that says what
failed. Nothing is unpickled.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from nafi.checkpoints import read
from nafi.errors import InputError, NafiError, require
from nafi.factories import call_function, load_function
from nafi.fusion import PROBE_LIMIT, FusionWarning
from nafi.graph import Inputs
from nafi.tensor_files import read_shapes
from nafi.trust import UNTRUSTED, Trust

if TYPE_CHECKING:
    from PIL.Image import Image

# Channels of the network's input -> what Pillow calls such images.
_MODES = {1: "L", 3: "RGB", 4: "RGBA"}
# Images of eight bits a channel; what others hold cannot be known.
_EIGHT_BITS = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr", "HSV", "LAB"}


def load_probe(source: str, example_inputs: Inputs, trust: Trust = UNTRUSTED) -> Any:
    """Inputs from a safetensors or .npy file, a folder of images, or a function.

    A file with several tensors gives the network's arguments by their names. Images are resized to
    the example input, and their pixels go from 0 to 1. trust: how much memory a file may take
    """
    path = Path(source)
    if path.is_dir():
        if isinstance(example_inputs, Mapping):
            example_inputs = list(example_inputs.values())
        return _read_images(path, example_inputs)
    if path.is_file():
        return _read_array(path, trust) if path.suffix == ".npy" else _read_tensors(path, trust)
    if ":" in source:
        return call_function(load_function(source, "probe")[0], source)
    raise _missing(source)


def count_probe(source: str) -> int | None:
    """How many inputs `load_probe` would give, at most as many as are used; None if code says."""
    path = Path(source)
    if path.is_dir():
        return min(PROBE_LIMIT, len(_images(path)))
    if not path.is_file():
        if ":" in source:
            return None
        raise _missing(source)
    shapes = (
        [_mapped(path).shape]
        if path.suffix == ".npy"
        else [tensor.shape for tensor in read(path, read_shapes)[0].values()]
    )
    return min([PROBE_LIMIT, *(shape[0] for shape in shapes if shape)])


def _missing(source: str) -> InputError:
    return InputError(
        f"probe: {source} does not exist; expected a .safetensors or .npy file, a folder of images "
        "or package.module:function"
    )


def _read_tensors(path: Path, trust: Trust) -> Any:
    tensors, _ = read(path, trust=trust)
    return next(iter(tensors.values())) if len(tensors) == 1 else tensors


def _read_array(path: Path, trust: Trust) -> Tensor:
    with _array_errors(path):
        used = _mapped(path)[:PROBE_LIMIT]
        trust.check_bytes(used.nbytes, f"probe: {path}")
        return torch.from_numpy(np.array(used))


def _mapped(path: Path) -> npt.NDArray[Any]:
    with _array_errors(path):
        # Mapped, so that a header that promises more than there is allocates nothing.
        array = np.load(path, allow_pickle=False, mmap_mode="r")
        if not isinstance(array, np.ndarray):
            raise ValueError("it holds several arrays, as numpy.savez writes them")
        return array


@contextmanager
def _array_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except NafiError:
        raise
    except Exception as error:  # whatever numpy finds wrong with the file
        raise InputError(
            f"probe: {path} cannot be read as an array of numbers of numpy.save: {error}"
        ) from None


def _read_images(folder: Path, example_inputs: Sequence[Any]) -> Tensor:
    require("PIL")
    from PIL import Image

    mode, size = _image_form(folder, example_inputs)
    files = _images(folder)
    found = None
    pixels = []
    for file in files[:PROBE_LIMIT]:
        try:
            with Image.open(file) as image:
                found = _check_image(image, file, found)
                pixels.append(np.asarray(image.convert(mode).resize(size)))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise InputError(f"probe: {file} cannot be read as an image: {error}") from None
    text = (
        f"probe: {len(pixels)} images, read as {size[0]} x {size[1]} pixels from 0 to 1; if the "
        "network was trained on other numbers, give package.module:function instead"
    )
    warnings.warn(text, FusionWarning, stacklevel=3)
    images = torch.from_numpy(np.stack(pixels)).float() / 255
    return images[:, None] if images.ndim == 3 else images.movedim(-1, 1)


def _images(folder: Path) -> list[Path]:
    """The images of a folder, of which there must be some."""
    require("PIL")
    from PIL import Image

    endings = Image.registered_extensions()
    files = sorted(file for file in folder.iterdir() if file.suffix.lower() in endings)
    if not files:
        raise InputError(f"probe: {folder} holds no images")
    return files


def _image_form(folder: Path, example_inputs: Sequence[Any]) -> tuple[str, tuple[int, int]]:
    """The mode and the width and height of the images that a network takes."""
    first = example_inputs[0] if len(example_inputs) == 1 else None
    if not isinstance(first, Tensor) or first.ndim != 4 or first.shape[1] not in _MODES:
        raise InputError(
            f"probe: {folder} is a folder, but the network takes no images of 1, 3 or 4 channels; "
            "give a file, or package.module:function"
        )
    return _MODES[first.shape[1]], (first.shape[3], first.shape[2])


def _check_image(image: Image, file: Path, usual: tuple[int, int] | None) -> tuple[int, int]:
    """The size of an image, which must be that of the others."""
    if image.mode not in _EIGHT_BITS:
        raise InputError(
            f"probe: {file} holds other numbers than eight bits a channel ({image.mode}); give "
            "package.module:function instead"
        )
    if usual is not None and image.size != usual:
        raise InputError(
            f"probe: {file} has {image.size[0]} x {image.size[1]} pixels, others "
            f"{usual[0]} x {usual[1]}; cut them to one size as in training first"
        )
    return image.size
