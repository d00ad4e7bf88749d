"""TensorBoard's event files, written where the step is.

tensorboardX's SummaryWriter writes in a thread, which dies of the first error; the queue to it then fills up,
and the run would wait for ever. The RecordWriter below it raises the error.
"""

from __future__ import annotations

import logging
import math
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

FLUSH_S = 2.0
"""Seconds between flushes, at least: SIGKILL loses the steps since the last one."""
_VERSION = "brain.Event:2"


class TensorBoard:
    """One event file in a directory, made at the first write. One that cannot be written is given up.

    The failure is said once, as a warning of this module's logger; from then on nothing is written.
    """

    def __init__(self, directory: Path, *, purge_step: int) -> None:
        """What earlier files in `directory` say of `purge_step` and later is hidden."""
        self.directory = directory
        self._purge_step = purge_step
        self._records: Any = None
        self._given_up = False
        self._flushed_at = -math.inf

    def write(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write the numbers of a step, each a scalar by its name."""
        if self._given_up:
            return
        # Imported at the first write: it imports torch where that is installed, which takes seconds.
        from tensorboardX.proto.summary_pb2 import Summary
        from tensorboardX.summary import scalar

        try:
            if self._records is None:
                self._start()
            values = [value for name, number in numbers.items() for value in scalar(name, number).value]
            self._write(step=step, summary=Summary(value=values))
            if time.monotonic() - self._flushed_at >= FLUSH_S:
                self._records.flush()
                self._flushed_at = time.monotonic()
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        """Write what is left and close the file; a second call does nothing."""
        if self._records is None:
            return
        try:
            self._records.flush()
            self._records.close()
            self._records = None
        except OSError as error:
            self._give_up(error)

    def _start(self) -> None:
        from tensorboardX.proto.event_pb2 import SessionLog
        from tensorboardX.record_writer import RecordWriter

        self.directory.mkdir(parents=True, exist_ok=True)
        earlier = len(list(self.directory.glob("events.out.tfevents.*")))
        # The number at the end: a quick restart would overwrite a file that only has the second in its name.
        name = f"events.out.tfevents.{int(time.time())}.{socket.gethostname()}.{earlier}"
        self._records = RecordWriter(str(self.directory / name))
        self._write(file_version=_VERSION)
        if earlier:
            self._write(step=self._purge_step, session_log=SessionLog(status=SessionLog.START))

    def _write(self, **fields: Any) -> None:
        from tensorboardX.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def _give_up(self, error: OSError) -> None:
        self._given_up = True
        logger.warning(
            "TensorBoard files in %s cannot be written: %s; metrics go on in metrics.jsonl",
            self.directory,
            error.strerror or error,
        )
        records, self._records = self._records, None
        if records is not None:
            with suppress(OSError):  # it tries once more to write what it holds
                records.close()
