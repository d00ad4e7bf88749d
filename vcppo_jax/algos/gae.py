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

from vcppo_jax.algos.masked import clean


def gae(
    rewards: ArrayLike, values: ArrayLike, mask: ArrayLike, *, gamma: ArrayLike, lam: ArrayLike
) -> jax.Array:
    """Advantages [..., T], by a reverse scan over T.

    `gamma` and `lam` are in [0, 1]: a number, or for one per sequence an array [...] or [..., 1].
    Raises ValueError on arrays of different shapes and on a number out of range.
    """
    valid, (rewards, values) = clean("gae", mask, rewards=rewards, values=values)
    gamma = _per_sequence("gae", "gamma", gamma, valid.shape)
    lam = _per_sequence("gae", "lam", lam, valid.shape)

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


def gae_blocked(
    rewards: ArrayLike,
    values: ArrayLike,
    mask: ArrayLike,
    *,
    gamma: ArrayLike,
    lam: ArrayLike,
    block_size: int,
) -> jax.Array:
    """What `gae` gives, by a scan over blocks of `block_size` tokens with a closed form inside each.

    For accelerators, on which T small steps cost more than T / block_size larger ones. Inside a block, with
    e_t the number of valid tokens in it before t, n of them in all, and A' the advantage that the blocks
    behind it hand over,

        A_t = sum over valid s >= t of (gamma lambda)^(e_s - e_t) delta_s + (gamma lambda)^(n - e_t) A'

    which also holds for a masked t, where it is the advantage of the next valid token. A step holds
    [..., block_size, block_size] float32. Raises ValueError as `gae` does, and on `block_size` < 1.
    """
    if block_size < 1:
        raise ValueError(f"gae_blocked: expected block_size of at least 1, got {block_size}")
    valid, (rewards, values) = clean("gae_blocked", mask, rewards=rewards, values=values)
    gamma = _per_sequence("gae_blocked", "gamma", gamma, valid.shape)
    lam = _per_sequence("gae_blocked", "lam", lam, valid.shape)
    decay = (gamma * lam)[..., None]  # [..., 1]
    deltas = rewards + gamma[..., None] * _next_valid(values, valid) - values
    deltas = jnp.where(valid, deltas, 0.0)
    from_t_on = jnp.triu(jnp.ones((block_size, block_size), bool))  # [t, s]: s >= t

    def block(next_advantage: jax.Array, tokens: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        delta, is_valid = tokens  # [..., block_size]
        count = jnp.cumsum(is_valid, axis=-1)
        before = count - is_valid
        steps = jnp.maximum(before[..., None, :] - before[..., :, None], 0)  # [..., t, s]
        powers = jnp.where(from_t_on & is_valid[..., None, :], _power(decay[..., None], steps), 0.0)
        # HIGHEST: by default a TPU multiplies in bfloat16 and a GPU in TF32.
        inside = jnp.einsum("...ts,...s->...t", powers, delta, precision=jax.lax.Precision.HIGHEST)
        advantage = inside + _power(decay, count[..., -1:] - before) * next_advantage[..., None]
        return advantage[..., 0], jnp.where(is_valid, advantage, 0.0)

    terminal = jnp.zeros(valid.shape[:-1], jnp.float32)
    blocks = (_blocks(deltas, block_size), _blocks(valid, block_size))
    _, advantages = jax.lax.scan(block, terminal, blocks, reverse=True)  # [blocks, ..., block_size]
    advantages = jnp.moveaxis(advantages, 0, -2)
    filled = advantages.shape[-2] * block_size
    return advantages.reshape(*valid.shape[:-1], filled)[..., : valid.shape[-1]]


def reward_to_go(rewards: ArrayLike, mask: ArrayLike, *, gamma: ArrayLike) -> jax.Array:
    """Returns [..., T]: G_t = r_t + gamma G_{t'}, with t' the next valid token; 0 where masked.

    These are GAE's advantages at lambda = 1 over values of 0. `gamma` as in `gae`.
    """
    valid, (rewards,) = clean("reward_to_go", mask, rewards=rewards)
    return gae(rewards, jnp.zeros_like(rewards), valid, gamma=gamma, lam=1.0)


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
    valid, (values,) = clean("decoupled_gae", mask, values=values)
    advantages = gae(rewards, values, valid, gamma=gamma, lam=lambda_actor)
    if isinstance(lambda_critic, Real) and lambda_critic == 1:
        return advantages, reward_to_go(rewards, valid, gamma=gamma)
    return advantages, gae(rewards, values, valid, gamma=gamma, lam=lambda_critic) + values


def length_adaptive_lambda(lengths: ArrayLike, *, alpha: float) -> jax.Array:
    """VAPO's lambda of each response, in the shape of `lengths` (arXiv 2504.05118): 1 - 1 / (alpha length).

    `lengths` [B] counts response tokens. Made for `lam` of `gae`: the weights lambda^k then add up to
    alpha times the length. Where that is below 1, which would make lambda negative, and where the response
    is empty, it is 0. Raises ValueError
    where `alpha` is not positive.
    """
    if alpha <= 0:
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


def _blocks(x: jax.Array, block_size: int) -> jax.Array:
    """[..., T] -> [blocks, ..., block_size], filled up at the end with 0 (masked)."""
    count = -(-x.shape[-1] // block_size)
    fill = count * block_size - x.shape[-1]
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, fill)])
    return jnp.moveaxis(x.reshape(*x.shape[:-1], count, block_size), -2, 0)


def _next_valid(values: jax.Array, valid: jax.Array) -> jax.Array:
    """[..., T]: for each slot the value of the first valid slot after it, 0 if there is none."""
    length = values.shape[-1]
    index = jnp.where(valid, jnp.arange(length), length)
    at_or_after = jax.lax.cummin(index, axis=index.ndim - 1, reverse=True)
    ends = [(0, 0)] * (values.ndim - 1) + [(0, 1)]
    after = jnp.pad(at_or_after, ends, constant_values=length)[..., 1:]
    return jnp.take_along_axis(jnp.pad(values, ends), after, axis=-1)
