"""Generation: slots that decode together inside jit, refilled while prompts wait, fewer as they run out.

The host side. When enough samples have ended, waiting ones take their slots (`Plan.wake`, `Plan.admit`);
each prompt is read once, whatever the number of its samples. When none wait, the slots shrink by halves.
Between chunks of `CHUNK_STEPS` tokens Python sees signals, reports progress and looks for what else ends
a response; the slots, cache included, are donated from call to call.

Shapes come from short lists, so the number of compilations is known: prompts are padded to powers of two
(`prompt_bucket`), slots are as `plan_slots` says. The jitted functions are module-level and take the
weights as arguments, so new weights of the same shapes never compile again.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from vcppo_jax.models.config import ModelConfig
from vcppo_jax.models.decode import Cache
from vcppo_jax.models.networks import Policy
from vcppo_jax.rollout.plan import CHUNK_STEPS, SHRINK_STEPS, Plan, Progress, plan_slots, prompt_bucket
from vcppo_jax.rollout.programs import advance as _advance
from vcppo_jax.rollout.programs import decode_weights
from vcppo_jax.rollout.programs import grow_cache as _grow_cache
from vcppo_jax.rollout.programs import keep_cache as _keep_cache
from vcppo_jax.rollout.programs import keep_slots as _keep_slots
from vcppo_jax.rollout.programs import new_slots as _new_slots
from vcppo_jax.rollout.programs import prefill as _prefill
from vcppo_jax.rollout.programs import swap as _swap
from vcppo_jax.rollout.request import check_prompts, per_row
from vcppo_jax.rollout.sampling import Sampling
from vcppo_jax.rollout.slots import Entry, Finished, Slots, Summary
from vcppo_jax.sharding import batch_shards, to_host
from vcppo_jax.types import Rollout

DEFAULT_BATCH_SIZE = 256


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
    limits: Sequence[int] | np.ndarray | None = None,
    int8_weights: bool = False,
    find_stop: Callable[[np.ndarray, int], int | None] | None = None,
    token_budget: int | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    on_finished: Callable[[np.ndarray, Rollout], None] | None = None,
) -> Rollout:
    """`sampling.n` responses to each prompt, as NumPy arrays in the order of the prompts.

    Rows are [P * n, max_new_tokens], the n samples of a prompt adjacent. A response ends with the first
    token in `eos_ids` (the model config's `eos_token_ids` when None); one that the limit cuts keeps its
    last sampled token and is marked truncated. `logprobs` are of the temperature-scaled softmax over the
    full vocabulary (at temperature 0: of temperature 1), as `logprobs(policy, ..., temperature=T)`.

    Sample s draws token t with the key `fold_in(fold_in(key, s), t)`, where s is the row index or
    `sample_ids[row]`: its tokens do not depend on the batch, slot or order in which it ran.

    With `int8_weights` the layers' matrices are rounded to 8 bits for decoding, a scale per output; log-probs
    are those of the rounded model, which is another than the trainer's (see `importance_weights`).

    `limits` [P * n] gives each row a limit of its own, from 1 to max_new_tokens. `find_stop(tokens, seen)`
    ends responses for other reasons (stop strings: `data.tokenizer.stop_finder`): given the response so far
    and how many of its tokens were there at the last look, it returns the length at which it ends, or None.

    Once the responses have `token_budget` tokens together, no further chunk is decoded: responses under way
    are cut, and those that have not begun stay empty, truncated too.

    At most `batch_size` rows (256 when None) decode at once. With `mesh`, rows are split over its batch
    axes, and weights for decoding over its tensor axis. `on_progress` is called after every chunk,
    then `on_finished(rows, rollout)` with the responses that left their slots, which are those `rows` of the
    result; at the end with the rest of them.

    Raises ValueError, naming the prompt's index, for one that is empty, leaves no room for
    max_new_tokens or has an id outside the vocabulary.
    """
    config = policy.config
    if eos_ids is None:
        eos_ids = config.eos_token_ids
        if not eos_ids:
            raise ValueError("generate: the model's config names no EOS id; pass eos_ids=(...), () for none")
    check_prompts(prompts, config, sampling)
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"generate: batch_size: expected at least 1, got {batch_size}")
    num_rows = len(prompts) * sampling.n
    ids = per_row("sample_ids", np.arange(num_rows) if sample_ids is None else sample_ids, prompts, sampling)
    row_limits = per_row(
        "limits", [sampling.max_new_tokens] * num_rows if limits is None else limits, prompts, sampling
    )
    if row_limits.min() < 1 or row_limits.max() > sampling.max_new_tokens:
        raise ValueError(
            f"generate: limits: expected numbers from 1 to max_new_tokens = {sampling.max_new_tokens}, "
            f"got {row_limits.min()}..{row_limits.max()}"
        )
    bucket = prompt_bucket(max(map(len, prompts)))
    plan = plan_slots(
        len(prompts),
        sampling.n,
        batch_size or DEFAULT_BATCH_SIZE,
        1 if mesh is None else batch_shards(mesh),
        bucket,
        sampling.max_new_tokens,
    )
    with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
        weights = decode_weights(policy.params, config, int8=int8_weights)
        call = _Call(
            weights, config, prompts, sampling, key, eos_ids, pad_id, plan, bucket, ids, row_limits, mesh
        )
        return call.run(find_stop, on_progress, on_finished, token_budget)


class _Call:
    """One call of `generate`: which sample is in which slot, and which wait."""

    def __init__(
        self,
        weights: Any,
        config: ModelConfig,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        key: jax.Array,
        eos_ids: Sequence[int],
        pad_id: int,
        plan: Plan,
        bucket: int,
        sample_ids: np.ndarray,
        limits: np.ndarray,
        mesh: Mesh | None,
    ) -> None:
        self.weights, self.config = weights, config
        self.sampling, self.plan, self.key = sampling, plan, key
        self.prompts, self.bucket = prompts, bucket
        self.prompt_lengths = np.asarray([len(prompt) for prompt in prompts])
        self.sample_ids, self.limits = sample_ids, limits
        self.shards = 1 if mesh is None else batch_shards(mesh)
        self.eos_ids = np.asarray(sorted({int(i) for i in eos_ids}), np.int32)
        rows = len(sample_ids)
        self.slots: Slots = _new_slots(self.config, plan.slots[0], plan.caches[0], sampling.max_new_tokens)
        self.row_of = np.full(plan.slots[0], -1)
        """The row of the sample in each slot; -1 where there is none."""
        self.done = np.ones(plan.slots[0], bool)
        self.lengths = np.zeros(plan.slots[0], np.int32)
        self.next_row = 0
        """The first row that has not been in a slot."""
        self.read: tuple[int, Cache | None] = (0, None)
        """The first of the prompts that were read last, and their cache."""
        self.taken_out: list[tuple[np.ndarray, np.ndarray, Finished]] = []
        """(indices, rows, what `swap` gave): not yet in `rollout`, for these may not be computed yet."""
        self.left: list[int] = []
        """Rows that have left their slots since the last chunk."""
        self.stops: dict[int, int] = {}
        """Row to length, of the responses that `find_stop` ended."""
        self.seen = np.zeros(rows, np.int64)
        width = sampling.max_new_tokens
        self.tokens = np.full((rows, width), pad_id, np.int32)
        self.logprobs = np.zeros((rows, width), np.float32)
        self.response_lengths = np.zeros(rows, np.int32)
        self.truncated = np.ones(rows, bool)
        self.row_steps = self.tokens_before = self.finished_before = 0

    def run(
        self,
        find_stop: Callable[[np.ndarray, int], int | None] | None,
        on_progress: Callable[[Progress], None] | None,
        on_finished: Callable[[np.ndarray, Rollout], None] | None,
        token_budget: int | None,
    ) -> Rollout:
        """Decode until every sample has ended, or the budget is used up."""
        total = len(self.sample_ids)
        given = np.zeros(total, bool)

        def give(rows: np.ndarray) -> None:
            if on_finished is not None and len(rows):
                on_finished(rows, self._result(rows))
                given[rows] = True

        while True:
            self._fill()
            self._shrink()
            self._grow()
            self.slots, summary = _advance(
                self.weights,
                self.config,
                self.sampling,
                self.eos_ids,
                self.key,
                self.slots,
                self._stopped(),
                np.int32(self._wake()),
            )
            self._look(summary)
            self._drain()
            if find_stop is not None:
                self._find_stops(find_stop)
            progress = self._progress()
            if on_progress is not None:
                on_progress(progress)
            give(np.asarray(self.left, np.int64))
            self.left.clear()
            if progress.finished == total or (token_budget is not None and progress.tokens >= token_budget):
                break
        self._take_all()
        give(np.flatnonzero(~given))
        return self._result(slice(None))

    def _result(self, rows: Any) -> Rollout:
        fields = (self.tokens, self.response_lengths, self.logprobs, self.truncated)
        return Rollout(*(field[rows] for field in fields))

    def _fill(self) -> None:
        """Put waiting samples into the slots that are done, reading their prompts as it comes to them."""
        total, n = len(self.sample_ids), self.sampling.n
        free = np.flatnonzero(self.done)
        if len(free) < min(self.plan.wake, total - self.next_row):
            return
        while len(free) and self.next_row < total:
            prompt = self.next_row // n
            first, cache = self.read
            if cache is None or prompt >= first + self.plan.prompts:
                first, cache = self.read = prompt, self._prefill(prompt)
            last_row = min(total, (first + self.plan.prompts) * n)
            count = min(len(free), self.plan.admit, last_row - self.next_row)
            rows, at, free = np.arange(self.next_row, self.next_row + count), free[:count], free[count:]
            self._put(rows, at, first, cache)
            self.next_row += count
        if self.next_row == total:
            self.read = (0, None)  # frees the prompts' cache

    def _prefill(self, first: int) -> Cache:
        """The cache of the prompts from `first` on."""
        chosen = self.prompts[first : first + self.plan.prompts]
        lengths = np.ones(self.plan.prompts, np.int32)  # where no prompt is left, one token
        lengths[: len(chosen)] = self.prompt_lengths[first : first + len(chosen)]
        padded = np.zeros((self.plan.prompts, self.bucket), np.int32)
        for row, prompt in enumerate(chosen):
            padded[row, : len(prompt)] = prompt
        return _prefill(self.weights, self.config, padded, lengths)

    def _put(self, rows: np.ndarray, at: np.ndarray, first: int, cache: Cache) -> None:
        """Samples `rows` into the slots `at`."""

        def padded(numbers: Any, fill: int, dtype: Any = np.int32) -> np.ndarray:
            out = np.full(self.plan.admit, fill, dtype)
            out[: len(rows)] = numbers
            return out

        prompts = rows // self.sampling.n
        entry = Entry(
            slots=padded(at, len(self.done)),
            sources=padded(prompts - first, 0),
            prompt_lengths=padded(self.prompt_lengths[prompts], 1),
            last=padded([self.prompts[i][-1] for i in prompts], 0),
            sample_ids=padded(self.sample_ids[rows], 0, np.uint32),
            limits=padded(self.limits[rows], 0),
        )
        self.slots, finished = _swap(self.slots, cache, entry)
        self.taken_out.append((np.arange(len(rows)), self.row_of[at], finished))
        self._leave(at)
        self.row_of[at], self.done[at], self.lengths[at] = rows, False, 0

    def _wake(self) -> int:
        """How many slots are to be done before the host has something to do."""
        waiting, size = len(self.sample_ids) - self.next_row, len(self.done)
        wake = size
        if waiting:
            wake = min(self.plan.wake, waiting)
        elif self._may_shrink():
            wake = size - max(count for count in (0, *self.plan.slots) if count < size)
        return min(size, max(wake, int(self.done.sum()) + 1))  # those that are done now are no news

    def _may_shrink(self) -> bool:
        """Whether no sample waits, and one that goes on may do so for SHRINK_STEPS tokens."""
        left = (self.limits[self.row_of] - self.lengths)[~self.done]
        return self.next_row == len(self.sample_ids) and left.size > 0 and int(left.max()) >= SHRINK_STEPS

    def _stopped(self) -> np.ndarray:
        """[S] bool: what the host knows to be done."""
        return np.asarray([row in self.stops for row in self.row_of.tolist()])

    def _look(self, summary: Summary) -> None:
        """Wait for the chunk, and see what is done."""
        summary = to_host(summary)
        self.done, self.lengths = np.array(summary.done), np.array(summary.lengths)
        for slot, row in enumerate(self.row_of.tolist()) if self.stops else ():
            self.lengths[slot] = self.stops.get(row, self.lengths[slot])
        self.row_steps += int(summary.steps) * len(self.done)

    def _find_stops(self, find_stop: Callable[[np.ndarray, int], int | None]) -> None:
        """End the responses that `find_stop` says have ended."""
        tokens = to_host(self.slots.tokens)
        for slot, row in enumerate(self.row_of.tolist()):
            length = int(self.lengths[slot])
            if row < 0 or row in self.stops or length == self.seen[row]:
                continue
            end = find_stop(tokens[slot, :length], int(self.seen[row]))
            self.seen[row] = length
            if end is not None:
                self.stops[row] = end
                self.done[slot], self.lengths[slot] = True, end

    def _shrink(self) -> None:
        """As few slots as the samples that go on need, where that is worth it."""
        if not self._may_shrink():
            return
        parts = ~self.done.reshape(self.shards, -1)  # those that go on
        needed = int(parts.sum(axis=1).max()) * self.shards
        size = min(count for count in self.plan.slots if count >= needed)
        if size >= len(self.done):
            return
        self._take_all()
        # The slots that go on first, in their order; then as many of the others as fill the shape.
        keep = np.argsort(~parts, axis=1, kind="stable")[:, : size // self.shards].astype(np.int32)
        rows = (keep + np.arange(self.shards)[:, None] * parts.shape[1]).reshape(-1)
        cache = self._map_cache(lambda x, axis: _keep_cache(x, keep))
        # What is not an array of one layer goes together; those are in `cache`.
        rest = dataclasses.replace(cache, keys=(), values=())
        small = _keep_slots(dataclasses.replace(self.slots, cache=rest), keep)
        filled = dataclasses.replace(small.cache, keys=cache.keys, values=cache.values)
        self.slots = dataclasses.replace(small, cache=filled)
        self._leave(np.setdiff1d(np.arange(len(self.done)), rows))
        self.row_of, self.done, self.lengths = self.row_of[rows], self.done[rows], self.lengths[rows]

    def _grow(self) -> None:
        """Room in the cache for the next chunk, where it lacks."""
        prompts = self.prompt_lengths[self.row_of // self.sampling.n]
        longest = int((prompts + self.lengths)[~self.done].max())
        needed = min(longest + CHUNK_STEPS, self.plan.caches[-1])
        size = min(size for size in self.plan.caches if size >= needed)
        if size > self.slots.cache.size:
            cache = self._map_cache(lambda x, axis: _grow_cache(x, size, axis))
            self.slots = dataclasses.replace(self.slots, cache=cache)

    def _map_cache(self, change: Callable[[jax.Array, int], jax.Array]) -> Cache:
        """The slots' cache, which they lose, once `change(array, axis of the tokens)` has been to each array.

        One array at a time, so that no second cache exists.
        """
        cache = self.slots.cache
        keys, values = list(cache.keys), list(cache.values)
        cache = dataclasses.replace(cache, keys=(), values=())
        self.slots = dataclasses.replace(self.slots, cache=cache)
        for arrays, axis in zip((keys, values), cache.slot_axes):
            for i in range(len(arrays)):
                arrays[i] = change(arrays[i], axis)
        return dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))

    def _drain(self) -> None:
        """Take over what `swap` gave, which is computed by now."""
        for indices, rows, finished in self.taken_out:
            self._take(indices, rows, finished)
        self.taken_out.clear()

    def _leave(self, at: np.ndarray) -> None:
        """Count the samples in the slots `at`, which they leave."""
        there = self.row_of[at] >= 0
        self.tokens_before += int(self.lengths[at][there].sum())
        self.finished_before += int(there.sum())
        self.left += self.row_of[at][there].tolist()

    def _take_all(self) -> None:
        """Take over what is in the slots now."""
        s = self.slots
        self._take(slice(None), self.row_of, Finished(s.tokens, s.logprobs, s.lengths, s.ended))

    def _take(self, indices: Any, rows: np.ndarray, finished: Finished) -> None:
        """Write finished samples into the result; those that still go on are written again later."""
        tokens, logprobs, lengths, ended = (field[indices] for field in to_host(finished))
        for i, row in enumerate(rows.tolist()):
            if row < 0:
                continue
            length = self.stops.get(row, int(lengths[i]))
            self.response_lengths[row] = length
            self.tokens[row, :length] = tokens[i, :length]
            self.logprobs[row, :length] = logprobs[i, :length]
            self.truncated[row] = not ended[i] and row not in self.stops

    def _progress(self) -> Progress:
        here = self.row_of >= 0
        return Progress(
            self.tokens_before + int(self.lengths[here].sum()),
            self.finished_before + int((self.done & here).sum()),
            self.row_steps,
        )
