"""What a client is asked to sum over its own samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Precision = Literal["float64", "float32", "float16"]
PRECISIONS: tuple[str, ...] = get_args(Precision)


@dataclass(frozen=True)
class Request:
    """Sums of METHOD's section 6; `nafi.federated.statistics` computes and reads them.

    head: of what the last layer reads, with labels
    inputs: weights; of what their layers read, without labels
    outputs: also of what the client's own network, in the task's extras, writes there
    precision: of second moments. Sums in float64 can be added up as they are, as secure
        aggregation does; float32 and float16 take a half and a quarter of the bytes
    """

    head: bool = False
    inputs: tuple[str, ...] = ()
    outputs: bool = False
    precision: Precision = "float32"

    def __bool__(self) -> bool:
        return self.head or bool(self.inputs)
