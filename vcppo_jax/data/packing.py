"""Packs sequences of different lengths into rows of one length, and per-token numbers with them.

All on the host, in NumPy. A row holds whole sequences one after the other, told apart by segment ids; rows
are grouped into micro-batches of one static shape, of which only as many are run as hold something.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from vcppo_jax.types import PackedBatch


@dataclasses.dataclass(frozen=True)
class PackShape:
    """The static shape [M, R, L] of a packed batch."""

    micro_batches: int
    rows: int
    row_tokens: int


def pack_shape(
    *, sequences: int, row_tokens: int, micro_batch_tokens: int, shards: int, length_shards: int = 1
) -> PackShape:
    """The shape that holds `sequences` sequences even if each needs a row of its own.

    L is `row_tokens` rounded up to a multiple of `length_shards`, the parts that the length axis is split
    into. A micro-batch has at most `micro_batch_tokens` tokens, and R is a multiple of `shards`, the parts of
    the batch axis (at least one row each, also where that breaks the token budget).
    """
    row_tokens = -(-row_tokens // length_shards) * length_shards
    rows = max(1, micro_batch_tokens // row_tokens // shards) * shards
    rows = min(rows, -(-sequences // shards) * shards)
    return PackShape(-(-sequences // rows), rows, row_tokens)


def place_sequences(lengths: np.ndarray, row_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """(row, offset) of each sequence: first fit in decreasing order of length, ties in the order given.

    Raises ValueError, naming the sequence, where one is longer than a row.
    """
    if lengths.size and lengths.max() > row_tokens:
        index = int(lengths.argmax())
        raise ValueError(f"pack: sequence {index} has {lengths[index]} tokens, a row holds {row_tokens}")
    free = np.full(len(lengths), row_tokens)
    rows, offsets = np.zeros(len(lengths), np.int64), np.zeros(len(lengths), np.int64)
    for i in np.argsort(-lengths, kind="stable"):
        row = int(np.argmax(free >= lengths[i]))
        rows[i], offsets[i] = row, row_tokens - free[row]
        free[row] -= lengths[i]
    return rows, offsets


class Packing:
    """Where each response token of B sequences is predicted in the packed rows.

    `prompts` are token ids, at least one each; `responses` [B, T] and `lengths` [B] as in `Rollout`.
    """

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        responses: np.ndarray,
        lengths: np.ndarray,
        shape: PackShape,
    ) -> None:
        self.shape = shape
        prompt_lengths = np.asarray([len(prompt) for prompt in prompts])
        total = prompt_lengths + lengths
        rows, offsets = place_sequences(total, shape.row_tokens)
        used = int(rows.max()) + 1
        self.micro_batches = -(-used // shape.rows)
        """How many of the M micro-batches hold anything."""
        if self.micro_batches > shape.micro_batches:
            raise ValueError(f"pack: {used} rows do not fit into {shape.micro_batches} x {shape.rows}")
        self.lengths = total
        """[B], tokens of each sequence, prompt included."""
        self.tokens = int(total.sum())
        """Real tokens, prompts included."""
        self.efficiency = self.tokens / (self.micro_batches * shape.rows * shape.row_tokens)
        """Share of the positions computed that hold a token."""
        size = (shape.micro_batches * shape.rows, shape.row_tokens)
        tokens, positions, segments = (np.zeros(size, np.int32) for _ in range(3))
        targets, self._mask = np.zeros(size, np.int32), np.zeros(size, np.float32)
        next_segment = np.zeros(size[0], np.int32)
        for i in np.lexsort((offsets, rows)):
            row, start, stop = rows[i], offsets[i], offsets[i] + total[i]
            sequence = np.concatenate([prompts[i], responses[i, : lengths[i]]])
            next_segment[row] += 1
            tokens[row, start:stop] = sequence
            positions[row, start:stop] = np.arange(total[i])
            segments[row, start:stop] = next_segment[row]
            targets[row, start : stop - 1] = sequence[1:]
        # Response token t is predicted at position P - 1 + t of its sequence.
        self._valid = np.arange(responses.shape[1])[None] < lengths[:, None]
        first = rows * shape.row_tokens + offsets + prompt_lengths - 1
        self._flat = (first[:, None] + np.arange(responses.shape[1])[None])[self._valid]
        self._mask.reshape(-1)[self._flat] = 1.0
        self._arrays = (tokens, positions, segments, targets)

    def batch(self, fields: Mapping[str, np.ndarray]) -> PackedBatch:
        """The packed batch [M, R, L] with per-token `fields` [B, T] put where their tokens are predicted."""
        tokens, positions, segments, targets = map(self._split, self._arrays)
        packed = {name: self._split(self._scatter(np.asarray(field))) for name, field in fields.items()}
        mask = self._split(self._mask)
        return PackedBatch(tokens, positions, segments, targets, mask, packed)  # type: ignore[arg-type]

    def gather(self, packed: np.ndarray) -> np.ndarray:
        """[B, T] float32 of packed per-token numbers [M, R, L]; 0 beyond each response."""
        out = np.zeros(self._valid.shape, np.float32)
        out[self._valid] = np.asarray(packed).reshape(-1)[self._flat]
        return out

    def _scatter(self, field: np.ndarray) -> np.ndarray:
        out = np.zeros(self._mask.shape, np.float32)
        out.reshape(-1)[self._flat] = field[self._valid]
        return out

    def _split(self, x: np.ndarray) -> np.ndarray:
        return x.reshape(self.shape.micro_batches, self.shape.rows, self.shape.row_tokens)
