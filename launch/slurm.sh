#!/usr/bin/env bash
#SBATCH --job-name=vcppo
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=TERM@300
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: sbatch [options of sbatch] launch/slurm.sh CONFIG [key.sub=value ...]

Runs `vcppo run CONFIG ... --distributed` in every task of a Slurm job, and puts the job back into the queue
when it was preempted, ran into its time limit or lost a process. The requeued job goes on where it was saved.

  sbatch --nodes=4 --ntasks-per-node=8 --gpus-per-node=8 --time=24:00:00 launch/slurm.sh CONFIG

One task per GPU. Submit from an environment that has `vcppo`; run_dir, model and data must be on a file
system that all nodes share. #SBATCH lines set what a resume needs (append to the log, --requeue, SIGTERM five
minutes before the time limit); an option of sbatch goes over them. A partition that preempts should have a
GraceTime in which a checkpoint can be written.
USAGE
}

fail() {
  echo "slurm.sh: $*" >&2
  exit 1
}

if [[ ${1:-} == -h || ${1:-} == --help ]]; then
  usage
  exit 0
fi
[[ $# -gt 0 ]] || fail "CONFIG is missing: sbatch ... launch/slurm.sh CONFIG [key.sub=value ...]"
[[ -n ${SLURM_JOB_ID:-} ]] || fail "not in a Slurm job: submit it with sbatch (launch/slurm.sh --help)"
[[ -f $1 ]] || fail "$1: no such file in $PWD"
command -v vcppo >/dev/null || fail "vcppo is not on PATH: activate its environment before sbatch"
[[ -z ${SLURM_GPUS_PER_TASK:-} ]] ||
  fail "--gpus-per-task hides the other GPUs, and JAX asks for the one of the task's number: use --gpus-per-node"
tasks_per_node=${SLURM_TASKS_PER_NODE%%[(,]*}
if [[ -n ${SLURM_GPUS_ON_NODE:-} && $SLURM_GPUS_ON_NODE != "$tasks_per_node" ]]; then
  fail "expected one task per GPU, got $tasks_per_node tasks and $SLURM_GPUS_ON_NODE GPUs on a node:" \
    "sbatch --ntasks-per-node=$SLURM_GPUS_ON_NODE"
fi

# srun does not take over --cpus-per-task from sbatch since Slurm 22.05.
if [[ -n ${SLURM_CPUS_PER_TASK:-} ]]; then
  export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
fi

# Slurm sends TERM to the tasks, and sometimes to this shell, which must live until they have saved.
trap : TERM

# vcppo ends all tasks when one is lost, and each is given the time to save: Slurm must not kill the others
# at the first exit. A minute after the first exit nothing useful can be running.
status=0
srun --kill-on-bad-exit=0 --wait=60 vcppo run "$@" --distributed || status=$?

# 143: SIGTERM came and the state is saved; 75: another process was lost; 137, 139: a task died of a signal.
restarts=${SLURM_RESTART_COUNT:-0}
case $status in
  143) ;;
  75 | 137 | 139) [[ $restarts -lt 20 ]] || fail "status $status after $restarts restarts: not requeued again" ;;
  *) exit "$status" ;;
esac
# After scancel, or where Slurm requeues the job itself, the job is no longer RUNNING.
state=$(squeue --noheader --format=%T --jobs="$SLURM_JOB_ID" || true)
if [[ $state == RUNNING ]]; then
  echo "slurm.sh: status $status: job $SLURM_JOB_ID goes back into the queue (restart $((restarts + 1)))"
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
