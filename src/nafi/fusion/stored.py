"""Networks that stay in files and are read when they are needed, a tensor at a time.

Hides: files. Promises: whoever asks for a tensor reads no other; nothing that was read is kept, so
that thousands of networks take the memory of one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, overload

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nafi.graph import named_tensors

State = Mapping[str, Tensor]


class StoredModels(Sequence[nn.Module], ABC):
    """Networks of one architecture that are read when they are needed.

    `models[s]` makes a network, for those who must run it; `tensors(s)` and `outline(s)` do not.
    """

    @abstractmethod
    def tensors(self, index: int) -> State:
        """The tensors of a network under its names, each read when it is asked for."""

    @abstractmethod
    def outline(self, index: int) -> State:
        """The same as tensors of the device "meta", which hold no numbers."""

    @abstractmethod
    def network(self, index: int) -> nn.Module:
        """One network."""

    @overload
    def __getitem__(self, index: int) -> nn.Module: ...
    @overload
    def __getitem__(self, index: slice) -> list[nn.Module]: ...
    def __getitem__(self, index: int | slice) -> nn.Module | list[nn.Module]:
        if isinstance(index, slice):
            return [self.network(s) for s in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        return self.network(index)


def outlines(models: Sequence[nn.Module]) -> Iterator[State]:
    """Shapes and types of each network's tensors, perhaps without numbers."""
    if isinstance(models, StoredModels):
        return map(models.outline, range(len(models)))
    return map(named_tensors, models)


class FileTensors(Mapping[str, Tensor]):
    """The tensors of a safetensors file, each read when it is asked for.

    names: of each tensor -> its name in the file
    """

    def __init__(self, path: Path, names: Mapping[str, str]) -> None:
        self._path, self._names = path, names

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file.get_tensor(self._names[name])
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    @cached_property
    def _file(self) -> Any:
        return safe_open(self._path, framework="pt")


class StoredStates(Sequence[State]):
    """The tensors of several networks; those of the last that was asked for stay open."""

    def __init__(self, count: int, read: Callable[[int], State]) -> None:
        self._count, self._read = count, read
        self._last: tuple[int, State] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> State: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[State]: ...
    def __getitem__(self, index: int | slice) -> State | Sequence[State]:
        if isinstance(index, slice):
            chosen = range(*index.indices(self._count))
            return StoredStates(len(chosen), lambda s: self._read(chosen[s]))
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._last is None or self._last[0] != index:
            self._last = None  # not two at a time
            self._last = index, self._read(index)
        return self._last[1]


class Spill:
    """States that are computed once, written to a temporary folder, and read from there."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="nafi-")
        self._names: list[dict[str, str]] = []

    def add(self, state: State) -> None:
        """Keep one more; tensors that are one under several names are written once."""
        first: dict[int, str] = {}
        names = {name: first.setdefault(tensor.data_ptr(), name) for name, tensor in state.items()}
        # An empty tensor has no place of its own, and equal places need not mean equal shapes.
        names = {
            name: same if state[same].shape == state[name].shape and state[name].numel() else name
            for name, same in names.items()
        }
        kept = {name: state[name].contiguous().clone() for name in set(names.values())}
        save_file(kept, self._path(len(self._names)))
        same_names = bool(self._names) and self._names[-1] == names
        self._names.append(self._names[-1] if same_names else names)

    def __len__(self) -> int:
        return len(self._names)

    def read(self, index: int) -> State:
        """One of them."""
        return FileTensors(self._path(index), self._names[index])

    def states(self) -> StoredStates:
        """All of them, in the order in which they came."""
        return StoredStates(len(self), self.read)

    def _path(self, index: int) -> Path:
        return Path(self._folder.name) / f"{index}.safetensors"
