"""Packing of sequences into rows: exact on a hand example, first fit, round trip, errors."""

from __future__ import annotations

import numpy as np
import pytest

from vcppo_jax.data.packing import Packing, PackShape, pack_shape, place_sequences

PROMPTS = [[11, 12], [21], [31, 32, 33], [41]]
RESPONSES = np.array([[13, 14, 15], [22, 23, 99], [34, 35, 99], [42, 99, 99]], np.int32)
LENGTHS = np.array([3, 2, 2, 1], np.int32)


def hand_example(micro_batches: int = 3, rows: int = 1) -> Packing:
    shape = PackShape(micro_batches, rows, 8)
    return Packing(PROMPTS, RESPONSES, LENGTHS, shape)


def test_hand_example_is_packed_exactly():
    # Lengths 5, 3, 5, 2: the fives open two rows, the three and the two fill them up.
    batch = hand_example().batch({"advantages": RESPONSES / 10})
    expected = {
        "tokens": [[11, 12, 13, 14, 15, 21, 22, 23], [31, 32, 33, 34, 35, 41, 42, 0]],
        "positions": [[0, 1, 2, 3, 4, 0, 1, 2], [0, 1, 2, 3, 4, 0, 1, 0]],
        "segment_ids": [[1, 1, 1, 1, 1, 2, 2, 2], [1, 1, 1, 1, 1, 2, 2, 0]],
        "targets": [[12, 13, 14, 15, 0, 22, 23, 0], [32, 33, 34, 35, 0, 42, 0, 0]],
        "mask": [[0, 1, 1, 1, 0, 1, 1, 0], [0, 0, 1, 1, 0, 1, 0, 0]],
    }
    for name, rows in expected.items():
        found = np.asarray(getattr(batch, name))
        assert found.shape == (3, 1, 8)
        np.testing.assert_array_equal(found[:2, 0], rows, err_msg=name)
        assert not found[2].any(), name
    advantages = [[0, 1.3, 1.4, 1.5, 0, 2.2, 2.3, 0], [0, 0, 3.4, 3.5, 0, 4.2, 0, 0]]
    np.testing.assert_allclose(batch.fields["advantages"][:2, 0], advantages, rtol=1e-6)
    assert batch.fields["advantages"].dtype == np.float32
    assert batch.mask.dtype == np.float32
    assert batch.tokens.dtype == np.int32


def test_counts_of_micro_batches_and_tokens():
    assert hand_example().micro_batches == 2
    assert hand_example(2, 2).micro_batches == 1
    assert hand_example().tokens == 15


def test_a_field_sits_where_its_token_is_the_target():
    batch = hand_example().batch({"token": RESPONSES})
    on = np.asarray(batch.mask) > 0
    np.testing.assert_array_equal(np.asarray(batch.fields["token"])[on], np.asarray(batch.targets)[on])
    assert not np.asarray(batch.fields["token"])[~on].any()


@pytest.mark.parametrize("row_tokens", [12, 17, 40])
def test_scatter_and_gather_are_inverse(row_tokens):
    rng = np.random.default_rng(0)
    prompts = [rng.integers(1, 50, n).tolist() for n in rng.integers(1, 5, 20)]
    lengths = rng.integers(1, 9, 20)
    responses = rng.integers(1, 50, (20, 8)).astype(np.int32)
    shape = pack_shape(sequences=20, row_tokens=row_tokens, micro_batch_tokens=64, shards=2)
    packing = Packing(prompts, responses, lengths, shape)
    field = rng.normal(size=(20, 8)).astype(np.float32)
    back = packing.gather(packing.batch({"x": field}).fields["x"])
    valid = np.arange(8)[None] < lengths[:, None]
    np.testing.assert_array_equal(back, np.where(valid, field, 0))
    assert back.dtype == np.float32


def test_first_fit_in_decreasing_order():
    # 12 and 10 open rows of 20; 9 fits only behind the 10; 1 goes to the first row with room, not the best.
    rows, offsets = place_sequences(np.array([1, 9, 12, 10]), 20)
    np.testing.assert_array_equal(rows, [0, 1, 0, 1])
    np.testing.assert_array_equal(offsets, [12, 10, 0, 0])


def test_rows_of_equal_lengths_keep_the_order_given():
    rows, offsets = place_sequences(np.array([4, 4, 4]), 8)
    np.testing.assert_array_equal(rows, [0, 0, 1])
    np.testing.assert_array_equal(offsets, [0, 4, 0])


def test_a_sequence_longer_than_a_row_is_named():
    with pytest.raises(ValueError, match="sequence 2 has 9 tokens, a row holds 8"):
        place_sequences(np.array([3, 8, 9]), 8)


def test_more_rows_than_the_shape_has_are_refused():
    with pytest.raises(ValueError, match="2 rows do not fit into 1 x 1"):
        hand_example(1, 1)


@pytest.mark.parametrize(
    ("sequences", "budget", "shards", "expected"),
    [
        (8, 80, 1, (1, 8)),
        (8, 40, 1, (2, 4)),
        (8, 10, 1, (8, 1)),
        (8, 5, 1, (8, 1)),  # a row at least
        (8, 35, 2, (4, 2)),  # a multiple of the shards
        (8, 10, 4, (2, 4)),  # one row per shard, although the budget holds one
        (3, 1000, 1, (1, 3)),  # no more rows than sequences
        (3, 1000, 4, (1, 4)),
        (9, 40, 1, (3, 4)),
    ],
)
def test_pack_shape(sequences, budget, shards, expected):
    shape = pack_shape(sequences=sequences, row_tokens=10, micro_batch_tokens=budget, shards=shards)
    assert (shape.micro_batches, shape.rows, shape.row_tokens) == (*expected, 10)


def test_rows_of_very_different_lengths_are_nearly_full():
    """512 responses, log-normal: median 200, 99th percentile 2000, at most 2048 tokens."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(np.exp(np.log(200) + 0.99 * rng.normal(size=512)), 2048).astype(int)
    prompts = [[1] * n for n in rng.integers(40, 200, 512)]
    shape = pack_shape(sequences=512, row_tokens=2304, micro_batch_tokens=4 * 2304, shards=1)
    packing = Packing(prompts, np.zeros((512, 2048), np.int32), lengths, shape)
    assert packing.efficiency == packing.tokens / (packing.micro_batches * 4 * 2304)
    assert packing.efficiency > 0.97
    assert hand_example().efficiency == 15 / 16
