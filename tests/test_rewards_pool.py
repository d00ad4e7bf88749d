from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from vcppo_jax.rewards.pool import VerifierPool
from vcppo_jax.rewards.score import verify

EASY = (r"\sqrt{8}", r"2\sqrt{2}")
TOWERS = [f"{base}^{{({base}^{{({base}^{{({base}^{base})}})}}-1)}}-{base}" for base in range(3, 13)]

SCRIPT = """
import sys
from vcppo_jax.rewards.pool import default_pool
from vcppo_jax.rewards.score import verify
print(verify([r"\\\\boxed{\\\\sqrt{8}}"], [r"2\\\\sqrt2"])[0].reason, flush=True)
print(default_pool()._server.process.pid, flush=True)
"""


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(2) as pool:
        yield pool


def evaluators(pool):
    """The pool's evaluating processes."""
    return psutil.Process(pool._server.process.pid).children()


def _in_group(process, pid):
    try:
        return os.getpgid(process.pid) == pid and process.status() != psutil.STATUS_ZOMBIE
    except (ProcessLookupError, psutil.NoSuchProcess):
        return False


def gone(pid, seconds=30.0):
    """Whether the process and its whole group end within the time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not any(_in_group(process, pid) for process in psutil.process_iter()):
            return True
        time.sleep(0.05)
    return False


def run_script(tmp_path, body, **kwargs):
    """Start a script that has no ``__main__`` guard."""
    path = tmp_path / "script.py"
    path.write_text(SCRIPT.replace("\\\\\\\\", "\\\\") + textwrap.dedent(body))
    return subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True, **kwargs)


def test_ten_power_towers_end_in_time_and_the_next_batch_works():
    with VerifierPool() as pool:  # as a trainer has it, start-up included
        started = time.perf_counter()
        verdicts = verify([rf"\boxed{{{tower}}}" for tower in TOWERS], [3] * 10, pool=pool)
        seconds = time.perf_counter() - started
        assert [v.reason for v in verdicts] == ["timeout"] * 10
        assert seconds < 15.0
        started = time.perf_counter()
        assert pool.run([EASY], timeout_s=2.0) == ["correct"]
        assert time.perf_counter() - started < 2.0


def test_order_is_kept_between_hanging_tasks(pool):
    tasks = [EASY, (TOWERS[0], "3"), EASY, ("y", "z"), (TOWERS[1], "3"), EASY]
    expected = ["correct", "timeout", "correct", "wrong", "timeout", "correct"]
    assert pool.run(tasks, timeout_s=1.0) == expected


def test_a_dead_evaluator_is_an_error_for_its_task_only(pool):
    assert pool.run([EASY] * 4, timeout_s=5.0) == ["correct"] * 4
    server = pool._server.process.pid

    def kill_busy():
        time.sleep(0.5)
        busiest = max(evaluators(pool), key=lambda process: process.cpu_times().user)
        os.kill(busiest.pid, signal.SIGSEGV)

    killer = threading.Thread(target=kill_busy)
    killer.start()
    reasons = pool.run([(TOWERS[0], "3"), EASY, EASY, EASY], timeout_s=5.0)
    killer.join()
    assert reasons == ["error", "correct", "correct", "correct"]
    assert pool._server.process.pid == server
    assert pool.run([EASY] * 4, timeout_s=5.0) == ["correct"] * 4


def test_idle_evaluators_that_died_are_replaced(pool):
    assert pool.run([EASY] * 4, timeout_s=5.0) == ["correct"] * 4
    for process in evaluators(pool):
        process.kill()
    time.sleep(0.2)
    assert pool.run([EASY] * 4, timeout_s=5.0) == ["correct"] * 4


def test_a_dead_server_is_replaced(pool):
    pool.run([EASY], timeout_s=5.0)
    dead = pool._server.process.pid
    os.kill(dead, signal.SIGKILL)
    assert pool.run([EASY, ("y", "z")], timeout_s=5.0) == ["correct", "wrong"]
    assert pool._server.process.pid != dead
    assert gone(dead)


def test_the_memory_limit_ends_the_task_not_the_host(pool):
    limited = VerifierPool(1, memory_bytes=300 << 20)
    with limited:
        started = time.perf_counter()
        reasons = limited.run([("2^{(2^{34})}", "3"), EASY], timeout_s=20.0)
        assert reasons[0] in ("error", "wrong")
        assert reasons[1] == "correct"
        assert time.perf_counter() - started < 15.0


def test_close_leaves_nothing_and_the_pool_starts_again(pool):
    pool.run([EASY], timeout_s=5.0)
    server = pool._server.process.pid
    pool.close()
    assert gone(server, 1.0)
    assert pool.run([EASY], timeout_s=5.0) == ["correct"]


def test_an_interrupted_batch_leaves_nothing_behind_for_the_next(pool):
    pool.run([EASY], timeout_s=5.0)
    server = pool._server.process.pid
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):  # as in a notebook, where the process lives on
        pool.run([(TOWERS[0], "3")] * 2, timeout_s=60.0)
    assert gone(server)
    assert pool.run([EASY, ("y", "z")], timeout_s=5.0) == ["correct", "wrong"]


def test_closing_ends_the_batch_of_another_thread(pool):
    """Ctrl-C in a trainer whose verifier works in the background."""
    pool.run([EASY], timeout_s=5.0)
    server, found = pool._server.process.pid, []
    tasks = [EASY, *[(TOWERS[0], "3")] * 8]
    batch = threading.Thread(target=lambda: found.append(pool.run(tasks, timeout_s=60.0)))
    batch.start()
    time.sleep(0.5)
    start = time.monotonic()
    pool.close()
    batch.join(5.0)
    assert time.monotonic() - start < 5.0
    assert gone(server)
    assert found == [["correct", *["error"] * 8]]
    assert pool.run([EASY], timeout_s=5.0) == ["correct"]


def test_the_server_ends_when_its_stdin_closes(pool):
    pool.run([EASY], timeout_s=5.0)
    server = pool._server.process
    server.stdin.close()
    assert server.wait(timeout=5.0) == 0


def test_threads_may_share_a_pool(pool):
    results = {}

    def work(number):
        results[number] = pool.run([EASY, (f"y+{number}", f"z+{number}")], timeout_s=5.0)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {number: ["correct", "wrong"] for number in range(4)}


def test_a_script_without_a_main_guard_runs_once_and_leaves_nothing(tmp_path):
    script = run_script(tmp_path, "print('jax' in sys.modules, 'sympy' in sys.modules)")
    out, _ = script.communicate(timeout=60)
    reason, server, imported = out.splitlines()
    assert (reason, imported) == ("correct", "False False")
    assert script.returncode == 0
    assert gone(int(server))


def test_the_server_does_not_import_jax():
    code = "import sys, vcppo_jax.rewards.worker, math_verify; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_a_trainer_that_is_stopped_in_a_batch(tmp_path, ending):
    body = f"verify([r'\\boxed{{{TOWERS[0]}}}'], [3], timeout_s=300.0)"
    script = run_script(tmp_path, body, stderr=subprocess.DEVNULL)
    assert script.stdout is not None
    assert script.stdout.readline().strip() == "correct"
    server = int(script.stdout.readline())
    try:
        deadline = time.monotonic() + 30
        while not any(process.cpu_times().user > 0.1 for process in psutil.Process(server).children()):
            assert time.monotonic() < deadline, "no worker is at work"
            time.sleep(0.1)
        script.send_signal(ending)
        assert script.wait(timeout=60) != 0
        assert gone(server)
    finally:
        script.kill()


def test_arguments_are_checked(pool):
    with pytest.raises(ValueError, match="workers must be at least 1"):
        VerifierPool(0)
    with pytest.raises(ValueError, match="timeout_s must be positive"):
        pool.run([EASY], timeout_s=-1.0)


def test_a_server_that_cannot_start_says_why(monkeypatch):
    monkeypatch.setattr("vcppo_jax.rewards.pool._BOOTSTRAP", "raise ImportError('no module math_verify')")
    with VerifierPool(1) as broken, pytest.raises(RuntimeError, match="no module math_verify"):
        broken.run([EASY], timeout_s=1.0)
