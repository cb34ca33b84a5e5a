"""Networks in files and in Hugging Face folders."""

from nafi.checkpoints.clients import ClientFiles, load_clients
from nafi.checkpoints.loading import load, read
from nafi.checkpoints.prefixes import PrefixWarning
from nafi.checkpoints.saving import save, save_changed

__all__ = [
    "ClientFiles",
    "PrefixWarning",
    "load",
    "load_clients",
    "read",
    "save",
    "save_changed",
]
