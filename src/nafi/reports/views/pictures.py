"""The view of what methods make of a few samples."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nafi.reports import figures
from nafi.reports.records import TextTable, in_order
from nafi.reports.views.material import Material, Picture, view

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@view("pictures")
def _pictures(material: Material) -> Iterator[TextTable | Figure]:
    """What each method makes of a few samples, of the first trial with the fewest clients."""
    drawn = [r for r in material.records if r.get("pictures")]
    fewest = min((r["clients"] for r in drawn), default=0)
    shown = [r for r in drawn if r["clients"] == fewest and r["trial"] == 0]
    if not shown:
        return
    samples = [picture["sample"] for picture in shown[0]["pictures"]]
    columns: dict[str, Sequence[Picture | None]] = {}
    if material.photos is not None:
        pairs = [material.photos(sample, shown[0]["config"]) for sample in samples]
        columns = {"photo": [photo for photo, _ in pairs], "mask": [mask for _, mask in pairs]}
    by_method = {r["method"]: r["pictures"] for r in shown}
    for method in in_order(by_method):
        columns[method] = [_unpacked(picture) for picture in by_method[method]]
    yield figures.pictures_figure(columns, len(samples))


def _unpacked(picture: Mapping[str, Any]) -> Picture:
    height, width = picture["shape"]
    bits = np.frombuffer(base64.b64decode(picture["bits"]), dtype=np.uint8)
    return np.unpackbits(bits)[: height * width].reshape(height, width)
