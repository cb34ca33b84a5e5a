"""The tables and figures that a report can show, by name.

Hides: how each is made of records. Promises: every number is a function of the records; a view that
has nothing to show of them shows nothing, so any view goes with any experiment.
"""

from nafi.reports.views import attacks, pictures, rounds, scores, sizes
from nafi.reports.views.material import USUAL, VIEWS, Material, Photos, check_views

__all__ = [
    "USUAL",
    "VIEWS",
    "Material",
    "Photos",
    "attacks",
    "check_views",
    "pictures",
    "rounds",
    "scores",
    "sizes",
]
