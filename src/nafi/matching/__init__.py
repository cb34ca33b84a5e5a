"""Bayesian matching of neurons: plain arrays in, no torch and no networks."""

from nafi.matching.api import match, match_path, place
from nafi.matching.columns import Index
from nafi.matching.divergence import DIVERGENCES
from nafi.matching.inputs import Owners, Streamed
from nafi.matching.prior import POPULARITY
from nafi.matching.result import Matching, Sweep

__all__ = [
    "DIVERGENCES",
    "POPULARITY",
    "Index",
    "Matching",
    "Owners",
    "Streamed",
    "Sweep",
    "match",
    "match_path",
    "place",
]
