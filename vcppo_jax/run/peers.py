"""Joins the processes of a job, and ends them all when one of them is lost.

JAX itself notices a lost process by missing heartbeats, and not what it was; a collective that waits for it
waits until then. So each process also holds a connection to process 0. The kernel closes it the moment that a
process dies, however it dies, and process 0 tells the others, who print one line and exit.

Who a process is comes from JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID, or else from the
cluster (TPU pods, Slurm, Open MPI) as JAX detects it.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, NoReturn

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
LOST = 75
"""Exit status where another process was lost (EX_TEMPFAIL of sysexits.h): the job can be started again."""
HEARTBEAT_TIMEOUT_S = 45
"""After so long without a heartbeat JAX ends the job: for hosts that hang and for networks that are cut."""
NEWS_S = 45.0
"""So long a process whose collective failed waits for the line that says which process was lost."""
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Seconds until a silent connection is probed, between probes, and lost probes: 30 s for a lost host."""
_KEY = "vcppo/peers"


class JoinError(RuntimeError):
    """The processes do not come together; the message is one line for the user."""


def identity(environment: Mapping[str, str]) -> tuple[str | None, int | None, int | None]:
    """(coordinator address, processes, process) as the variables say; all None where none of them is set.

    Raises JoinError where only some are set, or one is no number or out of range.
    """
    given = {name: environment[name] for name in VARIABLES if environment.get(name)}
    if not given:
        return None, None, None
    if missing := [name for name in VARIABLES if name not in given]:
        raise JoinError(f"{', '.join(given)} is set, but {', '.join(missing)} is not; set all three or none")
    address = given[VARIABLES[0]]
    if not address.rpartition(":")[0] or not address.rpartition(":")[2].isdigit():
        raise JoinError(f"{VARIABLES[0]}: expected HOST:PORT, got {address!r}")
    numbers = []
    for name in VARIABLES[1:]:
        if not given[name].isdigit():
            raise JoinError(f"{name}: expected a whole number, got {given[name]!r}")
        numbers.append(int(given[name]))
    count, index = numbers
    if index >= count:
        raise JoinError(f"JAX_PROCESS_ID={index}: expected 0 to {count - 1}, since JAX_NUM_PROCESSES={count}")
    return address, count, index


def join(*, timeout_s: int) -> Job:
    """Join the other processes of the job; before the first computation.

    Raises JoinError. A process that does not find the others ends with a line and status 1.
    """
    import jax
    from jax._src import distributed  # its key-value store has no public name (Orbax takes it from here too)

    address, count, index = identity(os.environ)
    # It would take SIGTERM for itself, which is to end a step here.
    jax.config.update("jax_enable_preemption_service", False)
    alone = threading.Timer(timeout_s, _not_joined, (address, index, timeout_s))
    alone.daemon = True
    alone.start()
    try:
        jax.distributed.initialize(
            address,
            count,
            index,
            initialization_timeout=timeout_s + 60,  # where it ends, JAX aborts the process
            heartbeat_timeout_seconds=HEARTBEAT_TIMEOUT_S,
        )
    except ValueError as error:
        if "should be defined" not in str(error) and "must be defined" not in str(error):
            raise
        raise JoinError(
            "--distributed: no cluster is detected here (TPU pod, Slurm, Open MPI); set "
            f"{', '.join(VARIABLES)}, or leave --distributed out"
        ) from None
    except (RuntimeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise JoinError(
            f"{_who(address, index)}: {reason}; is the port free, and the host this one's?"
        ) from None
    finally:
        alone.cancel()
    state = distributed.global_state
    job = Job(state.process_id, state.num_processes)
    if job.count > 1:
        try:
            job.connect(state.client, str(state.coordinator_address), timeout_s)
        except (OSError, RuntimeError) as error:
            raise JoinError(f"process {job.index} cannot watch over the others: {error}") from None
    return job


def _who(address: str | None, index: int | None) -> str:
    """The process and where it joins; JAX knows where the cluster says so."""
    from jax._src import distributed

    state = distributed.global_state
    number = state.process_id if index is None else index
    return f"process {number} cannot join the job at {address or state.coordinator_address}"


def _not_joined(address: str | None, index: int | None, timeout_s: int) -> None:
    line = (
        f"vcppo: {_who(address, index)}: not all processes came within {timeout_s} s; see that each is "
        "started with this address, that process 0 runs there, and that the port can be reached\n"
    )
    os.write(2, line.encode())
    exit_now(1)


class Job:
    """The joined processes, from the point of view of one of them."""

    def __init__(self, index: int, count: int) -> None:
        self.index, self.count = index, count
        self._peers: dict[socket.socket, str] = {}
        """Connections, and what to call the process at the other end."""
        self._lock = threading.Lock()
        self._closed: set[socket.socket] = set()
        """Connections whose other end has said that it is done."""
        self._ending = False

    def connect(self, client: Any, coordinator: str, timeout_s: int) -> None:
        """Connect to process 0, or as process 0 wait for the others, and start to watch.

        `client` is that of JAX's key-value store. Raises OSError.
        """
        if self.index == 0:
            self._accept(client, timeout_s)
        else:
            port, token = client.blocking_key_value_get(_KEY, timeout_s * 1000).split()
            host = coordinator.rpartition(":")[0].strip("[]")
            connection = socket.create_connection((host, int(port)), timeout_s)
            hello = {"token": token, "process": self.index, "host": socket.gethostname()}
            _send(connection, hello)
            answer = _lines(connection)
            self._peers[connection] = f"process 0 ({answer[0]['host']})"
            _keep_alive(connection)
        _delay_abort()
        threading.Thread(target=self._watch, name="peers", daemon=True).start()

    def _accept(self, client: Any, timeout_s: int) -> None:
        family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
        token, until = secrets.token_hex(16), time.monotonic() + timeout_s
        missing = set(range(1, self.count))
        with socket.create_server(
            ("", 0), family=family, backlog=self.count, dualstack_ipv6=family == socket.AF_INET6
        ) as server:
            client.key_value_set(_KEY, f"{server.getsockname()[1]} {token}")
            while missing:
                server.settimeout(max(0.1, until - time.monotonic()))
                try:
                    connection, _ = server.accept()
                except TimeoutError:
                    absent = ", ".join(map(str, sorted(missing)))
                    raise TimeoutError(f"nothing heard from process {absent} for {timeout_s} s") from None
                connection.settimeout(10)
                try:
                    hello = _lines(connection)[0]
                except (OSError, ValueError, IndexError):
                    hello = {}
                if hello.get("token") != token:  # somebody who tries out ports
                    connection.close()
                    continue
                missing.discard(hello["process"])
                self._peers[connection] = f"process {hello['process']} ({hello['host']})"
                _send(connection, {"host": socket.gethostname()})
                _keep_alive(connection)

    def _watch(self) -> None:
        """In a thread of its own, until the process ends."""
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                selector.register(peer, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select():
                    connection: Any = key.fileobj
                    try:
                        messages = _lines(connection)
                    except (OSError, ValueError):
                        messages = []
                    for message in messages:
                        self._heard(connection, message)
                    if not messages:
                        selector.unregister(connection)
                        if connection not in self._closed:
                            self._end(
                                f"{self._peers[connection]} was lost (killed, or its host is gone)", LOST
                            )

    def _heard(self, connection: socket.socket, message: dict[str, Any]) -> None:
        if "done" in message:
            self._closed.add(connection)
        elif "ended" in message:
            self._end(message["ended"], message["status"])

    def _end(self, news: str, status: int) -> NoReturn:
        """Tell the others where this is process 0, and end this process with a line."""
        with self._lock:
            if not self._ending:
                self._ending = True
                self._tell({"ended": news, "status": status})
                again = "; start the job again to resume" if status == LOST else ""
                line = f"vcppo: process {self.index}: {news}{again}\n"
                with contextlib.suppress(OSError):
                    os.write(2, line.encode(errors="replace"))
            exit_now(status)

    def _tell(self, message: dict[str, Any]) -> None:
        for connection in self._peers:
            with contextlib.suppress(OSError):
                _send(connection, message)

    def await_news(self) -> None:
        """Wait for the line that says which process was lost, in a process whose collective failed.

        Returns only if no process was lost: the collective then failed for a reason of its own.
        """
        if self.count > 1:
            time.sleep(NEWS_S)

    def fail(self, message: str, status: int) -> NoReturn:
        """End all processes with `status`, the others with `message`; the caller has told the user here."""
        with self._lock:
            if not self._ending:
                self._ending = True
                name = f"process {self.index} ({socket.gethostname()})"
                self._tell({"ended": f"{name} failed: {message}", "status": status})
            exit_now(status)

    def leave(self) -> None:
        """Leave the job, which is done; waits for the other processes to do so."""
        import jax

        self._tell({"done": True})
        jax.distributed.shutdown()


def _delay_abort() -> None:
    """Make `abort` wait for six seconds, in which `_watch` ends the process with a line and a status.

    JAX aborts the process when it notices that process 0 is gone, in the same instant as `_watch` does. The
    handler is C's `sleep`, which gets the signal's number, 6; when it returns, `abort` goes on.
    """
    with contextlib.suppress(OSError, AttributeError):
        library = ctypes.CDLL(None)
        library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def exit_now(status: int) -> NoReturn:
    """End at once: other threads may wait for ever in a collective, and Python would wait for them."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


def _lines(connection: socket.socket) -> list[dict[str, Any]]:
    """The next messages; [] where the other end is closed. Raises OSError or ValueError."""
    received = b""
    while chunk := connection.recv(1 << 16):
        received += chunk
        if received.endswith(b"\n"):
            break
    return [json.loads(line) for line in received.splitlines()]


def _keep_alive(connection: socket.socket) -> None:
    """Without a time-out, but noticing that the other host is gone."""
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if hasattr(socket, name):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
