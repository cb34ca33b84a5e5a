"""nafi fuses neural networks that were trained apart into one."""

from nafi.errors import InputError, NafiError, SpecError
from nafi.graph import ModelSpec, groups
from nafi.matching import Matching, match, match_path
from nafi.version import __version__

__all__ = [
    "InputError",
    "Matching",
    "ModelSpec",
    "NafiError",
    "SpecError",
    "__version__",
    "groups",
    "match",
    "match_path",
]
