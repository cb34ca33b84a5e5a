"""Networks for sequences: an LSTM and transformers.

Promises: a network and its first weights depend on the generator alone; widths are listed in the
order of `nafi.groups`, so that a fused network can be built anew at its widths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nafi.experiments.text import CHARACTERS, LENGTH

_SPREAD = 0.02  # of a transformer's first weights, as in GPT-2


class CharacterLSTM(nn.Module):
    """An embedding, one LSTM, and the character after the last one: the network of FedMA's code.

    widths: of the embedding and of the LSTM
    """

    def __init__(self, widths: Sequence[int] = (8, 256), characters: int = len(CHARACTERS)) -> None:
        super().__init__()
        embedding, hidden = widths
        self.embed = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.lstm(self.embed(x))[0][:, -1])
        return outputs


class Block(nn.Module):
    """Attention, then two layers, each on what is normalised of the stream and added to it."""

    def __init__(self, width: int, widths: Sequence[int], causal: bool) -> None:
        """widths: heads, width of queries and of values within each, and hidden units."""
        super().__init__()
        heads, inner, value, hidden = widths
        self.heads, self.causal = heads, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, heads * inner), nn.Linear(width, heads * inner)
        self.value, self.out = nn.Linear(width, heads * value), nn.Linear(heads * value, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        query, key, value = (
            layer(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        added: Tensor = x + self.down(F.gelu(self.up(self.norm2(x))))
        return added


def _blocks(width: int, widths: Sequence[int], causal: bool) -> nn.Sequential:
    """widths: those of each block, one after the other."""
    each = [widths[start : start + 4] for start in range(0, len(widths), 4)]
    return nn.Sequential(*[Block(width, of_block, causal) for of_block in each])


def _draw(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, 0.0, _SPREAD)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)


class GPT(nn.Module):
    """A transformer that predicts each next character; embedding and head are not tied.

    widths: of the stream, then heads, queries, values and hidden units of each block
    """

    def __init__(self, widths: Sequence[int], characters: int = len(CHARACTERS)) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, widths[0])
        self.places = nn.Parameter(torch.zeros(LENGTH, widths[0]))
        self.blocks = _blocks(widths[0], widths[1:], causal=True)
        self.norm = nn.LayerNorm(widths[0])
        self.head = nn.Linear(widths[0], characters)
        _draw(self)
        nn.init.normal_(self.places, 0.0, _SPREAD)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.head(self.norm(self.blocks(self.embed(x) + self.places)))
        return outputs


class ViT(nn.Module):
    """A vision transformer: patches of an image, their mean at the end.

    widths: of the stream, then heads, queries, values and hidden units of each block
    """

    def __init__(
        self, widths: Sequence[int], classes: int = 10, size: int = 32, patch: int = 4
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, widths[0], patch, patch)
        self.places = nn.Parameter(torch.zeros((size // patch) ** 2, widths[0]))
        self.blocks = _blocks(widths[0], widths[1:], causal=False)
        self.norm = nn.LayerNorm(widths[0])
        self.head = nn.Linear(widths[0], classes)
        _draw(self)
        nn.init.normal_(self.places, 0.0, _SPREAD)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        outputs: Tensor = self.head(self.norm(self.blocks(x)).mean(dim=1))
        return outputs


def transformer_widths(width: int, heads: int, blocks: int) -> list[int]:
    """The usual widths: hidden layers four times as wide as the stream."""
    inner = width // heads
    return [width, *[heads, inner, inner, 4 * width] * blocks]
