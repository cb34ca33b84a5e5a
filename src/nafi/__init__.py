"""nafi fuses neural networks that were trained apart into one.

Hides: that names are imported when they are first used, so that `import nafi` and `nafi --help` do
not wait for torch. Promises: every name of `__all__`, and the packages, as attributes of `nafi`.
"""

from typing import TYPE_CHECKING

from nafi.errors import CheckpointError, InputError, NafiError, SpecError
from nafi.lazy import lazy_names
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
    "distill",
    "frontier",
    "fuse",
    "groups",
    "input_moments",
    "load",
    "load_statistics",
    "match",
    "match_path",
    "open_models",
    "save",
    "save_statistics",
    "solve_head",
    "statistics",
]

if TYPE_CHECKING:  # what type checkers and editors see; a test holds it against the table below
    from nafi import checkpoints as checkpoints
    from nafi import federated as federated
    from nafi import fusion as fusion
    from nafi import graph as graph
    from nafi import matching as matching
    from nafi.checkpoints import load, open_models, save
    from nafi.fusion import (
        FusionResult,
        calibrate,
        distill,
        frontier,
        fuse,
        input_moments,
        solve_head,
        statistics,
    )
    from nafi.graph import ModelSpec, groups
    from nafi.matching import Matching, match, match_path
    from nafi.statistics_files import load_statistics, save_statistics
else:
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "checkpoints": ["load", "open_models", "save"],
            "federated": [],
            "fusion": [
                "FusionResult",
                "calibrate",
                "distill",
                "frontier",
                "fuse",
                "input_moments",
                "solve_head",
                "statistics",
            ],
            "graph": ["ModelSpec", "groups"],
            "matching": ["Matching", "match", "match_path"],
            "statistics_files": ["load_statistics", "save_statistics"],
        },
    )
