"""`vcppo_jax.algos.gae` against a NumPy loop, golden values and identities."""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vcppo_jax.algos import gae as module
from vcppo_jax.algos.gae import gae, gae_blocked, length_adaptive_lambda
from vcppo_jax.algos.masked import whiten

RAW = {"gae": gae, "gae_blocked": partial(gae_blocked, block_size=3)}
# Jitted once each, so that tests on one shape share a compilation. On the CPU most fit into one block of gae.
FORMS = {
    "gae": jax.jit(gae),
    "blocks of 3": jax.jit(partial(gae_blocked, block_size=3)),
}
decoupled_gae = jax.jit(module.decoupled_gae, static_argnames=("lambda_actor", "lambda_critic"))
reward_to_go = jax.jit(module.reward_to_go)


def loop_gae(rewards, values, mask, gamma, lam):
    """The recursion, in float64, over the valid tokens alone."""
    advantages = np.zeros(np.shape(rewards))
    for b in range(len(rewards)):
        row_lam = np.broadcast_to(lam, len(rewards))[b]
        next_advantage = next_value = 0.0
        for t in np.flatnonzero(mask[b])[::-1]:
            delta = rewards[b, t] + gamma * next_value - values[b, t]
            next_advantage = delta + gamma * row_lam * next_advantage
            next_value = values[b, t]
            advantages[b, t] = next_advantage
    return advantages


def sample(seed=0, shape=(4, 11), *, gaps=True):
    """Random rewards, values and a mask with padding, an empty row, a full row and, if asked, gaps."""
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, *shape))
    mask = rng.random(shape) < 0.7
    if not gaps:
        mask = np.arange(shape[1]) < mask.sum(-1, keepdims=True)
    mask[0], mask[1], mask[2, -3:] = True, False, False
    return rewards, values, mask


with_and_without_gaps = pytest.mark.parametrize("gaps", [True, False], ids=["gaps", "padded"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rewards", "values", "mask", "lam", "expected"),
    [
        ([0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4], [1, 1, 1, 1], 0.95, [0.799675, 0.7365, 0.67, 0.6]),
        ([0, 1, 0], [0, 0, 100], [1, 1, 0], 0.95, [0.95, 1, 0]),
        (
            [0, 0, 0, 0, 0, 1],
            [0.5, 0.5, 9, 9, 0.5, 0.5],
            [1, 1, 0, 0, 1, 1],
            0.9,
            [0.3645, 0.405, 0, 0, 0.45, 0.5],
        ),
    ],
)
def test_golden(form, rewards, values, mask, lam, expected):
    arrays = np.array([rewards, values, mask], np.float32)
    np.testing.assert_allclose(FORMS[form](*arrays, gamma=1.0, lam=lam), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("alpha", "expected"), [(1.0, [0.484375, 0.5125, 0.55, 0.6]), (0.05, [0.1, 0.1, 0.1, 0.6])]
)
@pytest.mark.parametrize("form", FORMS)
def test_length_adaptive_lambda_golden(form, alpha, expected):
    mask = np.array([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])
    lam = length_adaptive_lambda(mask.sum(-1), alpha=alpha)
    rewards = np.array([[0, 0, 0, 1, 0], [0, 1, 0, 0, 0]])
    values = np.array([[0.1, 0.2, 0.3, 0.4, 7], [0.1, 0.2, 7, 7, 7]])
    advantages = FORMS[form](rewards, values, mask, gamma=1.0, lam=lam)
    np.testing.assert_allclose(advantages[0], [*expected, 0], atol=1e-5)
    np.testing.assert_allclose(advantages, loop_gae(rewards, values, mask, 1.0, lam), atol=1e-5)


def test_length_adaptive_lambda_equals_the_loop():
    lengths = [0, 1, 4, 19, 20, 21, 1000]
    expected = [0.0 if n == 0 else min(max(1 - 1 / (0.05 * n), 0.0), 1.0) for n in lengths]
    lam = jax.jit(partial(length_adaptive_lambda, alpha=0.05))(np.array(lengths))
    assert lam.dtype == jnp.float32
    np.testing.assert_allclose(lam, expected, atol=1e-6)
    np.testing.assert_allclose(length_adaptive_lambda(4, alpha=1.0), 0.75)
    assert lam[0] == lam[1] == lam[3] == 0 < lam[5]


@pytest.mark.parametrize("alpha", [0, -1.0])
def test_alpha_is_positive(alpha):
    with pytest.raises(ValueError, match=f"length_adaptive_lambda: expected a positive alpha, got {alpha}"):
        length_adaptive_lambda(np.ones(2), alpha=alpha)


@with_and_without_gaps
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 0.95), (0.9, 0.8), (1.0, 1.0), (0.5, 0.0), (0.0, 0.9)])
def test_equals_the_loop(form, gamma, lam, gaps):
    rewards, values, mask = sample(gaps=gaps)
    advantages = FORMS[form](rewards, values, mask, gamma=gamma, lam=lam)
    assert advantages.dtype == jnp.float32
    np.testing.assert_allclose(advantages, loop_gae(rewards, values, mask, gamma, lam), atol=1e-5)


@with_and_without_gaps
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4,), (4, 1)])
def test_one_lambda_per_sequence(form, shape, gaps):
    rewards, values, mask = sample(1, gaps=gaps)
    lam = np.array([0.0, 0.5, 0.9, 1.0])
    advantages = FORMS[form](rewards, values, mask, gamma=0.9, lam=lam.reshape(shape))
    np.testing.assert_allclose(advantages, loop_gae(rewards, values, mask, 0.9, lam), atol=1e-5)


@with_and_without_gaps
@pytest.mark.parametrize("form", FORMS)
def test_a_long_sequence_equals_the_loop(form, gaps):
    rewards, values, mask = sample(2, (3, 16_384), gaps=gaps)
    advantages = FORMS[form](rewards, values, mask, gamma=1.0, lam=0.99)
    np.testing.assert_allclose(advantages, loop_gae(rewards, values, mask, 1.0, 0.99), atol=1e-4, rtol=1e-4)


def test_only_a_batch_with_gaps_is_scanned(monkeypatch):
    def never(rewards, *_):
        return jnp.full_like(rewards, jnp.nan)

    monkeypatch.setattr(module, "_by_token", never)
    for gaps in (True, False):
        advantages = gae(*sample(14, gaps=gaps), gamma=1.0, lam=0.9)
        assert np.isnan(np.asarray(advantages)).all() == gaps


def test_each_backend_has_a_block_size(monkeypatch):
    asked = []

    def note(x, decay, block_size):
        asked.append(block_size)
        return x

    monkeypatch.setattr(module, "_discounted_sums", note)
    for backend in ("cpu", "gpu", "tpu", "another"):
        monkeypatch.setattr(jax, "default_backend", lambda backend=backend: backend)
        gae(*np.zeros((3, 1, 2)), gamma=1.0, lam=0.9)
    assert asked == [*module.BLOCK_SIZES.values(), 128]


@with_and_without_gaps
@pytest.mark.parametrize("form", RAW)
def test_outside_jit_as_inside(form, gaps):
    rewards, values, mask = sample(gaps=gaps)
    expected = FORMS["gae"](rewards, values, mask, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(RAW[form](rewards, values, mask, gamma=0.9, lam=0.8), expected, atol=1e-5)


@with_and_without_gaps
@pytest.mark.parametrize("form", FORMS)
def test_vmap(form, gaps):
    rewards, values, mask = (jnp.asarray(x, jnp.float32) for x in sample(3, gaps=gaps))
    expected = FORMS["gae"](rewards, values, mask, gamma=0.9, lam=0.8)
    mapped = jax.vmap(partial(FORMS[form], gamma=0.9, lam=0.8))(rewards, values, mask)
    np.testing.assert_allclose(mapped, expected, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_with_and_without_a_gap_agree(form):
    """A masked slot in the middle, which is scanned over, against blocks without it."""
    rewards, values, mask = sample(4, gaps=False)
    with_gap = [np.insert(x, 5, 0, axis=1) for x in (rewards, values, mask)]

    @jax.jit
    def gradients(rewards, values, mask, lam):
        def total(rewards, values, lam):
            return jnp.sum(FORMS[form](rewards, values, mask, gamma=0.9, lam=lam) ** 2)

        return jax.grad(total, (0, 1, 2))(rewards, values, lam)

    for lam in (0.0, 0.8):
        in_blocks = gradients(rewards, values, mask, lam)
        *scanned, of_lam = gradients(*with_gap, lam)
        for actual, expected in zip(in_blocks, [*(np.delete(x, 5, axis=1) for x in scanned), of_lam]):
            assert np.any(np.asarray(expected) != 0)
            np.testing.assert_allclose(actual, expected, atol=1e-4, rtol=1e-4)


@with_and_without_gaps
@pytest.mark.parametrize("form", FORMS)
def test_masked_slots_harm_neither_value_nor_gradient(form, gaps):
    rewards, values, mask = sample(5, gaps=gaps)
    dirty_rewards, dirty_values = rewards.copy(), values.copy()
    dirty_rewards[~mask], dirty_values[~mask] = np.nan, np.inf

    @jax.jit
    @partial(jax.value_and_grad, argnums=(0, 1))
    def total(rewards, values):
        return jnp.sum(FORMS[form](rewards, values, mask, gamma=0.9, lam=0.8) ** 2)

    clean, dirty = total(rewards, values), total(dirty_rewards, dirty_values)
    chex.assert_trees_all_equal(clean, dirty)
    assert np.all(np.asarray(dirty[1][1])[~mask] == 0)


@pytest.mark.parametrize("form", FORMS)
def test_an_all_masked_batch_is_zero(form):
    bad = np.full((2, 3), np.nan)
    assert np.all(FORMS[form](bad, bad, np.zeros((2, 3)), gamma=1.0, lam=0.9) == 0)


@pytest.mark.parametrize("form", FORMS)
def test_one_valid_token(form):
    advantages = FORMS[form](*np.array([[5, 1, 5], [9, 0.25, 9], [0, 1, 0]]), gamma=0.5, lam=0.5)
    np.testing.assert_allclose(advantages, [0, 0.75, 0])


@pytest.mark.parametrize("form", FORMS)
def test_padding_on_either_side_or_between_changes_nothing(form):
    rewards, values = np.random.default_rng(6).normal(size=(2, 1, 5))
    expected = FORMS[form](rewards, values, np.ones((1, 5)), gamma=0.9, lam=0.8)
    at = [1, 2, 5, 6, 8]
    wide = {"rewards": rewards, "values": values, "mask": np.ones((1, 5))}
    for name, x in wide.items():
        wide[name] = np.full((1, 10), 0.0 if name == "mask" else 77.0)
        wide[name][:, at] = x
    spread = FORMS[form](**wide, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(spread[:, at], expected, atol=1e-5)


def test_reward_to_go_golden_with_a_gap():
    np.testing.assert_allclose(module.reward_to_go([0, 0, 1], [1, 0, 1], gamma=0.5), [0.5, 0, 1])
    # What sits on a masked slot is ignored.
    np.testing.assert_allclose(reward_to_go(np.array([0, 8, 1]), np.array([1, 0, 1]), gamma=0.5), [0.5, 0, 1])


def test_reward_to_go_equals_the_loop():
    rewards, _, mask = sample(7)
    expected = loop_gae(rewards, np.zeros_like(rewards), mask, 0.9, 1.0)
    np.testing.assert_allclose(reward_to_go(rewards, mask, gamma=0.9), expected, atol=1e-5)


def test_whitened_reward_to_go_golden():
    """REINFORCE++ on one batch."""
    mask = np.array([[1, 1, 1], [1, 1, 0]])
    returns = reward_to_go(np.array([[0, 0, 1], [0, -1, 0]]), mask, gamma=1.0)
    np.testing.assert_allclose(
        jax.jit(whiten)(returns, mask), [[0.730297] * 3, [-1.095445, -1.095445, 0]], atol=1e-5
    )


def test_decoupled_golden():
    advantages, returns = module.decoupled_gae(
        [0, 0, 0, 1], [0.1, 0.2, 0.3, 0.4], [1] * 4, gamma=1.0, lambda_actor=0.95, lambda_critic=1.0
    )
    np.testing.assert_allclose(advantages, [0.799675, 0.7365, 0.67, 0.6], atol=1e-5)
    np.testing.assert_array_equal(returns, [1, 1, 1, 1])


def test_lambda_one_gives_reward_to_go_minus_value():
    rewards, values, mask = sample(8)
    advantages = FORMS["gae"](rewards, values, mask, gamma=1.0, lam=1.0)
    expected = np.where(mask, reward_to_go(rewards, mask, gamma=1.0) - values, 0)
    np.testing.assert_allclose(advantages, expected, atol=1e-5)


def test_equal_lambdas_are_plain_gae():
    rewards, values, mask = sample(9)
    advantages, returns = decoupled_gae(rewards, values, mask, gamma=0.9, lambda_actor=0.8, lambda_critic=0.8)
    expected = FORMS["gae"](rewards, values, mask, gamma=0.9, lam=0.8)
    np.testing.assert_allclose(advantages, expected, atol=1e-6)
    np.testing.assert_allclose(returns, np.where(mask, expected + values, 0), atol=1e-6)


def test_each_lambda_moves_its_own_output_only():
    rewards, values, mask = sample(10)
    run = partial(decoupled_gae, rewards, values, mask, gamma=0.9)
    base = run(lambda_actor=0.8, lambda_critic=0.9)
    actor = run(lambda_actor=0.5, lambda_critic=0.9)
    critic = run(lambda_actor=0.8, lambda_critic=0.5)
    np.testing.assert_array_equal(actor[1], base[1])
    np.testing.assert_array_equal(critic[0], base[0])
    assert np.abs(actor[0] - base[0]).max() > 0.1
    assert np.abs(critic[1] - base[1]).max() > 0.1


@pytest.mark.parametrize("one", [1.0, 1, np.float32(1.0)])
def test_no_value_enters_critic_targets_at_lambda_one(one):
    rewards, _, mask = sample(11)
    garbage = np.full(rewards.shape, np.nan)
    # Not jitted here: a jit's cache takes 1, 1.0 and np.float32(1) for one another.
    _, returns = module.decoupled_gae(rewards, garbage, mask, gamma=1.0, lambda_actor=0.95, lambda_critic=one)
    np.testing.assert_array_equal(returns, reward_to_go(rewards, mask, gamma=1.0))


def test_a_traced_critic_lambda_of_one_gives_reward_to_go_too():
    rewards, values, mask = sample(12)
    run = jax.jit(partial(module.decoupled_gae, gamma=1.0, lambda_actor=0.95))
    _, returns = run(rewards, values, mask, lambda_critic=1.0)
    np.testing.assert_allclose(returns, reward_to_go(rewards, mask, gamma=1.0), atol=1e-5)


def test_decoupled_jits_with_masked_nan_and_has_gradients():
    rewards, values, mask = sample(13)
    values[~mask] = np.nan

    def total(values):
        advantages, returns = decoupled_gae(
            rewards, values, mask, gamma=1.0, lambda_actor=0.9, lambda_critic=0.5
        )
        return jnp.sum(advantages**2 + returns**2)

    value, grad = jax.jit(jax.value_and_grad(total))(jnp.asarray(values))
    assert np.isfinite(value)
    assert np.all(np.isfinite(grad))
    assert np.all(np.asarray(grad)[mask] != 0)


def test_bfloat16_and_integer_input_come_out_as_float32():
    rewards, values = jnp.array([[0, 0, 1]]), jnp.array([[0.5, 0.5, 0.5]], jnp.bfloat16)
    for form in FORMS.values():
        assert form(rewards, values, jnp.ones((1, 3), bool), gamma=1, lam=1).dtype == jnp.float32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros((2, 4))}, r"expected values .*\[2, 3\], got \[2, 4\]"),
        ({"rewards": np.zeros(3)}, r"expected rewards .*\[2, 3\], got \[3\]"),
        ({"lam": 1.5}, r"expected lam in \[0, 1\], got 1.5"),
        ({"gamma": -0.1}, r"expected gamma in \[0, 1\], got -0.1"),
        ({"lam": np.zeros(3)}, r"expected lam .*\[2\] or \[2, 1\], got \[3\]"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = {"rewards": np.zeros((2, 3)), "values": np.zeros((2, 3)), "mask": np.ones((2, 3))}
    arguments |= {"gamma": 1.0, "lam": 0.9} | change
    for caller, form in RAW.items():
        with pytest.raises(ValueError, match=f"^{caller}: {message}"):
            form(**arguments)


def test_a_block_has_a_token():
    with pytest.raises(ValueError, match="block_size of at least 1, got 0"):
        gae_blocked(np.zeros(3), np.zeros(3), np.ones(3), gamma=1.0, lam=0.9, block_size=0)
