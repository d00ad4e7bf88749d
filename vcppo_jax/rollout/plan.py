"""A call of `generate`: its static shapes, few, so that few programs are compiled, and how far it is."""

from __future__ import annotations

from typing import NamedTuple

SMALLEST_PROMPT_BUCKET = 16
SMALLEST_CACHE = 128
"""Tokens; a smaller cache is not worth its compilation."""
PREFILL_TOKENS = 4096
"""Prompt tokens, padding included, that each shard of the rows reads in one call (one prompt at least)."""
CHUNK_STEPS = 32
"""Most decode steps per jitted call: how long Ctrl-C waits, and the grain of progress reports."""
SHRINK_STEPS = 64
"""Fewer slots are worth their compilation where a sample may still go on for so many tokens."""


class Progress(NamedTuple):
    """How far a call of `generate` is."""

    tokens: int
    """Response tokens so far."""
    finished: int
    """Responses that have ended."""
    row_steps: int
    """Decode steps times slots, summed: the work done. At the end, `tokens` of them were of use."""


class Plan(NamedTuple):
    """The shapes of a call of `generate`."""

    slots: tuple[int, ...]
    """How many decode together: at first, then as samples run out."""
    prompts: int
    """Prompts that are read at once."""
    admit: int
    """Most slots that are filled at once."""
    wake: int
    """Empty slots for which decoding is interrupted, while samples wait."""
    caches: tuple[int, ...]
    """Tokens that the cache has room for: at first, then as responses get longer."""


def prompt_bucket(longest: int) -> int:
    """The length that prompts of at most `longest` tokens are padded to: a power of two from 16 up."""
    return max(SMALLEST_PROMPT_BUCKET, 1 << (longest - 1).bit_length())


def plan_caches(bucket: int, max_new_tokens: int) -> tuple[int, ...]:
    """The sizes of the cache for prompts padded to `bucket`, in tokens: doubled until all have room."""
    total, size = bucket + max_new_tokens, SMALLEST_CACHE
    while size <= bucket + CHUNK_STEPS:
        size *= 2
    sizes = []
    while size < total:
        sizes.append(size)
        size *= 2
    return (*sizes, total)


def plan_slots(
    num_prompts: int, n: int, batch_size: int, shards: int, bucket: int, max_new_tokens: int
) -> Plan:
    """The shapes for n samples of each prompt, `batch_size` at once, with prompts padded to `bucket`.

    Fewer samples than `batch_size` take 1, 2, 3, 4, 6, 8, 12, ... slots, so that few shapes exist; slots are
    a multiple of the `shards` that the batch axis is split into. They halve at most three times: 512 samples
    of log-normal lengths (median 200, 99th percentile 2000) then make use of 96 % of the row-steps of 32
    slots, 79 % without halving.
    """
    rows = num_prompts * n
    power = 1 << (rows - 1).bit_length()
    few = power * 3 // 4 if power >= 4 and rows <= power * 3 // 4 else power
    most = -(-min(batch_size, few) // shards) * shards
    slots = [most]
    while len(slots) < 4 and slots[-1] % (2 * shards) == 0:
        slots.append(slots[-1] // 2)
    # A multiple of the shards: what does not divide, every shard would compute whole.
    prompts = max(1, min(PREFILL_TOKENS // bucket, -(-most // (n * shards))))
    prompts = shards << (prompts.bit_length() - 1)
    caches = plan_caches(bucket, max_new_tokens)
    return Plan(tuple(slots), prompts, max(1, most // 4), max(1, most // 16), caches)
