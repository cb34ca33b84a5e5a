"""nafi fuses neural networks that were trained apart into one."""

from nafi.errors import InputError, NafiError
from nafi.matching import Matching, match, match_path
from nafi.version import __version__

__all__ = ["InputError", "Matching", "NafiError", "__version__", "match", "match_path"]
