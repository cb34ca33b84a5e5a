"""Networks in files and in Hugging Face folders."""

from nafi.checkpoints.clients import (
    ClientFiles,
    ClientOutlines,
    load_clients,
    outline_clients,
)
from nafi.checkpoints.loading import load, read
from nafi.checkpoints.prefixes import PrefixWarning
from nafi.checkpoints.saving import save, save_changed

__all__ = [
    "ClientFiles",
    "ClientOutlines",
    "PrefixWarning",
    "load",
    "load_clients",
    "outline_clients",
    "read",
    "save",
    "save_changed",
]
