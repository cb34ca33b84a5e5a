"""The files of a Hugging Face folder.

Hides: their names, and weights in several files. Promises: a configuration of plain data and the
tensors under the names that the files have for them, or a `CheckpointError` that names the file; no
file outside the folder is read because one inside says so.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from nafi.errors import CheckpointError, few, unlike
from nafi.tensor_files import Reader, read_tensors, tensor_bytes
from nafi.trust import UNTRUSTED, Trust

CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
# Of torch.save; what it holds besides tensors is refused as in any such file.
_TORCH_WEIGHTS = "pytorch_model.bin"
_ADAPTER = "adapter_config.json"
# What prepares a network's inputs, reads its outputs, or says how it writes text.
_COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "bpe.codes",
    "tokenizer.model",
    "spiece.model",
    "source.spm",
    "target.spm",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "generation_config.json",
)


def is_folder(path: Path) -> bool:
    """Whether this is a folder with a configuration, as `save_pretrained` writes it."""
    return (path / CONFIG).is_file()


def read_config(folder: Path) -> dict[str, Any]:
    """What config.json says, as plain data."""
    if not is_folder(folder):
        kind = f"is a folder without {CONFIG}" if folder.is_dir() else "does not exist"
        raise CheckpointError(
            f"{folder} {kind}; expected a checkpoint, or a Hugging Face folder as save_pretrained "
            "writes it"
        )
    return _read_object(folder / CONFIG)


def read_weights(
    folder: Path, reader: Reader = read_tensors, trust: Trust = UNTRUSTED
) -> dict[str, Tensor]:
    """The tensors of a folder, from one file or from several that an index lists.

    reader: of each file; trust: how much memory they may take together
    """
    if (folder / _ADAPTER).exists() and not (folder / _WEIGHTS).exists():
        raise CheckpointError(
            f"{folder} holds an adapter, not a network; merge it into its base model first "
            "(merge_and_unload) and save that"
        )
    for name in (_WEIGHTS, _TORCH_WEIGHTS):
        if (folder / name).is_file():
            return reader(folder / name, trust)[0]
        if name == _WEIGHTS and (folder / _INDEX).is_file():
            return _read_shards(folder, reader, trust)
    raise CheckpointError(
        f"{folder} lacks {_WEIGHTS} and {_INDEX}; model.save_pretrained(...) writes them"
    )


def _read_shards(folder: Path, reader: Reader, trust: Trust) -> dict[str, Tensor]:
    index = folder / _INDEX
    places = _read_object(index).get("weight_map")
    if not isinstance(places, Mapping) or not places:
        raise CheckpointError(f"{index} lacks weight_map, the file of each tensor")
    for file in places.values():
        # A name within the folder, and nothing else: others write what we read.
        if not isinstance(file, str) or Path(file).name != file or "\\" in file or "\0" in file:
            raise CheckpointError(f"{index}: found {str(file)[:60]!r}, expected a file beside it")
        if not file.endswith(".safetensors"):
            raise CheckpointError(f"{index}: found {file[:60]!r}, expected .safetensors files")
    state: dict[str, Tensor] = {}
    for file in sorted(set(places.values())):
        shard, _ = reader(folder / file, trust)
        listed = {name: file for name, where in places.items() if where == file}
        difference = unlike(shard, listed)
        if difference:
            raise CheckpointError(f"{folder / file} {difference}, unlike what {index} says")
        state |= shard
        trust = trust.after(tensor_bytes(shard.values()))
    return state


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        json.dumps(values, ensure_ascii=False).encode()  # refuses half a surrogate pair
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds {type(values).__name__}, expected a JSON object")
    return values


def companions(folder: Path) -> Iterator[Path]:
    """Tokenizer and preprocessor files, and the like."""
    return (folder / name for name in _COMPANIONS if (folder / name).is_file())


def copy_companions(source: Path, target: Path) -> None:
    """Copy them byte for byte."""
    for file in companions(source):
        shutil.copyfile(file, target / file.name)


def unlike_companions(folders: Sequence[Path]) -> str | None:
    """Which tokenizer files differ between folders, in words; None if none do."""
    different = [
        str(folder / file.name)
        for first in folders[:1]
        for folder in folders[1:]
        for file in companions(first)
        if file.name in _VOCABULARY and (folder / file.name).is_file()
        if (folder / file.name).read_bytes() != file.read_bytes()
    ]
    if not different:
        return None
    are = "are" if len(different) > 1 else "is"
    return f"{few(different)} {are} not as in {folders[0]}"


# Files that say which number a word has.
_VOCABULARY = {"tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model"}


def is_weights(name: str) -> bool:
    """Whether a file of a folder holds weights, or says where they are."""
    return name.endswith((".safetensors", ".bin", ".index.json"))
