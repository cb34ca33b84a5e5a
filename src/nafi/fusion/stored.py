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
from typing import Any, Generic, Self, TypeVar, overload

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nafi.errors import CheckpointError
from nafi.graph import Inputs, named_tensors

State = Mapping[str, Tensor]
T = TypeVar("T")
# A tensor of more bytes is not left mapped: the pages of a file stay in memory as long as it is.
_MAPPED = 2**20


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
    def with_inputs(self, example_inputs: Inputs) -> Self:
        """The same, with inputs by which a network can be made at other widths."""

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


class _Chosen(StoredModels):
    """Some of the networks."""

    def __init__(self, models: StoredModels, chosen: Sequence[int]) -> None:
        self._models, self._chosen = models, chosen

    def __len__(self) -> int:
        return len(self._chosen)

    def tensors(self, index: int) -> State:
        return self._models.tensors(self._chosen[index])

    def outline(self, index: int) -> State:
        return self._models.outline(self._chosen[index])

    def with_inputs(self, example_inputs: Inputs) -> _Chosen:
        return _Chosen(self._models.with_inputs(example_inputs), self._chosen)

    def network(self, index: int) -> nn.Module:
        return self._models.network(self._chosen[index])


def chosen_models(models: Sequence[nn.Module], chosen: Sequence[int]) -> Sequence[nn.Module]:
    """Some of the networks; those in files stay there."""
    if isinstance(models, StoredModels):
        return _Chosen(models, chosen)
    return tuple(models[s] for s in chosen)


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
        try:
            tensor: Tensor = self._file.get_tensor(self._names[name])
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{self._path}: {name} cannot be read: {error}") from None
        if tensor.nbytes > _MAPPED:
            vars(self).pop("_file")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def __getstate__(self) -> dict[str, Any]:
        return {"_path": self._path, "_names": self._names}  # an open file stays where it is

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
            return self.chosen(range(*index.indices(self._count)))
        if not 0 <= index < self._count:
            raise IndexError(index)
        if self._last is None or self._last[0] != index:
            self._last = None  # not two at a time
            self._last = index, self._read(index)
        return self._last[1]

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_last": None}

    def chosen(self, indices: Sequence[int]) -> StoredStates:
        """Those of some networks."""
        read = self._read
        return StoredStates(len(indices), lambda s: read(indices[s]))


class Reread(Sequence[T], Generic[T]):
    """What is made of each of several networks, again whenever it is asked for."""

    def __init__(self, count: int, read: Callable[[int], T]) -> None:
        self._count, self._read = count, read

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._read(s) for s in range(*index.indices(self._count))]
        if not 0 <= index < self._count:
            raise IndexError(index)
        return self._read(index)


class Spill:
    """States that are computed once, written to a temporary folder, and read from there."""

    def __init__(self) -> None:
        self._folder = TemporaryDirectory(prefix="nafi-")
        self._at = Path(self._folder.name)
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
        kept = {name: _alone(state[name]) for name in set(names.values())}
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
        return self._at / f"{index}.safetensors"

    def __getstate__(self) -> dict[str, Any]:
        return {"_at": self._at, "_names": self._names}  # whoever made the folder removes it


def _alone(tensor: Tensor) -> Tensor:
    """The tensor in memory that holds nothing else."""
    tensor = tensor.contiguous()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()
