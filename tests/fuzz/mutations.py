"""Bytes and plain data that are almost right; the simplest case, tried first, is left as it is."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    -(2**70),
    1e308,
    float("nan"),
    float("inf"),
    "",
    "nafi",
    "x" * 300,
    "\ud800",
    "../../etc",
    [],
    [[]],
    [None],
    [-1, 2**40],
    {},
    {"": None},
]


def junk() -> st.SearchStrategy[Any]:
    return st.one_of(
        st.sampled_from(ODD),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.lists(st.integers(), max_size=4),
    )


@st.composite
def edited_bytes(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with a few bytes changed, taken out or put in, most of them near the start."""
    found = bytearray(content)
    for _ in range(draw(st.integers(0, 4))):
        near = min(len(found), draw(st.sampled_from([8, 64, 4096, len(found)])))
        place = draw(st.integers(0, max(0, near - 1)))
        match draw(st.sampled_from(["set", "cut", "put", "end"])):
            case "set" if found:
                found[place] = draw(st.integers(0, 255))
            case "cut":
                del found[place : place + draw(st.integers(1, 64))]
            case "put":
                found[place:place] = draw(st.binary(min_size=1, max_size=16))
            case "end":
                del found[place:]
    return bytes(found)


@st.composite
def edited(draw: st.DrawFn, data: Any) -> Any:
    """Plain data with one or two of its values replaced, taken out or named otherwise."""
    found = json.loads(json.dumps(data))
    for _ in range(draw(st.integers(0, 2))):
        found = _edit(draw, found)
    return found


def _edit(draw: st.DrawFn, data: Any) -> Any:
    if isinstance(data, dict) and data and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(data)))
        match draw(st.sampled_from(["deeper", "deeper", "cut", "rename"])):
            case "deeper":
                return {**data, key: _edit(draw, data[key])}
            case "cut":
                return {k: v for k, v in data.items() if k != key}
            case _:
                return {(draw(st.text(max_size=8)) if k == key else k): v for k, v in data.items()}
    if isinstance(data, list) and data and draw(st.integers(0, 4)):
        place = draw(st.integers(0, len(data) - 1))
        return [*data[:place], _edit(draw, data[place]), *data[place + 1 :]]
    return draw(junk())


def with_header(content: bytes, header: Any) -> bytes:
    """A safetensors file with another header, however wrong."""
    length = int.from_bytes(content[:8], "little")
    told = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(told).to_bytes(8, "little") + told + content[8 + length :]


def header_of(content: bytes) -> Any:
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length])


@st.composite
def edited_safetensors(draw: st.DrawFn, content: bytes) -> bytes:
    """Wrong bytes, a wrong header, a wrong table within the header, or other numbers."""
    kind = draw(st.sampled_from(["bytes", "header", "table", "numbers"]))
    if kind == "bytes":
        return draw(edited_bytes(content))
    if kind == "numbers":
        found = bytearray(content)
        start = 8 + int.from_bytes(content[:8], "little")
        for _ in range(draw(st.integers(1, 4))):
            found[draw(st.integers(start, len(found) - 1))] = draw(st.integers(0, 255))
        return bytes(found)
    header = header_of(content)
    if kind == "header":
        return with_header(content, draw(edited(header)))
    (key,) = set(header["__metadata__"]) - {"sha256"}  # a checksum beside it, in checkpoints
    header["__metadata__"][key] = json.dumps(draw(edited(json.loads(header["__metadata__"][key]))))
    return with_header(content, header)
