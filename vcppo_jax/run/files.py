"""Files that cannot be written: which, why, and what to do, in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


class WriteError(OSError):
    """A file or directory that cannot be written; the message is one line for the user."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turns an OSError of the block, which may name no file or another one, into WriteError with `path`.

    A closed pipe is left as it is: whoever reads has had enough.
    """
    try:
        yield
    except (WriteError, BrokenPipeError):
        raise
    except OSError as error:
        raise WriteError(
            f"{os.fspath(path)}: cannot be written: {error.strerror or error}; make room, or choose a place "
            "that can be written"
        ) from error
