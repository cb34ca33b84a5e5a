"""Networks in files and in Hugging Face folders."""

from nafi.checkpoints.clients import (
    ClientFiles,
    ClientOutlines,
    load_clients,
    open_clients,
    outline_clients,
)
from nafi.checkpoints.loading import load, read
from nafi.checkpoints.prefixes import PrefixWarning
from nafi.checkpoints.saving import save, save_changed
from nafi.checkpoints.stored import FileModels, open_models

__all__ = [
    "ClientFiles",
    "ClientOutlines",
    "FileModels",
    "PrefixWarning",
    "load",
    "load_clients",
    "open_clients",
    "open_models",
    "outline_clients",
    "read",
    "save",
    "save_changed",
]
