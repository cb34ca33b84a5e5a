"""Bases that are turned further, until the merged network says what its members say.

Procrustes brings together what layers read; this looks at what comes out.
Hides: the loop, and how rotations are written as free numbers. Promises: maps of each group's
`Freedom`, so no client's function changes; no weight is trained. On the inputs that are held out,
the plain mean of the weights is never further from the ensemble than it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from nafi.fusion.imitation import imitate
from nafi.fusion.merge import merge_tensors
from nafi.fusion.method import Alignment, Progress
from nafi.fusion.networks import Networks
from nafi.graph import Freedom, Placement, Placements, Rotated

STEPS = 200
_RATE = 0.01  # of Adam; angles are in radians
_BATCH = 32


def learn_bases(
    networks: Networks, alignment: Alignment, progress: Progress, seed: int
) -> Alignment:
    """The same alignment with its rotations learnt on the probe; as it is, if it has none.

    Cost: `STEPS` times a merge of all clients and a training step of the fused network on a few
    inputs, and in every step the exponential of each rotation's matrix.
    """
    assert networks.probe is not None
    turning = _Turning(networks, alignment)
    if not len(turning.angles):
        return alignment
    imitate(
        turning,
        networks.clients,
        networks.probe,
        lambda step: progress("turning bases", step, STEPS),
        steps=STEPS,
        rate=_RATE,
        batch=_BATCH,
        seed=seed,
    )
    with torch.no_grad():
        placements = turning.placements(torch.float64)
    return Alignment(placements, alignment.widths, alignment.matchings)


class _Turning(nn.Module):
    """The merged network as a function of how its members' bases are turned.

    angles: for each rotation but those of the first client, by rank, the numbers of a matrix whose
        antisymmetric part is the turn
    """

    def __init__(self, networks: Networks, alignment: Alignment) -> None:
        super().__init__()
        self._networks, self._alignment = networks, alignment
        with torch.no_grad():
            merged = self._merged(alignment.placements)
            # In a tuple, or its weights would count as parameters of this module.
            self._fused = (networks.merging.build(merged, alignment.widths),)
        first = networks.ranking[0]
        self._turned = [
            (s, group, place.matrix)
            for s, places in enumerate(alignment.placements)
            for group, place in places.items()
            if isinstance(place, Rotated) and s != first
        ]
        self.angles = nn.ParameterList(
            torch.zeros(matrix.shape, dtype=torch.float32) for _, _, matrix in self._turned
        )

    def placements(self, dtype: torch.dtype) -> list[dict[str, Placement]]:
        """Where neurons go, with the bases turned as far as they are now."""
        places = [dict(of_client) for of_client in self._alignment.placements]
        for (s, group, matrix), angles in zip(self._turned, self.angles, strict=True):
            turn = _rotation(angles.to(dtype), self._networks.freedom(group))
            places[s][group] = Rotated(matrix.to(dtype) @ turn)
        return places

    def forward(self, *inputs: Any, **named: Any) -> Any:
        merged = self._merged(self.placements(torch.float32))
        return functional_call(self._fused[0], merged, inputs, named)

    def _merged(self, placements: Sequence[Placements]) -> dict[str, Tensor]:
        """The plain mean, as it is merged where bases were learnt."""
        return merge_tensors(self._networks.merging, placements, restore_norm=False)


def _rotation(angles: Tensor, freedom: Freedom) -> Tensor:
    """(..., J, J) the exponential of the antisymmetric part, which is a rotation."""
    skew = angles - angles.mT
    if freedom is Freedom.MEAN:
        # A turn of what is left without the mean leaves the mean alone.
        skew = skew - skew.mean(dim=-1, keepdim=True)
        skew = skew - skew.mean(dim=-2, keepdim=True)
    rotation: Tensor = torch.linalg.matrix_exp(skew)
    return rotation
