"""Mini-batches: which samples, which weights, and what joins them."""

import numpy as np
import pytest

from vcppo_jax.data.packing import PackShape
from vcppo_jax.train.minibatches import Samples, mini_batches

LENGTHS = np.array([4, 2, 3, 1])
ROWS = np.arange(4, dtype=np.float32)[:, None] + np.zeros((4, 4), np.float32)


def shape_for(count):
    return PackShape(1, count, 8)


@pytest.fixture
def samples():
    prompts = [[1] * n for n in (2, 1, 3, 4)]
    return Samples(prompts, np.arange(16, dtype=np.int32).reshape(4, 4), LENGTHS, shape_for)


def batches(samples, size=2, **options):
    given = {"epochs": 1, "aggregation": "token-mean", "norm_length": 4, "seed": (0, 1)} | options
    return list(mini_batches(samples, {"row": ROWS}, mini_batch_size=size, **given))


def rows_of(fields):
    return fields["row"][:, 0].astype(int).tolist()


def test_each_pass_has_every_sample_once_in_an_order_of_its_own(samples):
    two = batches(samples, epochs=2)
    orders = [[row for _, fields in two[k : k + 2] for row in rows_of(fields)] for k in (0, 2)]
    assert [sorted(order) for order in orders] == [[0, 1, 2, 3]] * 2
    assert orders[0] != orders[1]
    again = batches(samples, epochs=2)
    assert [rows_of(fields) for _, fields in again] == [rows_of(fields) for _, fields in two]
    assert [rows_of(fields) for _, fields in batches(samples, epochs=2, seed=(0, 2))] != [
        rows_of(fields) for _, fields in two
    ]


def test_weights_count_the_mini_batch_and_the_loss_mask(samples):
    loss_mask = samples.mask & (np.arange(4) != 2)[:, None]  # the third response is filtered
    for packing, fields in batches(samples, loss_mask=loss_mask, kl_coef=0.5):
        valid = loss_mask[rows_of(fields)]
        np.testing.assert_allclose(fields["weights"], valid / valid.sum())
        np.testing.assert_allclose(fields["kl_weights"], 0.5 * valid / valid.sum())
        assert packing.batch({}).mask.sum() == LENGTHS[rows_of(fields)].sum()  # it is still read


def test_the_constant_length_is_the_one_given(samples):
    ((_, fields),) = batches(samples, size=4, aggregation="seq-mean-token-sum-norm", norm_length=10)
    np.testing.assert_allclose(fields["weights"], samples.mask[rows_of(fields)] / 10 / 4)
    assert fields["token_mean"].sum() == pytest.approx(1)


def test_positive_weights_are_a_mean_over_right_responses(samples):
    positive = np.array([True, False, False, True])
    ((_, fields),) = batches(samples, size=4, positive=positive)
    valid = (samples.mask & positive[:, None])[rows_of(fields)]
    np.testing.assert_allclose(fields["positive_weights"], valid / 5)
    none = batches(samples, size=4, positive=np.zeros(4, bool))[0][1]["positive_weights"]
    assert not none.any()


def test_demonstrations_join_with_weights_of_their_own(samples):
    numbers = []

    def demonstrations(number):
        numbers.append(number)
        return Samples([[9, 9]], np.full((1, 6), 50 + number, np.int32), np.array([5]), shape_for)

    both = batches(samples, demonstrations=demonstrations)
    assert numbers == [0, 1]
    for number, (packing, fields) in enumerate(both):
        chosen = fields["row"][:2, 0].astype(int)
        assert fields["weights"].shape == (3, 6)
        assert not fields["weights"][2].any()
        assert fields["weights"].sum() == pytest.approx(1)
        np.testing.assert_allclose(fields["sft_weights"], [[0] * 6, [0] * 6, [0.2] * 5 + [0]])
        batch = packing.batch({"sft": fields["sft_weights"], "row": fields["row"]})
        assert set(batch.targets[batch.fields["sft"] > 0].tolist()) == {50 + number}
        own = batch.mask - (batch.fields["sft"] > 0)
        assert own.sum() == LENGTHS[chosen].sum()
        assert set(batch.fields["row"][own > 0].tolist()) <= set(chosen.tolist())


def test_rows_are_taken_and_joined_in_order(samples):
    taken = samples.take(np.array([2, 0]))
    assert (taken.prompts, taken.lengths.tolist()) == ([[1] * 3, [1] * 2], [3, 4])
    joined = taken.join(Samples([[7]], np.ones((1, 6), np.int32), np.array([6]), shape_for))
    assert joined.responses.shape == (3, 6)
    assert joined.mask.sum(axis=1).tolist() == [3, 4, 6]
    assert joined.responses[0].tolist() == [8, 9, 10, 11, 0, 0]
