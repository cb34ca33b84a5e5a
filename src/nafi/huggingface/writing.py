"""Writing a network as a Hugging Face folder.

Hides: how transformers writes configuration and weights. Promises: a folder that stock
`from_pretrained` reads and from which the same network comes back, or nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from nafi.comparison import check_written
from nafi.files import atomic_folder
from nafi.graph import Inputs, ModelSpec, groups
from nafi.huggingface.folders import copy_companions, is_weights
from nafi.huggingface.inputs import make_inputs
from nafi.huggingface.networks import load_folder, quiet
from nafi.huggingface.widths import expressed, says_widths


def config_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of a network of transformers, as config.json would have it."""
    config: Any = model.config
    values: dict[str, Any] = config.to_diff_dict()
    return {**values, "architectures": [type(model).__name__]}


def save_folder(
    model: nn.Module,
    target: Path,
    *,
    spec: ModelSpec | None = None,
    example_inputs: Inputs | None = None,
    files_from: Path | None = None,
    texts: Mapping[str, str] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a network as transformers does, and read it again before the folder takes its name.

    spec: the groups of the network at its widths, if they are known
    files_from: a folder whose tokenizer and preprocessor files are copied
    texts: other files to write, by name
    """
    inputs = make_inputs(model) if example_inputs is None else example_inputs
    written: Any = model
    if not says_widths(model):
        written = expressed(model, groups(model, inputs) if spec is None else spec)
    with atomic_folder(target, overwrite=overwrite, replaced=is_weights) as partial:
        with quiet(str(target), "transformers cannot write it"):
            written.save_pretrained(partial)
        if files_from is not None:
            copy_companions(files_from, partial)
        for name, text in (texts or {}).items():
            (partial / name).write_text(text, encoding="utf-8")
        check_written(partial, target, load_folder, model, inputs)
