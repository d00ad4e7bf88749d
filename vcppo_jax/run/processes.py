"""The processes of one job: what they tell one another, decide as one, and split between them.

All processes run the same host program on the same numbers, so they compile and start the same programs in
the same order. What may differ between them (a clock, a signal, a file that is there or not) is decided by
process 0, or gathered, before anything depends on it. Every function here that is given a value or a function
must be called by all processes, at the same point. In a job of one process none of them costs anything.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

T = TypeVar("T")
R = TypeVar("R")

_SMALLEST_MESSAGE = 1 << 10
"""Messages are padded to powers of two from here up, so that few exchanges are compiled."""


def is_main() -> bool:
    """Whether this is process 0, which writes metrics, samples, reports and progress."""
    return jax.process_index() == 0


def from_main(make: Callable[[], T]) -> T:
    """What `make()` gives in process 0, in every process; it runs in no other.

    An exception that it raises there is raised in all of them. The value has to be one that pickle takes.
    """
    if jax.process_count() == 1:
        return make()
    outcome: tuple[Any, Exception | None] = (None, None)
    original: Exception | None = None
    if is_main():
        try:
            outcome = (make(), None)
        except Exception as error:
            original = error
            outcome = (None, _portable(error))
    value, raised = pickle.loads(_exchange(pickle.dumps(outcome) if is_main() else b"")[0])
    if original is not None:
        raise original  # with its traceback
    if raised is not None:
        raise raised
    return value


def gather(value: T) -> list[T]:
    """The value of each process, by process; it has to be one that pickle takes."""
    if jax.process_count() == 1:
        return [value]
    return [pickle.loads(message) for message in _exchange(pickle.dumps(value))]


def largest(number: int) -> int:
    """The largest of the processes' numbers, from 0 to 2**31 - 1."""
    if jax.process_count() == 1:
        return number
    return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def share_out(items: Sequence[T], work: Callable[[Sequence[T]], list[R]]) -> list[R]:
    """`work(items)`, one result per item, for which each process does a part of the items of its own."""
    count, index = jax.process_count(), jax.process_index()
    start, stop = (len(items) * i // count for i in (index, index + 1))
    return [result for part in gather(work(items[start:stop])) for result in part]


def _portable(error: Exception) -> Exception:
    """The error if it survives pickle, else a RuntimeError with its message."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(str(error))
    return error


def _exchange(message: bytes) -> list[bytes]:
    """The message of each process, by process."""
    lengths = multihost_utils.process_allgather(np.int32(len(message))).reshape(-1)
    width = max(_SMALLEST_MESSAGE, 1 << (int(lengths.max()) - 1).bit_length())
    padded = np.zeros(width, np.uint8)
    padded[: len(message)] = np.frombuffer(message, np.uint8)
    messages = multihost_utils.process_allgather(padded)
    return [row[:length].tobytes() for row, length in zip(messages, lengths)]
