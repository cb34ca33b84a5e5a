"""nafi fuses neural networks that were trained apart into one."""

from nafi.checkpoints import load, save
from nafi.errors import CheckpointError, InputError, NafiError, SpecError
from nafi.fusion import FusionResult, calibrate, fuse, input_moments
from nafi.graph import ModelSpec, groups
from nafi.matching import Matching, match, match_path
from nafi.version import __version__

__all__ = [
    "CheckpointError",
    "FusionResult",
    "InputError",
    "Matching",
    "ModelSpec",
    "NafiError",
    "SpecError",
    "__version__",
    "calibrate",
    "fuse",
    "groups",
    "input_moments",
    "load",
    "match",
    "match_path",
    "save",
]
