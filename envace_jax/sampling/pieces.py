"""How tokens that are to be appended become calls of few shapes: in pieces, pieces of like length together."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from models.qwen3 import Qwen3Config

from .buckets import fit, row_batches, row_buckets


class Piece(NamedTuple):
    """One call: right-padded tokens int32[R, T], of the slots `rows` int32[R] (padding: no slot's number)."""

    tokens: np.ndarray
    rows: np.ndarray
    starts: np.ndarray  # int32[R]
    counts: np.ndarray  # int32[R]


@dataclass(frozen=True)
class Pieces:
    """The shapes of an engine of `slots`.

    sizes: lengths of a piece; the last is the longest. most_tokens: of one call, padding included. cheap_tokens: so few
    that a smaller call is not worth a program. whole: a call has one row for every slot, in its place. factor: from one
    number of rows to the next.
    """

    slots: int
    sizes: tuple[int, ...]
    most_tokens: int
    cheap_tokens: int
    whole: bool
    factor: int = 2

    def shapes(self) -> Iterator[tuple[int, int]]:
        """(rows, tokens of each) of every call there can be."""
        for size in self.sizes:
            for rows in [self.slots] if self.whole else row_buckets(*self._limits(size), self.factor):
                yield rows, size

    def split(self, tokens: Mapping[int, np.ndarray], starts: Mapping[int, int]) -> Iterator[Piece]:
        """`tokens` int32[T] by slot, to be appended from `starts` on; to be made in this order."""
        left = {slot: (new, starts[slot]) for slot, new in tokens.items()}
        while left:
            order = sorted(left, key=lambda slot: -len(left[slot][0]))
            while order:
                size = self._size(len(left[order[0]][0]))
                # What is much shorter would be mostly padding here, and goes by itself.
                alike = [s for s in order if 2 * len(left[s][0]) > size or self._size(len(left[s][0])) == size]
                if self.whole:
                    rows, bucket = len(order), self.slots
                else:
                    rows, bucket = self._batch(len(alike), size)
                batch, order = order[:rows], order[rows:]
                place = batch if self.whole else range(rows)
                padded = np.zeros((bucket, size), np.int32)
                index = np.full(bucket, self.slots, np.int32)
                first, counts = np.zeros(bucket, np.int32), np.zeros(bucket, np.int32)
                for at, slot in zip(place, batch, strict=True):
                    new, start = left.pop(slot)
                    piece = new[:size]
                    padded[at, : len(piece)] = piece
                    index[at], first[at], counts[at] = slot, start, len(piece)
                    if len(new) > size:
                        left[slot] = (new[size:], start + size)
                yield Piece(padded, index, first, counts)

    def _size(self, tokens: int) -> int:
        return fit(min(tokens, self.sizes[-1]), self.sizes)

    def _batch(self, count: int, size: int) -> tuple[int, int]:
        """(rows, bucket) of the first call for `count` pieces of `size` tokens, as `row_batches`, bounded by tokens."""
        return next(row_batches(count, *self._limits(size), self.factor))

    def _limits(self, size: int) -> tuple[int, int]:
        """The most and the fewest rows of a call for pieces of `size` tokens."""
        most = 1 << (self.slots - 1).bit_length()
        cheap = 1 << max(0, (self.cheap_tokens // size).bit_length() - 1)
        return min(most, max(1, self.most_tokens // size)), min(cheap, most)


def weights_per_token(config: Qwen3Config) -> int:
    """Weights that a token meets in the layers."""
    heads = (2 * config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return config.num_hidden_layers * config.hidden_size * (heads + 3 * config.intermediate_size)
