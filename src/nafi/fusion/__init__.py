"""S models in, one model out; uses `matching` and `graph`."""

from nafi.fusion.api import Validate, fuse
from nafi.fusion.averaging import FedAvg
from nafi.fusion.bayesian import Bayesian, Nafi, Pfnm
from nafi.fusion.ensemble import Ensemble
from nafi.fusion.method import AligningMethod, Alignment, Method, Progress
from nafi.fusion.moments import input_moments
from nafi.fusion.networks import FusionWarning
from nafi.fusion.rebasin import Rebasin
from nafi.fusion.registry import METHODS, make_method, method_names, option_names
from nafi.fusion.result import FusionResult
from nafi.fusion.transport import Transport, align_to_one
from nafi.graph import calibrate

__all__ = [
    "METHODS",
    "AligningMethod",
    "Alignment",
    "Bayesian",
    "Ensemble",
    "FedAvg",
    "FusionResult",
    "FusionWarning",
    "Method",
    "Nafi",
    "Pfnm",
    "Progress",
    "Rebasin",
    "Transport",
    "Validate",
    "align_to_one",
    "calibrate",
    "fuse",
    "input_moments",
    "make_method",
    "method_names",
    "option_names",
]
