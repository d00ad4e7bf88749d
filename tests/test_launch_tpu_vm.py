"""`launch/tpu_vm.sh` and `tpu_worker.sh` against a stand-in for gcloud.

It records the calls, keeps the state of the queued resource in a file, and runs what is sent by ssh in one
home directory per worker.
"""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch_tools import LAUNCH, ROOT, environment, run_script, stand_in

CONFIG = "configs/quickstart.yaml"
WHERE = ("--zone=us-east5-a", "--project=p")
GCLOUD = r"""
verb=$4; shift 4
printf '%s' "$verb" >>"$BASE/calls"; printf ' %q' "$@" >>"$BASE/calls"; echo >>"$BASE/calls"
read -r -a states <"$BASE/states"
case $verb in
  list) # each look sees the next state; the last one stays
    [[ ${states[0]} == none ]] || echo "${states[0]}"
    [[ ${#states[@]} -eq 1 ]] || echo "${states[@]:1}" >"$BASE/states" ;;
  create) echo "WAITING_FOR_RESOURCES ACTIVE" >"$BASE/states" ;;
  delete) echo none >"$BASE/states"; rm -rf "$BASE"/worker?/* ;;
  scp) for home in "$BASE"/worker?; do cp "$1" "$home/vcppo_jax.tgz" || exit 1; done ;;
  ssh)
    for word in "$@"; do [[ $word != --command=* ]] || command=${word#*=}; done
    status=0
    for home in "$BASE"/worker?; do
      (cd "$home" && HOME=$home bash -c "$command") || { one=$?; [[ $status -ne 0 ]] || status=$one; }
    done
    exit $status ;;
esac
"""
PYTHON = 'echo "python3 $*" >>"$HOME/python_calls"'
VCPPO = 'echo "$* in $(basename "$HOME")" >>"$BASE/starts"\n'


@pytest.fixture
def cloud(tmp_path: Path) -> dict[str, str]:
    """The environment with gcloud's stand-in, two workers, and naps instead of sleep."""
    for worker in ("worker0", "worker1"):
        (tmp_path / worker).mkdir()
    (tmp_path / "states").write_text("none\n")
    stand_in(tmp_path / "bin", "gcloud", GCLOUD)
    stand_in(tmp_path / "bin", "python3", PYTHON)
    stand_in(tmp_path / "bin", "sleep", "exec /bin/sleep 0.05")
    return environment(tmp_path / "bin", BASE=str(tmp_path))


def calls(tmp_path: Path) -> list[str]:
    return (tmp_path / "calls").read_text().splitlines()


def run_pod(env: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script("tpu_vm.sh", "run", "pod", *WHERE, "--type=v5p-128", *arguments, env=env)


def test_a_preempted_pod_is_asked_for_again_and_the_run_goes_on(cloud: dict[str, str], tmp_path: Path):
    # The first start is ended by the preemption, the second finishes.
    preempted = "[[ $(wc -l <$BASE/starts) -gt 2 ]] || { echo SUSPENDED >$BASE/states; exit 143; }"
    stand_in(tmp_path / "bin", "vcppo", VCPPO + preempted)
    options = (
        "--slices=2",
        "--create-flag=--spot",
        "--create-flag=--network=n",
        "--setup=echo mounted >>$HOME/mount",
    )
    done = run_pod(cloud, *options, CONFIG, "seed=1", "run_dir=/shared/a b")
    assert done.returncode == 0, done.stdout + done.stderr

    verbs = [call.split()[0] for call in calls(tmp_path)]
    workers = ["ssh", "scp", "ssh", "ssh", "ssh", "ssh"]  # running? copy, --setup, install, start, wait
    begin = ["list", "create", "list", "list", *workers]
    assert verbs == [*begin, "list", "list", "delete", *begin]
    create = calls(tmp_path)[1]
    assert create == (
        "create pod --zone=us-east5-a --project=p --node-count=2 --node-prefix=pod "
        "--accelerator-type=v5p-128 --runtime-version=v2-alpha-tpuv5 --spot --network=n"
    )
    assert "delete pod --zone=us-east5-a --project=p --force --quiet" in calls(tmp_path)
    assert all(
        "--node=all --worker=all" in call for call in calls(tmp_path) if call.split()[0] in ("ssh", "scp")
    )
    starts = (tmp_path / "starts").read_text().splitlines()
    one = "run configs/quickstart.yaml seed=1 run_dir=/shared/a b --distributed in worker"
    assert sorted(starts) == sorted([f"{one}0", f"{one}1"] * 2)

    home = tmp_path / "worker1"
    assert (home / "vcppo_jax" / "vcppo_jax" / "cli.py").read_text() == (
        ROOT / "vcppo_jax" / "cli.py"
    ).read_text()
    assert (home / "mount").read_text() == "mounted\n"
    assert "uv pip install --quiet --python" in (home / "python_calls").read_text()
    assert "pod was preempted" in done.stdout


def test_an_error_on_a_worker_ends_the_launch(cloud: dict[str, str], tmp_path: Path):
    stand_in(tmp_path / "bin", "vcppo", VCPPO + "exit 1")
    (tmp_path / "states").write_text("ACTIVE\n")
    done = run_pod(cloud, CONFIG)
    assert done.returncode == 1
    assert "a worker ended with status 1; launch/tpu_vm.sh logs pod --zone=us-east5-a" in done.stderr
    assert not [call for call in calls(tmp_path) if call.startswith(("create", "delete"))]


def test_a_failed_copy_starts_nothing(cloud: dict[str, str], tmp_path: Path):
    stand_in(tmp_path / "bin", "vcppo", VCPPO)
    stand_in(tmp_path / "bin", "tar", "exit 2")
    (tmp_path / "states").write_text("ACTIVE\n")
    assert run_pod(cloud, CONFIG).returncode == 1
    assert not (tmp_path / "starts").exists()


def test_a_failed_request_is_told_not_repeated(cloud: dict[str, str], tmp_path: Path):
    (tmp_path / "states").write_text("FAILED\n")
    done = run_pod(cloud, CONFIG)
    assert done.returncode == 1
    assert "pod: the request failed; `gcloud compute tpus queued-resources describe pod" in done.stderr
    assert len(calls(tmp_path)) == 1


def test_the_launch_finds_a_run_that_is_under_way_and_stop_has_it_save(cloud: dict[str, str], tmp_path: Path):
    stand_in(
        tmp_path / "bin",
        "vcppo",
        VCPPO + "trap 'touch $HOME/saved; exit 143' TERM; for _ in {1..400}; do /bin/sleep 0.05; done",
    )
    (tmp_path / "states").write_text("ACTIVE\n")
    command = [LAUNCH / "tpu_vm.sh", "run", "pod", *WHERE, "--type=v5p-128", CONFIG]
    first = subprocess.Popen(command, env=cloud, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    starts = tmp_path / "starts"
    while not (starts.exists() and len(starts.read_text().splitlines()) == 2):
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGINT)  # Ctrl-C
    first.wait(timeout=30)
    (tmp_path / "calls").unlink()

    second = subprocess.Popen(
        command, env=cloud, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    while not (tmp_path / "calls").exists() or len(calls(tmp_path)) < 3:
        time.sleep(0.05)
    assert run_script("tpu_vm.sh", "stop", "pod", *WHERE, env=cloud).returncode == 0
    _, errors = second.communicate(timeout=30)
    assert second.returncode == 1
    assert "a worker ended with status 143" in errors
    assert "scp" not in " ".join(calls(tmp_path))  # nothing was copied over the code of the running one
    assert len(starts.read_text().splitlines()) == 2
    for worker in ("worker0", "worker1"):
        assert (tmp_path / worker / "saved").exists()


def test_logs_and_delete(cloud: dict[str, str], tmp_path: Path):
    assert run_script("tpu_vm.sh", "delete", "pod", *WHERE, env=cloud).returncode == 0
    run_script("tpu_vm.sh", "logs", "pod", *WHERE, env=cloud | {"PATH": f"{tail(tmp_path)}:{cloud['PATH']}"})
    assert calls(tmp_path) == [
        "delete pod --zone=us-east5-a --project=p --force --quiet",
        r"ssh pod --zone=us-east5-a --project=p --node=0 --worker=0 "
        r"--command=tail\ -n\ 100\ -F\ ~/vcppo.log",
    ]


def tail(tmp_path: Path) -> Path:
    """A directory with a tail that does not follow."""
    stand_in(tmp_path / "tail", "tail", "exit 0")
    return tmp_path / "tail"
