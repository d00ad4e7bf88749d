"""Generation: prefill and decode with a KV cache inside jit, in rounds of static shape.

A round prefills its prompts once, repeats the cache for their n samples, and decodes in chunks of
`CHUNK_STEPS` tokens, each one `lax.while_loop` that also ends when every row is done. Between chunks
Python sees signals and reports progress; the state, cache included, is donated from chunk to chunk.

Shapes come from short lists, so the number of compilations is known: prompts are padded to powers of
two (`prompt_bucket`), and all rounds of a call have one size (`plan_rounds`). The jitted functions are
module-level and take the weights as arguments, so new weights of the same shapes never compile again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jax.typing import ArrayLike

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.decode import Cache, constrain_cache, decode_step, decode_weights, prefill
from vcppo_jax.models.heads import logits
from vcppo_jax.models.networks import Policy
from vcppo_jax.rollout.sampling import Sampling, choose_token, sample_keys, token_uniforms
from vcppo_jax.sharding import batch_shards, constrain
from vcppo_jax.types import Rollout

CHUNK_STEPS = 32
"""Decode steps per jitted call: how long Ctrl-C waits, and the grain of progress reports."""

DEFAULT_BATCH_SIZE = 256
SMALLEST_PROMPT_BUCKET = 16


@struct.dataclass
class DecodeState:
    """A round under way; R rows, T = max_new_tokens. Donated from chunk to chunk."""

    step: jax.Array
    """int32, the number of tokens sampled so far per row that is not done."""
    last: jax.Array
    """[R] int32, the newest token, not yet in the cache."""
    done: jax.Array
    """[R] bool, True once an EOS was sampled (rows that only pad the round: from the start)."""
    tokens: jax.Array
    """[R, T] int32, pad_id from the end of a response on."""
    logprobs: jax.Array
    """[R, T] float32, 0 from the end of a response on."""
    lengths: jax.Array
    """[R] int32, response tokens so far, EOS included."""
    cache: Cache


class Stop(NamedTuple):
    """What ends a response; an argument of the jitted functions, so that other ids need no compilation."""

    eos_ids: ArrayLike
    """[E] int32, any of which ends it."""
    pad_id: ArrayLike
    """int32, what follows it."""


class RoundShape(NamedTuple):
    """All rounds of a call: `prompts` prefilled at once, each decoded in `copies` rows."""

    prompts: int
    copies: int


class Progress(NamedTuple):
    """How far a round is."""

    tokens: int
    finished: int


def prompt_bucket(longest: int) -> int:
    """The length that prompts of at most `longest` tokens are padded to: a power of two from 16 up."""
    return max(SMALLEST_PROMPT_BUCKET, 1 << (longest - 1).bit_length())


def plan_rounds(num_prompts: int, n: int, batch_size: int, shards: int) -> RoundShape:
    """The shape of the rounds that sample n responses to each prompt, at most `batch_size` rows at once.

    Rounds are as equal as possible, then rounded up to 1, 2, 3, 4, 6, 8, 12, ... prompts, so that
    few shapes exist, and to a multiple of the `shards` that the batch axis is split into. When n exceeds
    `batch_size`, a prompt's samples are spread over several rounds.
    """
    if n > batch_size:
        copies = math.ceil(n / math.ceil(n / batch_size))
        return RoundShape(1, math.ceil(copies / shards) * shards)
    most = batch_size // n
    even = math.ceil(num_prompts / math.ceil(num_prompts / most))
    power = 1 << (even - 1).bit_length()
    prompts = min(most, power * 3 // 4 if power >= 4 and even <= power * 3 // 4 else power)
    unit = shards // math.gcd(shards, n)
    return RoundShape(math.ceil(prompts / unit) * unit, n)


def generate(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: Sampling,
    key: jax.Array,
    eos_ids: Sequence[int] | None = None,
    pad_id: int = 0,
    batch_size: int | None = None,
    mesh: Mesh | None = None,
    sample_ids: Sequence[int] | np.ndarray | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Rollout:
    """`sampling.n` responses to each prompt, as NumPy arrays in the order of the prompts.

    Rows are [P * n, max_new_tokens], the n samples of a prompt adjacent. A response ends with the first
    token in `eos_ids` (the model config's `eos_token_ids` when None); one that the limit cuts keeps its
    last sampled token and is marked truncated. `logprobs` are of the temperature-scaled softmax over the
    full vocabulary (at temperature 0: of temperature 1), as `logprobs(policy, ..., temperature=T)`.

    Sample s draws token t with the key `fold_in(fold_in(key, s), t)`, where s is the row index or
    `sample_ids[row]`: its tokens do not depend on the batch, slot or order in which it ran.

    At most `batch_size` rows (256 when None) decode at once. With `mesh`, rows are split over its batch
    axes and the weights stay where they are. `on_progress(tokens, sequences)` is called now and then with
    the response tokens and the finished responses of this call so far.

    Raises ValueError, naming the prompt's index, for one that is empty, leaves no room for
    max_new_tokens or has an id outside the vocabulary.
    """
    config = policy.config
    if eos_ids is None:
        eos_ids = config.eos_token_ids
        if not eos_ids:
            raise ValueError("generate: the model's config names no EOS id; pass eos_ids=(...), () for none")
    _check_prompts(prompts, config, sampling)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"generate: batch_size: expected at least 1, got {batch_size}")
    num_rows = len(prompts) * sampling.n
    ids = np.arange(num_rows, dtype=np.uint32) if sample_ids is None else np.asarray(sample_ids, np.uint32)
    if ids.shape != (num_rows,):
        raise ValueError(
            f"generate: sample_ids: expected {num_rows} ids ({len(prompts)} prompts x n = {sampling.n}), "
            f"got shape {ids.shape}"
        )
    stop = Stop(np.asarray(sorted({int(i) for i in eos_ids}), np.int32), np.int32(pad_id))
    shards = 1 if mesh is None else batch_shards(mesh)
    shape = plan_rounds(len(prompts), sampling.n, batch_size or DEFAULT_BATCH_SIZE, shards)
    parts: list[Rollout] = []
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        weights = _decode_weights(policy.params, config)
        for rows in _rounds(len(prompts), sampling.n, shape):
            report = None if on_progress is None else functools.partial(_report, on_progress, tuple(parts))
            chosen = prompts[rows.start // sampling.n : -(-rows.stop // sampling.n)]
            parts.append(
                _run_round(weights, config, sampling, stop, shape, chosen, ids[rows], key, report=report)
            )
    return jax.tree.map(lambda *fields: np.concatenate(fields), *parts)


def _check_prompts(prompts: Sequence[Sequence[int]], config: ModelConfig, sampling: Sampling) -> None:
    """ValueError, naming the prompt, for one that cannot be continued by max_new_tokens tokens."""
    if len(prompts) == 0:
        raise ValueError("generate: expected at least one prompt, got none")
    room = config.max_position_embeddings - sampling.max_new_tokens
    for i, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"generate: prompt {i} is empty; expected at least one token (such as a BOS)")
        if len(prompt) > room:
            raise ValueError(
                f"generate: prompt {i} has {len(prompt)} tokens; {config.max_position_embeddings} positions "
                f"less max_new_tokens = {sampling.max_new_tokens} leave room for {room}; shorten one of them"
            )
        if not 0 <= min(prompt) <= max(prompt) < config.vocab_size:
            raise ValueError(
                f"generate: prompt {i} has token ids {min(prompt)}..{max(prompt)}; "
                f"the vocabulary is 0..{config.vocab_size - 1}"
            )


def _rounds(num_prompts: int, n: int, shape: RoundShape) -> Iterator[slice]:
    """The rows of each round; row r is sample r % n of prompt r // n."""
    if shape.copies == n:
        step = shape.prompts * n
        for start in range(0, num_prompts * n, step):
            yield slice(start, min(start + step, num_prompts * n))
        return
    for start in range(0, num_prompts * n, n):
        for sample in range(0, n, shape.copies):
            yield slice(start + sample, start + min(sample + shape.copies, n))


def _report(on_progress: Callable[[int, int], None], parts: tuple[Rollout, ...], now: Progress) -> None:
    """Tell `on_progress` what the rounds before, `parts`, and the one under way have come to."""
    tokens = sum(int(part.lengths.sum()) for part in parts) + now.tokens
    on_progress(tokens, sum(len(part.lengths) for part in parts) + now.finished)


def _run_round(
    weights: Any,
    config: ModelConfig,
    sampling: Sampling,
    stop: Stop,
    shape: RoundShape,
    prompts: Sequence[Sequence[int]],
    sample_ids: np.ndarray,
    key: jax.Array,
    *,
    report: Callable[[Progress], None] | None,
) -> Rollout:
    """One response per sample id, as NumPy arrays; the samples take the first slots of the round."""
    lengths = np.ones(shape.prompts, np.int32)  # a slot without a prompt holds one token, never decoded
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    padded = np.zeros((shape.prompts, prompt_bucket(int(lengths.max()))), np.int32)
    for slot, prompt in enumerate(prompts):
        padded[slot, : len(prompt)] = prompt
    count, rows = len(sample_ids), shape.prompts * shape.copies
    ids = np.zeros(rows, np.uint32)
    ids[:count] = sample_ids

    uniforms = _chunk_uniforms(key, ids, np.int32(0))
    state, summary = _start(
        weights, config, sampling, shape.copies, stop, padded, lengths, uniforms, np.int32(count)
    )
    steps = 1
    while True:
        tokens, done = np.asarray(summary).tolist()  # waits for the chunk
        over = done == rows or steps >= sampling.max_new_tokens
        if report is not None:
            report(Progress(tokens, count if over else done - (rows - count)))
        if over:
            break
        uniforms = _chunk_uniforms(key, ids, np.int32(steps))
        state, summary = _advance(weights, config, sampling, stop, state, uniforms)
        steps += CHUNK_STEPS
    truncated = ~np.asarray(state.done)
    fields: list[Any] = [
        np.asarray(x)[:count] for x in (state.tokens, state.lengths, state.logprobs, truncated)
    ]
    return Rollout(*fields)


def chunk_uniforms(key: jax.Array, sample_ids: jax.Array, first: jax.Array) -> jax.Array:
    """[CHUNK_STEPS, R, 2] the uniforms of the samples at token indices from `first` on."""
    return token_uniforms(sample_keys(key, sample_ids), first + jnp.arange(CHUNK_STEPS))


def _record(
    weights: Any,
    config: ModelConfig,
    sampling: Sampling,
    stop: Stop,
    state: DecodeState,
    hidden: jax.Array,
    uniforms: jax.Array,
) -> DecodeState:
    """`state` with one more token in each row that is not done, sampled from `hidden` [R, D]."""
    scores = constrain(logits(weights, config, hidden), "batch", None)
    token, logprob = choose_token(scores, uniforms, sampling)
    token = jnp.where(state.done, stop.pad_id, token)
    logprob = jnp.where(state.done, 0.0, logprob)
    return dataclasses.replace(
        state,
        step=state.step + 1,
        last=token,
        done=state.done | jnp.any(token[:, None] == stop.eos_ids, axis=-1),
        tokens=jax.lax.dynamic_update_slice_in_dim(state.tokens, token[:, None], state.step, 1),
        logprobs=jax.lax.dynamic_update_slice_in_dim(state.logprobs, logprob[:, None], state.step, 1),
        lengths=state.lengths + ~state.done,
    )


def _summary(state: DecodeState) -> jax.Array:
    """[2] int32: response tokens and rows that are done."""
    return jnp.stack([jnp.sum(state.lengths), jnp.sum(state.done)])


def start_round(
    weights: Any,
    config: ModelConfig,
    sampling: Sampling,
    copies: int,
    stop: Stop,
    prompts: jax.Array,
    prompt_lengths: jax.Array,
    uniforms: jax.Array,
    count: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """(state after the first token of every row, summary); R = U * copies rows.

    `prompts` [U, P] are right-padded and prefilled once; `uniforms` [S, R, 2], of which
    only the first are used; the first `count` rows are
    real.
    """
    rows, limit = prompts.shape[0] * copies, sampling.max_new_tokens
    prompts = constrain(prompts, "batch", "length")
    hidden, cache = prefill(weights, config, prompts, prompt_lengths, cache_size=prompts.shape[1] + limit)
    if copies > 1:
        hidden, cache = jax.tree.map(lambda x: jnp.repeat(x, copies, axis=0), (hidden, cache))
        cache = constrain_cache(cache)
    state = DecodeState(
        step=jnp.int32(0),
        last=jnp.zeros(rows, jnp.int32),
        done=jnp.arange(rows) >= count,
        tokens=constrain(jnp.full((rows, limit), stop.pad_id, jnp.int32), "batch", None),
        logprobs=constrain(jnp.zeros((rows, limit), jnp.float32), "batch", None),
        lengths=jnp.zeros(rows, jnp.int32),
        cache=cache,
    )
    state = _record(weights, config, sampling, stop, state, hidden, uniforms[0])
    return state, _summary(state)


def advance_round(
    weights: Any,
    config: ModelConfig,
    sampling: Sampling,
    stop: Stop,
    state: DecodeState,
    uniforms: jax.Array,
) -> tuple[DecodeState, jax.Array]:
    """(state, summary) after one more token per element of `uniforms` [S, R, 2].

    There are fewer at the limit, or when all rows are done.
    """
    first = state.step
    last = jnp.minimum(first + uniforms.shape[0], sampling.max_new_tokens)

    def more(state: DecodeState) -> jax.Array:
        return (state.step < last) & ~jnp.all(state.done)

    def one_step(state: DecodeState) -> DecodeState:
        hidden, cache = decode_step(weights, config, state.last, state.cache)
        state = dataclasses.replace(state, cache=cache)
        return _record(weights, config, sampling, stop, state, hidden, uniforms[state.step - first])

    state = jax.lax.while_loop(more, one_step, state)
    return state, _summary(state)


_decode_weights = jax.jit(decode_weights, static_argnames="config")
_chunk_uniforms = jax.jit(chunk_uniforms)
_start = jax.jit(start_round, static_argnames=("config", "sampling", "copies"))
_advance = jax.jit(advance_round, static_argnames=("config", "sampling"), donate_argnames="state")
