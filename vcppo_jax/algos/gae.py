"""Generalised advantage estimation (Schulman et al., arXiv 1506.02438), plain and decoupled.

Arrays are [..., T], usually [B, T]: B sequences, T response tokens. `values[t]` is the value of the state
*before* token t. With delta_t = r_t + gamma V_{t'} - V_t, where t' is the next valid token,

    A_t = delta_t + gamma lambda A_{t'}

The state after the last valid token is terminal: its value is 0, also for a response that the length
limit cut. Masked slots, at the end or between two valid tokens, carry the recursion through (they neither
decay nor reset it), what they hold is never read, and they come out as 0. All results are float32.
"""

from __future__ import annotations

from numbers import Real

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from vcppo_jax.algos.masked import clean, is_known

BLOCK_SIZES = {"cpu": 32, "gpu": 128, "tpu": 128}
"""Tokens in a block of `gae`, by JAX's default backend. cpu: of 16, 32, 64 and 128, which benchmarks/gae.py
finds equal within its noise. gpu, tpu: the width of a TPU's matrix unit; not measured."""


def gae(
    rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, *, gamma: ArrayLike, lam: ArrayLike
) -> jax.Array:
    """Advantages [..., T], by `gae_blocked` with the block size of the backend.

    `gamma` and `lam` are in [0, 1]: a number, or for one per sequence an array [...] or [..., 1].
    Raises ValueError on arrays of different shapes and on a number out of range.
    """
    return _gae("gae", rewards, values, mask, gamma=gamma, lam=lam)


def gae_blocked(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    *,
    gamma: ArrayLike,
    lam: ArrayLike,
    block_size: int,
) -> jax.Array:
    """What `gae` gives, with blocks of `block_size` tokens.

    The advantages are discounted sums of the deltas, A_t = sum over s >= t of (gamma lambda)^(s - t) delta_s.
    They are taken for all blocks of a batch at once, as a matrix product with the powers of gamma lambda;
    what the later blocks add is again a discounted sum, over the blocks, and taken in the same way. A step
    for each token would cost a call of a small kernel each.

    The powers count every slot, so a batch in which a valid token follows a masked one is scanned token by
    token instead. With one gamma or lambda per sequence the powers hold [..., block_size, block_size].
    Raises ValueError as `gae` does, and on `block_size` < 1.
    """
    if block_size < 1:
        raise ValueError(f"gae_blocked: expected block_size of at least 1, got {block_size}")
    return _gae("gae_blocked", rewards, values, mask, gamma=gamma, lam=lam, block_size=block_size)


def _gae(
    caller: str,
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    *,
    gamma: ArrayLike,
    lam: ArrayLike,
    block_size: int | None = None,
) -> jax.Array:
    """`gae_blocked`; with the block size of the backend where it is None. `caller` is named in errors."""
    if block_size is None:
        block_size = BLOCK_SIZES.get(jax.default_backend(), 128)
    valid = jnp.asarray(mask).astype(bool)
    gamma = _per_sequence(caller, "gamma", gamma, valid.shape)
    lam = _per_sequence(caller, "lam", lam, valid.shape)
    resumes = valid[..., 1:] & ~valid[..., :-1]
    # As uint8: XLA's CPU compiler takes the maximum of bytes many at a time, the `any` of booleans does not.
    has_gaps = jnp.max(resumes.astype(jnp.uint8), initial=0) > 0

    # The masked slots are cleaned inside the branches: what goes into a cond is first written to memory.
    def by_token(rewards: jax.Array, values: jax.Array) -> jax.Array:
        _, (rewards, values) = clean(caller, valid, rewards=rewards, values=values)
        return _by_token(rewards, values, valid, gamma, lam)

    def in_blocks(rewards: jax.Array, values: jax.Array) -> jax.Array:
        _, (rewards, values) = clean(caller, valid, rewards=rewards, values=values)
        return _in_blocks(rewards, values, valid, gamma, lam, block_size=block_size)

    arrays = (jnp.asarray(x, jnp.float32) for x in (rewards, values))
    return jax.lax.cond(has_gaps, by_token, in_blocks, *arrays)


def _by_token(
    rewards: jax.Array, values: jax.Array, valid: jax.Array, gamma: jax.Array, lam: jax.Array
) -> jax.Array:
    """The recursion, by a reverse scan over T."""

    def step(
        carry: tuple[jax.Array, jax.Array], token: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        next_advantage, next_value = carry
        reward, value, is_valid = token
        delta = reward + gamma * next_value - value
        advantage = delta + gamma * lam * next_advantage
        carry = (
            jnp.where(is_valid, advantage, next_advantage),
            jnp.where(is_valid, value, next_value),
        )
        return carry, jnp.where(is_valid, advantage, 0.0)

    terminal = jnp.zeros(valid.shape[:-1], jnp.float32)
    tokens = (_time_first(rewards), _time_first(values), _time_first(valid))
    _, advantages = jax.lax.scan(step, (terminal, terminal), tokens, reverse=True)
    return jnp.moveaxis(advantages, 0, -1)


def _in_blocks(
    rewards: jax.Array,
    values: jax.Array,
    valid: jax.Array,
    gamma: jax.Array,
    lam: jax.Array,
    *,
    block_size: int,
) -> jax.Array:
    """The closed form, for rows in which no valid token follows a masked one; masked inputs are 0.

    Behind the last valid token the deltas are 0, and so are their sums.
    """
    deltas = jnp.where(valid, rewards + gamma[..., None] * _next(values) - values, 0.0)
    return _discounted_sums(deltas, gamma * lam, block_size)


def _discounted_sums(x: jax.Array, decay: jax.Array, block_size: int) -> jax.Array:
    """[..., T]: y_t = x_t + decay y_{t+1}, for a `decay` of [...] or a scalar."""
    length = x.shape[-1]
    block_size = max(1, min(block_size, length))
    blocks = _blocks(x, block_size)
    index = jnp.arange(block_size)
    distance = index[:, None] - index  # [s, t]
    powers = _power(decay[..., None, None], jnp.maximum(distance, 0))
    powers = jnp.where(distance >= 0, powers, 0.0)
    # HIGHEST: by default a TPU multiplies in bfloat16 and a GPU in TF32.
    sums = jnp.einsum(
        "...ks,...st->...kt" if decay.ndim else "...ks,st->...kt",
        blocks,
        powers,
        precision=jax.lax.Precision.HIGHEST,
    )
    if block_size < length:
        firsts = _discounted_sums(sums[..., 0], _power(decay, jnp.int32(block_size)), max(block_size, 2))
        behind = _power(decay[..., None], block_size - index)[..., None, :]
        sums = sums + behind * _next(firsts)[..., None]
    return sums.reshape(*x.shape[:-1], sums.shape[-2] * block_size)[..., :length]


def reward_to_go(rewards: ArrayLike, mask: ArrayLike, *, gamma: ArrayLike) -> jax.Array:
    """Returns [..., T]: G_t = r_t + gamma G_{t'}, with t' the next valid token; 0 where masked.

    These are GAE's advantages at lambda = 1 over values of 0. `gamma` as in `gae`.
    """
    values = jnp.zeros_like(jnp.asarray(rewards, jnp.float32))
    return _gae("reward_to_go", rewards, values, mask, gamma=gamma, lam=1.0)


def decoupled_gae(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    *,
    gamma: ArrayLike,
    lambda_actor: ArrayLike,
    lambda_critic: ArrayLike,
) -> tuple[jax.Array, jax.Array]:
    """`(advantages, returns)`, each [..., T]: VC-PPO's decoupled GAE (arXiv 2503.01491).

    The advantages, for the policy, use `lambda_actor`. The returns, the value model's targets, are the
    advantages under `lambda_critic` plus the values. When `lambda_critic` is the number 1 they are plain
    reward-to-go and no value enters them, not even a NaN; as an array (or traced by `jit`) it takes the
    general way. `gamma` and both lambdas as `gamma` and `lam` of `gae`. No gradient is stopped here.
    """
    advantages = _gae("decoupled_gae", rewards, values, mask, gamma=gamma, lam=lambda_actor)
    if isinstance(lambda_critic, Real) and lambda_critic == 1:
        return advantages, reward_to_go(rewards, mask, gamma=gamma)
    _, (valid_values,) = clean("decoupled_gae", mask, values=values)
    returns = _gae("decoupled_gae", rewards, values, mask, gamma=gamma, lam=lambda_critic)
    return advantages, returns + valid_values


def length_adaptive_lambda(lengths: ArrayLike, *, alpha: float) -> jax.Array:
    """VAPO's lambda of each response, in the shape of `lengths` (arXiv 2504.05118): 1 - 1 / (alpha length).

    `lengths` [B] counts response tokens. Made for `lam` of `gae`: the weights lambda^k then add up to
    alpha times the length. Where that is below 1, which would make lambda negative, and where the response
    is empty, it is 0. Raises ValueError
    where `alpha` is not positive.
    """
    if is_known(alpha) and alpha <= 0:
        raise ValueError(f"length_adaptive_lambda: expected a positive alpha, got {alpha}")
    lengths = jnp.asarray(lengths, jnp.float32)
    lam = 1.0 - 1.0 / (alpha * jnp.maximum(lengths, 1.0))
    return jnp.where(lengths > 0, jnp.clip(lam, 0.0, 1.0), 0.0)


def _per_sequence(caller: str, name: str, x: ArrayLike, shape: tuple[int, ...]) -> jax.Array:
    """A discount for arrays of `shape` [..., T]: float32, a scalar or [...]."""
    if isinstance(x, Real) and not 0 <= x <= 1:
        raise ValueError(f"{caller}: expected {name} in [0, 1], got {x}")
    array = jnp.asarray(x, jnp.float32)
    if array.shape == (*shape[:-1], 1):
        array = array[..., 0]
    if array.shape not in ((), shape[:-1]):
        raise ValueError(
            f"{caller}: expected {name} as a number or with one entry per sequence, {list(shape[:-1])} or "
            f"{[*shape[:-1], 1]}, got {list(array.shape)}"
        )
    return array


def _power(base: jax.Array, exponent: jax.Array) -> jax.Array:
    """`base ** exponent` for whole exponents of at least 0, with a finite gradient also at 0 ** 0 = 1."""
    positive = jnp.power(base, jnp.maximum(exponent, 1).astype(jnp.float32))
    return jnp.where(exponent == 0, 1.0, positive)


def _time_first(x: jax.Array) -> jax.Array:
    return jnp.moveaxis(x, -1, 0)


def _next(x: jax.Array) -> jax.Array:
    """[..., T]: in each slot what the one after it holds, 0 in the last."""
    return jnp.pad(x[..., 1:], [(0, 0)] * (x.ndim - 1) + [(0, 1)])


def _blocks(x: jax.Array, block_size: int) -> jax.Array:
    """[..., T] -> [..., blocks, block_size], filled up at the end with 0."""
    count = -(-x.shape[-1] // block_size)
    fill = count * block_size - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, fill)])
    return x.reshape(*x.shape[:-1], count, block_size)
