"""Checkpoints that are read a tensor at a time, however many there are.

Hides: what files call their tensors. Promises: one header of each file is read to begin with, and
what differs from the first is refused with the name of the file; of each file little more than its
name is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from pathlib import Path
from typing import Self

from torch import Tensor, nn

from nafi.checkpoints.loading import read
from nafi.checkpoints.prefixes import without_prefix
from nafi.checkpoints.restoring import restore
from nafi.errors import CheckpointError, InputError, unlike
from nafi.factories import call_factory, load_factory
from nafi.files import expand_paths
from nafi.fusion import FileTensors, StoredModels
from nafi.graph import Inputs, lacks_weights, named_tensors, unwrapped
from nafi.manifest import Manifest
from nafi.tensor_files import read_shapes, read_tensors
from nafi.trust import UNTRUSTED, Trust

# The bytes between which safetensors says how long its header is.
_HEADER = slice(8, 9)


def open_models(
    paths: str | Path | Sequence[str | Path],
    factory: str | Callable[[], nn.Module],
    *,
    strip_prefix: str | None = None,
    max_bytes: int | None = None,
) -> FileModels:
    """Models in files, for `nafi.fuse`: each tensor is read when it is needed, and then dropped.

    paths: files of safetensors, globs such as "models/*.safetensors", or "@list.txt", a text file
        with a path in each line; or a list of these
    factory: makes the network of all of them: a function without arguments, or its name,
        "package.module:function"
    strip_prefix, max_bytes: as in `nafi.load`; the limit is for one file at a time
    """
    several = [paths] if isinstance(paths, str | Path) else list(paths)
    make = factory
    if isinstance(factory, str):
        name = factory
        make = lambda: load_factory(name)[0]  # noqa: E731
    assert callable(make)
    found = expand_paths(several)
    if not found:
        raise InputError("open_models: found no paths, expected files of safetensors")
    return FileModels(found, make, None, strip_prefix, Trust.of(None, max_bytes))


class FileModels(StoredModels):
    """Networks of one architecture in files of safetensors.

    class_counts, sample_counts: what the files say about their data, None for those that do not
    """

    def __init__(
        self,
        paths: Sequence[Path],
        make: Callable[[], nn.Module],
        inputs: Inputs | None = None,
        strip_prefix: str | None = None,
        trust: Trust = UNTRUSTED,
    ) -> None:
        self.paths = list(paths)
        self._make, self._inputs, self._prefix, self._trust = make, inputs, strip_prefix, trust
        network = unwrapped(call_factory(make))
        if lacks_weights(network):
            raise InputError(
                "networks with lazy layers cannot be read a tensor at a time: load them"
            )
        self._own = {name: t.detach().to("meta") for name, t in named_tensors(network).items()}
        self._kinds: dict[object, _Kind] = {}
        self._kind: list[_Kind] = []
        self.class_counts: list[list[float] | None] = []
        self.sample_counts: list[float | None] = []
        for path in self.paths:
            self._add(path)

    def __len__(self) -> int:
        return len(self.paths)

    def tensors(self, index: int) -> Mapping[str, Tensor]:
        return FileTensors(self.paths[index], self._kind[index].names)

    def outline(self, index: int) -> Mapping[str, Tensor]:
        return self._kind[index].outline

    def network(self, index: int) -> nn.Module:
        path = self.paths[index]
        state, manifest = read(path, read_tensors, self._trust)
        made = unwrapped(call_factory(self._make))
        return restore(made, state, manifest, self._inputs, str(path), self._prefix)

    def with_inputs(self, example_inputs: Inputs) -> Self:
        twin = copy(self)
        twin._inputs = example_inputs
        return twin

    def _add(self, path: Path) -> None:
        """Read the header of one more file."""
        _check_format(path)
        state, manifest = read(path, read_shapes, self._trust)
        self._trust.check_bytes(path.stat().st_size, str(path))
        counts = manifest.class_counts
        self.class_counts.append(None if counts is None else list(counts))
        self.sample_counts.append(manifest.sample_count)
        key = (
            tuple((name, tensor.shape, tensor.dtype) for name, tensor in state.items()),
            tuple((manifest.aliases or {}).items()),
        )
        if key not in self._kinds:
            self._kinds[key] = self._described(state, manifest, str(path))
        self._kind.append(self._kinds[key])

    def _described(self, state: Mapping[str, Tensor], manifest: Manifest, label: str) -> _Kind:
        """What such a file holds, under the names of the network and in their order."""
        own = self._own
        shared = {other: state[name] for other, name in (manifest.aliases or {}).items()}
        found = without_prefix({**state, **shared}, own, self._prefix, label)
        difference = unlike(found, own)
        if difference or manifest.folded:
            what = "holds a folded network" if manifest.folded else difference
            raise CheckpointError(
                f"{label} {what}: a file that is read a tensor at a time must hold the network's "
                "own tensors; is the factory the right one? Else load the models"
            )
        in_file = {id(tensor): name for name, tensor in state.items()}
        outline = {name: found[name] for name in own}
        return _Kind(outline, {name: in_file[id(t)] for name, t in outline.items()})


class _Kind:
    """What is the same for all files of the same names and shapes.

    outline: the network's tensors without numbers; names: of each -> its name in the file
    """

    def __init__(self, outline: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
        self.outline, self.names = outline, names


def _check_format(path: Path) -> None:
    """Refuse what cannot be read in parts."""
    if path.is_dir():
        raise CheckpointError(f"{path} is a folder, which cannot be read a tensor at a time")
    if not path.is_file():
        raise CheckpointError(f"{path} does not exist; expected a checkpoint")
    with path.open("rb") as handle:
        if handle.read(9)[_HEADER] != b"{":
            raise CheckpointError(
                f"{path} is no file of safetensors, and others cannot be read a tensor at a time; "
                "save it with nafi.save, or load the models"
            )
