"""S models in, one model out; uses `matching` and `graph`."""

from nafi.fusion.api import fuse
from nafi.fusion.base import FUSERS, FusionResult
from nafi.fusion.calibration import calibrate
from nafi.fusion.moments import input_moments
from nafi.fusion.widths import FusionWarning

__all__ = ["FUSERS", "FusionResult", "FusionWarning", "calibrate", "fuse", "input_moments"]
