"""Inputs for a network of transformers, made up from its configuration.

Hides: what configurations call the sizes of words and images. Promises: a batch on which the
network runs, the same every time, or an error that says what to write instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from nafi.errors import InputError
from nafi.graph import call, evaluating, first_line

_WORDS = 8  # of a text
_PIXELS = 2**26  # at most, in all images of a batch
_POSITIONS = ("max_position_embeddings", "n_positions", "n_ctx", "max_target_positions")
_SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


def make_inputs(model: nn.Module) -> dict[str, Tensor]:
    """Keyword arguments of a network's forward: words, pixels, or both."""
    trouble = "it takes neither words nor pixels"
    for batch in (2, 1):  # some heads need a padding token for more than one text
        inputs = _made_up(model, batch)
        if not inputs:
            break
        try:
            with evaluating(model):
                call(model, inputs)
            return inputs
        except Exception as error:  # the network's own code
            trouble = first_line(error)
    raise InputError(
        f"inputs of {type(model).__name__} cannot be made up from its configuration: {trouble}; "
        "write a factory with a function example_inputs() beside it, and give --model"
    )


def _made_up(model: nn.Module, batch: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    config, names = model.config, inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", "")
    inputs: dict[str, Tensor] = {}
    if main == "input_ids" and "input_ids" in names:
        words = _words(getattr(config, "text_config", config), batch, generator)
        inputs["input_ids"] = words
        if "attention_mask" in names:
            inputs["attention_mask"] = torch.ones_like(words)
        if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in names:
            inputs["decoder_input_ids"] = words.flip(1)
    both = hasattr(config, "vision_config")
    if "pixel_values" in names and (main == "pixel_values" or both):
        dtype = next(model.parameters()).dtype
        pixels = _pixels(getattr(config, "vision_config", config), batch, generator)
        inputs["pixel_values"] = pixels.to(dtype)
    return inputs


def _words(config: Any, batch: int, generator: torch.Generator) -> Tensor:
    """Numbers of words, none of them special."""
    vocabulary = int(config.vocab_size)
    known = [getattr(config, name, None) for name in _POSITIONS]
    longest = min([size for size in known if isinstance(size, int) and size > 0], default=_WORDS)
    length = max(1, min(_WORDS, longest - 2))  # two places are taken where counting begins at 2
    special = {getattr(config, name, None) for name in _SPECIAL}
    plain = [word for word in range(min(vocabulary, 2**16)) if word not in special] or [0]
    picked = torch.randint(len(plain), (batch, length), generator=generator)
    return torch.tensor(plain)[picked]


def _pixels(config: Any, batch: int, generator: torch.Generator) -> Tensor:
    size = getattr(config, "image_size", None) or 224  # networks of convolutions do not say
    if isinstance(size, Mapping):
        size = (size["height"], size["width"])
    height, width = size if isinstance(size, list | tuple) else (size, size)
    shape = (batch, getattr(config, "num_channels", 3), int(height), int(width))
    if prod(shape) > _PIXELS:
        raise InputError(
            f"config.json asks for images of {' x '.join(map(str, shape[1:]))} numbers; write a "
            "factory with a function example_inputs() beside it, and give --model"
        )
    return torch.randn(shape, generator=generator)
