"""`launch/slurm.sh` on a real Slurm of one node, two tasks a job: what is put back into the queue."""

import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import tiny_run
from launch_tools import LAUNCH, ROOT, stand_in
from one_node_slurm import Slurm, missing_programs, one_node_slurm

pytestmark = pytest.mark.skipif(
    bool(missing_programs()), reason=f"no Slurm here: {', '.join(missing_programs())} not found"
)
# A stand-in, so that a job takes a second. The first line of a task's CONFIG says what it does when it starts
# for the first time; the second start finishes.
VCPPO = r"""
echo "start ${SLURM_RESTART_COUNT:-0} task $SLURM_PROCID of $SLURM_NTASKS: $*"
[[ ${SLURM_RESTART_COUNT:-0} -eq 0 ]] || exit 0
case $(<"$2") in
  train) trap 'sleep 1; echo "task $SLURM_PROCID saved"; exit 143' TERM; touch "$2.runs"
         for _ in {1..600}; do sleep 0.1; done ;;
  lose) [[ $SLURM_PROCID -eq 0 ]] || kill -KILL $$; sleep 0.5; exit 75 ;;
  err) exit 1 ;;
esac
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    base = tmp_path_factory.mktemp("slurm")
    stand_in(base / "bin", "vcppo", VCPPO)
    with ExitStack() as stack:
        try:
            cluster = stack.enter_context(one_node_slurm(base, grace_seconds=30))
        except RuntimeError as error:
            pytest.skip(f"Slurm does not start here: {error}")
        yield cluster


def submit(slurm: Slurm, does: str, partition: str) -> str:
    """The id of a job whose tasks do `does`."""
    config = slurm.base / f"{does}_{partition}.yaml"
    config.write_text(does)
    return slurm(
        *("sbatch", "--parsable", f"--partition={partition}", "--ntasks=2", f"--chdir={slurm.base}"),
        *(
            f"--export=ALL,PATH={slurm.base}/bin:{slurm.env['PATH']}",
            LAUNCH / "slurm.sh",
            config.name,
            "seed=1",
        ),
    )


def log(slurm: Slurm, job: str) -> list[str]:
    return (slurm.base / f"vcppo-{job}.log").read_text().splitlines()


def starts(slurm: Slurm, job: str) -> list[str]:
    return sorted(line for line in log(slurm, job) if line.startswith("start "))


def test_what_is_requeued_and_what_is_not(slurm: Slurm):
    """All at once, since Slurm takes seconds to put a job back."""
    trained, lost = submit(slurm, "train", "low"), submit(slurm, "lose", "high")
    erred, cancelled = submit(slurm, "err", "high"), submit(slurm, "train", "high")
    slurm.until(lambda: all((slurm.base / f"train_{p}.yaml.runs").exists() for p in ("low", "high")))
    slurm("scancel", cancelled)
    first = slurm(
        "sbatch", "--parsable", "--partition=high", "--exclusive", "--output=/dev/null", "--wrap=true"
    )

    # The exclusive job in `high` preempts the one in `low`: TERM, and 30 s of grace, which it does not need.
    slurm.wait(first, "COMPLETED")
    done = slurm.wait(trained, "COMPLETED")
    assert done["Restarts"] == "1"
    command = "train_low.yaml seed=1 --distributed"
    assert starts(slurm, trained) == [
        f"start {restart} task {task} of 2: run {command}" for restart in (0, 1) for task in (0, 1)
    ]
    lines = log(slurm, trained)
    assert {"task 0 saved", "task 1 saved"} <= set(lines)  # Slurm waited for both
    assert f"slurm.sh: status 143: job {trained} goes back into the queue (restart 1)" in lines

    done = slurm.wait(lost, "COMPLETED")
    assert done["Restarts"] == "1"
    assert f"slurm.sh: status 137: job {lost} goes back into the queue (restart 1)" in log(slurm, lost)

    done = slurm.wait(erred, "FAILED")
    assert (done["Restarts"], done["ExitCode"]) == ("0", "1:0")
    assert len(starts(slurm, erred)) == 2

    done = slurm.wait(cancelled, "CANCELLED")
    assert done["Restarts"] == "0"
    assert {"task 0 saved", "task 1 saved"} <= set(log(slurm, cancelled))
    assert len(starts(slurm, cancelled)) == 2


@pytest.mark.processes
def test_a_real_run_is_stopped_by_slurm_and_goes_on(slurm: Slurm):
    """Two processes train the tiny model; a preemption's signal comes, they save, and the job goes on."""
    steps = 30
    directory = slurm.base / "real"
    directory.mkdir()
    sections = tiny_run.YAML.replace("phases: [sft, value, rl, evaluate]", "phases: [sft]")
    sections = sections.replace("{fsdp: 8}", "{fsdp: 4}").replace(
        "sft: {batch_size: 16, steps: 4", f"sft: {{batch_size: 16, steps: {steps}"
    )
    # What is resumed is what the signal saved: there is no other checkpoint before the end.
    sections = sections.replace("checkpoint: {every: 1,", f"checkpoint: {{every: {steps},")
    (directory / "tiny.yaml").write_text(f"run_dir: run\n{sections}")
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    path = f"{Path(sys.executable).parent}:{slurm.env['PATH']}"
    job = slurm(
        *("sbatch", "--parsable", "--partition=low", "--ntasks=2", f"--chdir={directory}"),
        *(f"--export=ALL,PATH={path},XLA_FLAGS={flags},PYTHONPATH={ROOT}", LAUNCH / "slurm.sh", "tiny.yaml"),
    )
    metrics = directory / "run" / "sft" / "metrics.jsonl"
    slurm.until(lambda: metrics.exists() and "\n" in metrics.read_text(), seconds=300)
    slurm("scancel", "--signal=TERM", job)  # to the tasks, as preemption and the time limit send it
    done = slurm.wait(job, "COMPLETED", seconds=300)
    assert done["Restarts"] == "1"
    text = (directory / f"vcppo-{job}.log").read_text()
    saved = re.search(r"sft: SIGTERM: step (\d+) is saved", text)
    assert saved, text
    assert 0 < int(saved[1]) < steps
    assert f"sft: resumed after step {saved[1]}\n" in text
    rows = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert rows == list(range(1, steps + 1))
