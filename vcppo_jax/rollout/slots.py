"""The device's side of generation: slots that decode together, and the jittable functions that change them.

A slot holds one sample. `advance` decodes all slots together; `swap` takes finished samples out and puts
waiting ones, whose prompts `prefill_prompts` has read, in; `keep_slots` leaves the slots that still work,
and `grow_cache` makes room as responses get longer: a step reads all of the cache that there is.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax.typing import ArrayLike

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.decode import Cache, constrain_cache, constrain_kv, decode_step, empty_cache, prefill
from vcppo_jax.models.heads import logits
from vcppo_jax.rollout.plan import CHUNK_STEPS
from vcppo_jax.rollout.sampling import Sampling, choose_token, sample_keys, token_uniforms
from vcppo_jax.sharding import constrain, map_shards


@struct.dataclass
class Slots:
    """S slots under way; T = max_new_tokens. Donated from call to call."""

    last: jax.Array
    """[S] int32, the newest token, not yet in the cache."""
    done: jax.Array
    """[S] bool: finished, or empty."""
    ended: jax.Array
    """[S] bool: finished by an EOS, not by its limit."""
    sample_ids: jax.Array
    """[S] uint32."""
    limits: jax.Array
    """[S] int32, the most response tokens."""
    lengths: jax.Array
    """[S] int32, response tokens so far, EOS included."""
    tokens: jax.Array
    """[S, T] int32; what lies beyond `lengths` means nothing."""
    logprobs: jax.Array
    """[S, T] float32, likewise."""
    cache: Cache


class Finished(NamedTuple):
    """What `swap` took out, [A] or [A, T]; fields as in `Slots`."""

    tokens: jax.Array
    logprobs: jax.Array
    lengths: jax.Array
    ended: jax.Array


class Summary(NamedTuple):
    """What the host looks at after a chunk."""

    done: jax.Array
    lengths: jax.Array
    steps: jax.Array
    """int32, the decode steps of the chunk."""


class Entry(NamedTuple):
    """Samples that go into slots, one per index of [A] int32 arrays."""

    slots: ArrayLike
    """S (which is no slot) where there is no sample."""
    sources: ArrayLike
    """Which prompt of the prefilled ones."""
    prompt_lengths: ArrayLike
    last: ArrayLike
    """The prompt's last token."""
    sample_ids: ArrayLike
    limits: ArrayLike


def new_slots(config: ModelConfig, slots: int, cache_size: int, max_new_tokens: int) -> Slots:
    """Empty slots; all of them done."""

    def zeros(dtype: Any, *shape: int) -> jax.Array:
        return constrain(jnp.zeros((slots, *shape), dtype), "batch", *[None] * len(shape))

    return Slots(
        last=zeros(jnp.int32),
        done=constrain(jnp.ones(slots, bool), "batch"),
        ended=zeros(bool),
        sample_ids=zeros(jnp.uint32),
        limits=zeros(jnp.int32),
        lengths=zeros(jnp.int32),
        tokens=zeros(jnp.int32, max_new_tokens),
        logprobs=zeros(jnp.float32, max_new_tokens),
        cache=constrain_cache(empty_cache(config, slots, cache_size)),
    )


def prefill_prompts(weights: Any, config: ModelConfig, prompts: jax.Array, lengths: jax.Array) -> Cache:
    """The cache of right-padded `prompts` [U, P], which as many samples as need be start from.

    It holds the last token too, which a sample's first decode step writes again: that step then samples
    the first token like any other, and everything is sampled in one place.
    """
    prompts = constrain(prompts, "batch", "length")
    return prefill(weights, config, prompts, lengths, cache_size=prompts.shape[1])[1]


def swap(slots: Slots, prompts: Cache, entry: Entry) -> tuple[Slots, Finished]:
    """(slots with the samples of `entry` put in, what was there before)."""
    at, width = jnp.asarray(entry.slots), prompts.size
    count = slots.last.shape[0]
    before = jnp.minimum(at, count - 1)
    finished = Finished(
        slots.tokens[before], slots.logprobs[before], slots.lengths[before], slots.ended[before]
    )

    def put(old: jax.Array, new: ArrayLike) -> jax.Array:
        return constrain(old.at[at].set(new, mode="drop"), "batch")

    sources = jnp.asarray(entry.sources)

    def put_prompts(old: tuple[jax.Array, ...], new: tuple[jax.Array, ...], axis: int) -> Any:
        first = (at, *[slice(None)] * (axis - 1), slice(width))
        return tuple(x.at[first].set(prompt[sources], mode="drop") for x, prompt in zip(old, new))

    key_axis, value_axis = prompts.slot_axes
    cache = dataclasses.replace(
        slots.cache,
        keys=put_prompts(slots.cache.keys, prompts.keys, key_axis),
        values=put_prompts(slots.cache.values, prompts.values, value_axis),
        lengths=put(slots.cache.lengths, jnp.asarray(entry.prompt_lengths) - 1),
    )
    slots = dataclasses.replace(
        slots,
        last=put(slots.last, entry.last),
        done=put(slots.done, False),
        ended=put(slots.ended, False),
        sample_ids=put(slots.sample_ids, jnp.asarray(entry.sample_ids, jnp.uint32)),
        limits=put(slots.limits, entry.limits),
        lengths=put(slots.lengths, 0),
        cache=constrain_cache(cache),
    )
    return slots, finished


def advance(
    weights: Any,
    config: ModelConfig,
    sampling: Sampling,
    eos_ids: ArrayLike,
    key: jax.Array,
    slots: Slots,
    stopped: ArrayLike,
    wake: ArrayLike,
) -> tuple[Slots, Summary]:
    """(slots, summary) after up to CHUNK_STEPS more tokens in each slot that is not done.

    Fewer when `wake` slots or more are done. `stopped` [S] ends samples for reasons of the host's.
    """
    slots = dataclasses.replace(slots, done=slots.done | stopped)
    keys = sample_keys(key, slots.sample_ids)

    def more(state: tuple[Slots, jax.Array]) -> jax.Array:
        return (state[1] < CHUNK_STEPS) & (jnp.sum(state[0].done) < wake)

    def one_step(state: tuple[Slots, jax.Array]) -> tuple[Slots, jax.Array]:
        slots, steps = state
        active = ~slots.done
        hidden, cache = decode_step(weights, config, slots.last, slots.cache)
        # Two steps: in one, the compiler gathers the projection's weights instead of its few results.
        scores = constrain(logits(weights, config, hidden), "batch", "act_vocab")
        scores = constrain(scores, "batch", None)
        token, logprob = choose_token(scores, token_uniforms(keys, slots.lengths), sampling)
        at = jnp.where(active, slots.lengths, slots.tokens.shape[1])  # beyond the end: dropped
        ended = active & jnp.any(token[:, None] == eos_ids, axis=-1)
        lengths = slots.lengths + active
        slots = dataclasses.replace(
            slots,
            last=jnp.where(active, token, slots.last),
            done=slots.done | ended | (lengths >= slots.limits),
            ended=slots.ended | ended,
            lengths=lengths,
            tokens=_write(slots.tokens, at, token),
            logprobs=_write(slots.logprobs, at, logprob),
            # A slot that is done stays where it is: its cache has room for its limit and no more.
            cache=dataclasses.replace(cache, lengths=jnp.where(active, cache.lengths, slots.cache.lengths)),
        )
        return slots, steps + 1

    slots, steps = jax.lax.while_loop(more, one_step, (slots, jnp.int32(0)))
    return slots, Summary(slots.done, slots.lengths, steps)


def _write(x: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
    """`x` [S, T] with `new` [S] at `at` [S]; T is beyond the end and writes nothing."""

    def write(x: jax.Array, at: jax.Array, new: jax.Array) -> jax.Array:
        return x.at[jnp.arange(len(at)), at].set(new, mode="drop", unique_indices=True)

    return map_shards(write, (x, at, new), (("batch", None), ("batch",), ("batch",)))


def keep_slots(slots: Slots, keep: jax.Array) -> Slots:
    """Of each of the equal parts of the slots, one per shard, those that `keep` [shards, k] names."""
    return jax.tree.map(lambda x: constrain(_keep(x, keep), "batch", *[None] * (x.ndim - 1)), slots)


def keep_cache(x: jax.Array, keep: jax.Array) -> jax.Array:
    """Likewise, of one array of the cache."""
    return constrain_kv(_keep(x, keep))


def grow_cache(x: jax.Array, size: int, axis: int) -> jax.Array:
    """One array of the cache with room for `size` tokens; `axis` is that of the tokens."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, size - x.shape[axis])
    return constrain_kv(jnp.pad(x, widths))


def _keep(x: jax.Array, keep: jax.Array) -> jax.Array:
    """Rows stay in the shard that they are in, so that nothing crosses devices."""
    parts = x.reshape(keep.shape[0], -1, *x.shape[1:])
    kept = jax.vmap(lambda part, rows: part[rows])(parts, keep)
    return kept.reshape(-1, *x.shape[1:])
