"""Hugging Face folders: networks of transformers with their configuration; needs nafi[hf]."""

from nafi.huggingface.folders import (
    is_folder,
    read_config,
    read_weights,
    unlike_companions,
)
from nafi.huggingface.inputs import make_inputs
from nafi.huggingface.networks import (
    FolderWarning,
    fill_network,
    is_pretrained,
    load_folder,
    make_network,
    outline,
)
from nafi.huggingface.widths import is_filled_up, limited, width_fields
from nafi.huggingface.writing import config_of, save_folder

__all__ = [
    "FolderWarning",
    "config_of",
    "fill_network",
    "is_filled_up",
    "is_folder",
    "is_pretrained",
    "limited",
    "load_folder",
    "make_inputs",
    "make_network",
    "outline",
    "read_config",
    "read_weights",
    "save_folder",
    "unlike_companions",
    "width_fields",
]
