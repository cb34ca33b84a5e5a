"""A method of fusion in a package of its own: greedy matching to one of the models.

`pip install examples/method-plugin`, and `nafi.fuse(models, inputs, method="greedy")`,
`nafi fuse --method greedy` and `make_strategy("match-then-average", ..., method="greedy")` know it.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from nafi.fusion import AligningMethod, Alignment, align_to_one
from nafi.options import option, whole


@dataclass(frozen=True, kw_only=True)
class Greedy(AligningMethod):
    """Each neuron goes to the closest neuron of the reference model that is still free.

    reference: the model that all others are aligned to
    """

    name: ClassVar[str] = "greedy"

    reference: int = option(whole(0), 0)

    def align(self, networks, progress):
        networks.check_equal_widths(self.name)
        placements = align_to_one(networks, self.reference, "euclidean", greedy_plan, progress)
        return Alignment(placements, networks.spec.widths)


def greedy_plan(distances):
    """(J, I) distances -> (J, I) ones where a neuron goes, the closest pairs first."""
    plan = np.zeros(distances.shape)
    for place in distances.argsort(axis=None):
        row, column = np.unravel_index(place, plan.shape)
        if not plan[row].any() and not plan[:, column].any():
            plan[row, column] = 1
    return plan
