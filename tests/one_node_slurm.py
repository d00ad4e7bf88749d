"""A real Slurm of one node in a directory of its own: munged, slurmctld and slurmd, as the user who asks.

Debian: `apt-get install slurm-wlm munge`. Nothing of it is left running; it uses no file of the
machine's own Slurm.
"""

import getpass
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel")
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={base}/munge.sock,cred_expire=5
StateSaveLocation={base}/state
SlurmdSpoolDir={base}/spool
SlurmctldPidFile={base}/slurmctld.pid
SlurmdPidFile={base}/slurmd.pid
SlurmctldLogFile={base}/slurmctld.log
SlurmdLogFile={base}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,batch_sched_delay=0
ReturnToService=2
KillWait=30
InactiveLimit=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdParameters=config_overrides
NodeName=localhost NodeHostname={host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=low Nodes=localhost Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=localhost MaxTime=INFINITE State=UP PriorityTier=2 PreemptMode=OFF
"""


def missing_programs() -> list[str]:
    """Slurm's and munge's programs that this machine lacks."""
    return [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]


class Slurm:
    """The running cluster."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.daemons: list[subprocess.Popen] = []
        self.env = os.environ | {"PATH": PATH, "SLURM_CONF": str(base / "slurm.conf")}

    def __call__(self, *command: str | Path, check: bool = True) -> str:
        """What a command of Slurm prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=60)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}")
        return done.stdout.strip()

    def job(self, job: str) -> dict[str, str]:
        """What `scontrol show job` says: JobState, Restarts, ExitCode, ..."""
        words = self("scontrol", "show", "job", "--oneliner", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait(self, job: str, state: str, seconds: float = 60) -> dict[str, str]:
        """The job, as soon as it is in the state."""
        self.until(lambda: self.job(job)["JobState"] == state, seconds)
        return self.job(job)

    def until(self, ready: Callable[[], bool], seconds: float = 60) -> None:
        """Wait until `ready`. RuntimeError, with what the daemons wrote, if it takes longer or one ends."""
        end = time.monotonic() + seconds
        while not ready():
            if time.monotonic() > end or any(daemon.poll() is not None for daemon in self.daemons):
                jobs = self("squeue", "-o", "%i %P %T %r", check=False)
                written = [
                    f"{file.name}: {file.read_text()[-800:]}" for file in sorted(self.base.glob("*.out"))
                ]
                raise RuntimeError("\n".join(["Slurm does not get there:", jobs, *written]))
            time.sleep(0.2)


@contextmanager
def one_node_slurm(base: Path, *, grace_seconds: int) -> Iterator[Slurm]:
    """A Slurm whose partition `low` is preempted by `high`, with `grace_seconds` between TERM and the end.

    Raises RuntimeError, with the daemons' last lines, where it does not come up.
    """
    base.chmod(0o755)
    for name in ("state", "spool"):
        (base / name).mkdir()
    (base / "munge.key").write_bytes(secrets.token_bytes(64))
    (base / "munge.key").chmod(0o400)
    host = socket.gethostname().split(".")[0]
    ports = _free_ports(2)
    (base / "slurm.conf").write_text(
        CONF.format(
            host=host,
            controller_port=ports[0],
            node_port=ports[1],
            user=getpass.getuser(),
            base=base,
            grace=grace_seconds,
        )
    )
    slurm = Slurm(base)
    munged = ["munged", "--force", "--foreground"]
    munged += [f"--key-file={base}/munge.key", f"--socket={base}/munge.sock"]
    munged += [f"--{name}-file={base}/munge.{name}" for name in ("pid", "log", "seed")]
    try:
        for command in (munged, ["slurmctld", "-D", "-i"], ["slurmd", "-D", "-N", "localhost"]):
            with (base / f"{command[0]}.out").open("w") as out:
                slurm.daemons.append(subprocess.Popen(command, env=slurm.env, stdout=out, stderr=out))
            if command is munged:
                slurm.until((base / "munge.sock").exists)
        slurm.until(lambda: slurm("sinfo", "-h", "-o", "%T", "-p", "low", check=False) == "idle", seconds=20)
        yield slurm
    finally:
        if slurm("squeue", "-h", "-o", "%i", check=False):
            slurm("scancel", "--signal=KILL", "--full", f"--user={getpass.getuser()}", check=False)
        for daemon in reversed(slurm.daemons):
            daemon.send_signal(signal.SIGTERM)
        for daemon in slurm.daemons:
            daemon.wait(timeout=30)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
