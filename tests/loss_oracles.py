"""Batches and NumPy loops that the tests of the losses share."""

from __future__ import annotations

import numpy as np

TOKEN_LOSS, LOSS_MASK = np.array([[1, 2, 3], [4, 0, 0]]), np.array([[1, 1, 1], [1, 0, 0]])
GOLDEN = {
    "token-mean": 2.5,
    "token-sum": 10,
    "seq-mean-token-sum": 5,
    "seq-mean-token-mean": 3,
    "seq-mean-token-sum-norm": 1.666667,
}
"""What each aggregation makes of TOKEN_LOSS under LOSS_MASK."""


def loop_aggregate(loss, mask, aggregation, norm_length):
    rows = [[x for x, m in zip(*row) if m] for row in zip(loss, mask)]
    rows = [row for row in rows if row]
    total = sum(sum(row) for row in rows)
    return {
        "token-mean": total / sum(map(len, rows)),
        "token-sum": total,
        "seq-mean-token-sum": total / len(rows),
        "seq-mean-token-mean": sum(sum(row) / len(row) for row in rows) / len(rows),
        "seq-mean-token-sum-norm": total / norm_length / len(rows),
    }[aggregation]


def sample(seed=0, shape=(8, 6)):
    """Three arrays of normal numbers and a mask with gaps: a full row, an empty one, one with one token."""
    rng = np.random.default_rng(seed)
    logprobs, old, advantages = rng.normal(size=(3, *shape)).astype(np.float32)
    mask = rng.random(shape) < 0.6
    mask[0], mask[1], mask[2] = True, False, np.arange(shape[1]) < 1
    return logprobs, old, advantages, mask
