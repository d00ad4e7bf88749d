"""Who a process is, how it hears that another one is gone, and what the user reads when they do not meet."""

from __future__ import annotations

import json
import pickle
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tiny_run import write_config

from vcppo_jax.cli import main
from vcppo_jax.config_load import ConfigError
from vcppo_jax.phases.loop import Interrupted
from vcppo_jax.run import peers, processes
from vcppo_jax.run.checkpoint import CheckpointError
from vcppo_jax.run.files import WriteError

ADDRESS, COUNT, INDEX = peers.VARIABLES
HOST = socket.gethostname()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, (None, None, None)),
        ({"SLURM_PROCID": "3"}, (None, None, None)),
        ({ADDRESS: "10.0.0.1:1234", COUNT: "4", INDEX: "3"}, ("10.0.0.1:1234", 4, 3)),
        ({ADDRESS: "[::1]:1234", COUNT: "1", INDEX: "0"}, ("[::1]:1234", 1, 0)),
    ],
)
def test_who_a_process_is(environment, expected):
    assert peers.identity(environment) == expected


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({COUNT: "2"}, f"{COUNT} is set, but {ADDRESS}, {INDEX} is not; set all three or none"),
        ({ADDRESS: "host", COUNT: "2", INDEX: "0"}, f"{ADDRESS}: expected HOST:PORT, got 'host'"),
        ({ADDRESS: "host:1", COUNT: "two", INDEX: "0"}, f"{COUNT}: expected a whole number, got 'two'"),
        ({ADDRESS: "host:1", COUNT: "2", INDEX: "2"}, f"{INDEX}=2: expected 0 to 1, since {COUNT}=2"),
    ],
)
def test_who_a_process_is_not(environment, message):
    with pytest.raises(peers.JoinError) as error:
        peers.identity(environment)
    assert str(error.value) == message


class Store:
    """JAX's key-value store, in this process."""

    def __init__(self):
        self.values, self.there = {}, threading.Event()

    def key_value_set(self, key, value):
        self.values[key] = value
        self.there.set()

    def blocking_key_value_get(self, key, timeout_ms):
        assert self.there.wait(timeout_ms / 1000)
        return self.values[key]


@pytest.fixture
def jobs(monkeypatch, capfd):
    """Three connected processes, and what each of them ended with: {index: status}."""
    ended = {}

    class Ended(BaseException):
        pass

    real = peers.Job._end

    def end(self, news, status):
        try:
            real(self, news, status)
        except Ended:
            ended[self.index] = status
            raise

    def exit_(status):
        raise Ended

    monkeypatch.setattr(peers.Job, "_end", end)
    monkeypatch.setattr(peers, "exit_now", exit_)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    store, joined = Store(), [peers.Job(index, 3) for index in range(3)]
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda job: job.connect(store, "127.0.0.1:1", 10), joined))
    yield joined, ended, Ended
    for job in joined:
        for connection in job._peers:
            connection.close()


def until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def die(job):
    """What the kernel does with the connections of a process that is killed, and which tells nobody."""
    job._ending = True
    for connection in job._peers:
        connection.shutdown(socket.SHUT_RDWR)


def test_all_others_end_when_one_is_lost(jobs, capfd):
    joined, ended, _ = jobs
    die(joined[2])
    until(lambda: {0, 1} <= ended.keys())
    assert (ended[0], ended[1]) == (peers.LOST, peers.LOST)
    said = capfd.readouterr().err
    for index in (0, 1):
        line = f"vcppo: process {index}: process 2 ({HOST}) was lost (killed, or its host is gone); start the"
        assert f"{line} job again to resume\n" in said


def test_all_others_end_when_process_0_is_lost(jobs, capfd):
    joined, ended, _ = jobs
    die(joined[0])
    until(lambda: {1, 2} <= ended.keys())
    assert (ended[1], ended[2]) == (peers.LOST, peers.LOST)
    assert f"process 2: process 0 ({HOST}) was lost" in capfd.readouterr().err


def test_all_others_end_as_the_one_that_fails(jobs, capfd):
    joined, ended, exception = jobs
    with pytest.raises(exception):
        joined[1].fail("metrics.jsonl: cannot be written", 1)
    until(lambda: {0, 2} <= ended.keys())
    assert (ended[0], ended[2]) == (1, 1)
    said = capfd.readouterr().err
    assert f"vcppo: process 2: process 1 ({HOST}) failed: metrics.jsonl: cannot be written\n" in said


def test_nobody_ends_when_all_are_done(jobs, capfd, monkeypatch):
    joined, ended, _ = jobs
    monkeypatch.setattr("jax.distributed.shutdown", lambda: None)
    for job in joined:
        job.leave()
    for job in joined[1:]:
        die(job)
    time.sleep(0.2)
    assert (ended, capfd.readouterr().err) == ({}, "")


def test_a_stranger_is_turned_away(monkeypatch):
    store, server, client = Store(), peers.Job(0, 2), peers.Job(1, 2)
    with ThreadPoolExecutor(2) as pool:
        accepting = pool.submit(server.connect, store, "127.0.0.1:1", 10)
        assert store.there.wait(10)
        port = int(store.values["vcppo/peers"].split()[0])
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b'{"token": "guess", "process": 1, "host": "x"}\n')
            assert stranger.recv(10) == b""
        client.connect(store, "127.0.0.1:1", 10)
        accepting.result(10)
    assert list(server._peers.values()) == [f"process 1 ({HOST})"]


def test_the_processes_that_stay_away_are_named():
    store = Store()
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(peers.Job(0, 4).connect, store, "127.0.0.1:1", 1)
        assert store.there.wait(10)
        port, token = store.values["vcppo/peers"].split()
        with socket.create_connection(("127.0.0.1", int(port))) as second:
            second.sendall(json.dumps({"token": token, "process": 2, "host": "x"}).encode() + b"\n")
            with pytest.raises(TimeoutError, match="nothing heard from process 1, 3 for 1 s"):
                accepting.result(10)


def test_one_of_several_processes_does_not_run_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(COUNT, "2")
    assert main(["run", str(write_config(tmp_path))]) == 1
    assert f"vcppo: {COUNT} is set, so this is one of several processes" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_process_that_cannot_join_says_where_it_tried(tmp_path, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    for name, value in ((ADDRESS, address), (COUNT, "2"), (INDEX, "1")):
        monkeypatch.setenv(name, value)
    command = [sys.executable, "-m", "vcppo_jax.cli", "run", str(write_config(tmp_path))]
    result = subprocess.run(
        [*command, "--distributed", "--join-timeout", "2"], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 1, result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith(
        f"vcppo: process 1 cannot join the job at {address}: not all processes came within 2 s"
    )


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("mesh: no"),
        WriteError("x: cannot be written"),
        CheckpointError("none is intact"),
        OSError(28, "No space left on device", "file"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_of_process_0_arrive_as_they_are(error):
    received = pickle.loads(pickle.dumps(processes._portable(error)))
    assert (type(received), str(received)) == (type(error), str(error))


def test_an_error_that_cannot_be_sent_arrives_as_its_message():
    received = pickle.loads(pickle.dumps(processes._portable(Interrupted(15))))
    assert (type(received), str(received)) == (RuntimeError, "SIGTERM")


def test_work_is_shared_out_once(monkeypatch):
    """Each process does its part, pairs of items together; the parts are the whole, in order."""
    parts = []
    monkeypatch.setattr(processes.jax, "process_count", lambda: 3)
    for index in range(3):
        monkeypatch.setattr(processes.jax, "process_index", lambda index=index: index)
        shares = processes.Shares(8, lambda items: [item * 10 for item in items], together=2)
        shares.give([7, 6, 5])
        shares.give([0, 1, 2, 3, 4])
        monkeypatch.setattr(processes, "gather", lambda part: [part | dict.fromkeys(range(8))])
        _ = shares.results
        parts.append(shares._done)
    assert [sorted(part) for part in parts] == [[0, 1, 6, 7], [2, 3], [4, 5]]
    monkeypatch.setattr(processes, "gather", lambda part: parts)
    monkeypatch.setattr(processes.jax, "process_index", lambda: 3)
    assert processes.Shares(8, list).results == [item * 10 for item in range(8)]
