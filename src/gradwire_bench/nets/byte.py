"""Language models of bytes."""

from __future__ import annotations

from torch import Tensor, nn

from gradwire_bench.models import GPT2
from gradwire_bench.text import SYMBOLS


class ByteNet(nn.Module):
    """Embedding, one recurrent layer, and a score for each byte that may come next.

    114 k parameters at its defaults.

    Args:
        embedding: Length of the vector that stands for a byte.
        hidden: Units of the recurrent layer.
        recurrence: Its kind.
    """

    def __init__(
        self, embedding: int = 48, hidden: int = 128, recurrence: type[nn.GRU] | type[nn.LSTM] = nn.GRU
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, embedding)
        self.recurrence = recurrence(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, SYMBOLS)

    def forward(self, read: Tensor) -> Tensor:
        """Scores ``float32[B * T, 256]`` of the byte after each of ``read``, ``int64[B, T]``."""
        states, _ = self.recurrence(self.embedding(read))
        scores: Tensor = self.head(states.flatten(0, 1))
        return scores


class ByteGPT(GPT2):
    """GPT-2 in small, over bytes: 0.83 M parameters at its defaults.

    Args:
        width: Of its layers, a multiple of 64.
        layers: How many.
        context: Bytes that it reads at most.
    """

    def __init__(self, width: int = 128, layers: int = 4, context: int = 64) -> None:
        super().__init__(SYMBOLS, context, width, layers)
        nn.init.normal_(self.words.weight, std=0.02)  # the embedding is the head, too: at 1 its scores begin too large
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, read: Tensor) -> Tensor:  # type: ignore[override]
        """Scores ``float32[B * T, 256]`` of the byte after each of ``read``, ``int64[B, T]``."""
        return self.scores(read).flatten(0, 1)
