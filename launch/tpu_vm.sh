#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/tpu_vm.sh run NAME --zone=ZONE --type=TYPE [options] CONFIG [key.sub=value ...]
       launch/tpu_vm.sh logs|stop|delete NAME --zone=ZONE [--project=PROJECT]

run     asks for a TPU pod (a queued resource), waits until it is there, copies this directory to every worker,
        installs it, runs `vcppo run CONFIG ... --distributed` on all of them, and waits for its end. A pod that
        was preempted is deleted and asked for again, and the run goes on from its last checkpoint. Ctrl-C ends
        only the waiting: the run goes on, and the same command finds it. run_dir, model and data must be on a
        file system that all workers share; --setup can mount it.
logs    follows the log of the first worker
stop    has vcppo save and end; `run` goes on from there
delete  gives the pod back

  --type=TYPE             accelerator type, e.g. v5p-128 (which counts cores: 64 chips), v5litepod-64, v6e-64
  --slices=N              so many pods of this type, joined by the data centre's network (default 1)
  --runtime=VERSION       image of the TPU VM (default: that of the type)
  --setup=COMMAND         runs on every worker before the installation
  --create-flag=FLAG      goes to `gcloud compute tpus queued-resources create`, e.g. --spot; may be repeated
  --project=PROJECT       default: gcloud's
USAGE
}

fail() {
  echo "tpu_vm.sh: $*" >&2
  exit 1
}

command=${1:-} name=${2:-}
if [[ $command == -h || $command == --help ]]; then
  usage
  exit 0
fi
[[ $command =~ ^(run|logs|stop|delete)$ ]] ||
  fail "expected run, logs, stop or delete, got '$command' (launch/tpu_vm.sh --help)"
[[ $name =~ ^[a-z][-a-z0-9]*$ ]] || fail "NAME: expected small letters, digits and dashes, got '$name'"
shift 2

zone="" type="" slices=1 runtime="" setup="" where=() create_flags=()
while [[ ${1:-} == -* ]]; do
  case $1 in
    --zone=?*) zone=${1#*=} where+=("$1") ;;
    --project=?*) where+=("$1") ;;
    --type=?*) type=${1#*=} ;;
    --slices=?*) slices=${1#*=} ;;
    --runtime=?*) runtime=${1#*=} ;;
    --setup=?*) setup=${1#*=} ;;
    --create-flag=?*) create_flags+=("${1#*=}") ;;
    *) fail "$1: unknown option, or no value (launch/tpu_vm.sh --help)" ;;
  esac
  shift
done
[[ -n $zone ]] || fail "--zone=ZONE is missing"
command -v gcloud >/dev/null || fail "gcloud is not on PATH: install the Google Cloud CLI"

resources() { # COMMAND [argument ...]
  gcloud compute tpus queued-resources "$1" "$name" "${where[@]}" "${@:2}"
}

on_workers() { # runs a command on all workers of all slices
  resources ssh --node=all --worker=all --command="$1"
}

case $command in
  logs)
    resources ssh --node=0 --worker=0 --command='tail -n 100 -F ~/vcppo.log'
    exit
    ;;
  stop)
    on_workers 'cd ~/vcppo_jax && launch/tpu_worker.sh stop'
    exit
    ;;
  delete)
    resources delete --force --quiet
    exit
    ;;
esac

[[ -n $type ]] || fail "--type=TYPE is missing, e.g. --type=v5p-128"
[[ $slices =~ ^[1-9][0-9]*$ ]] || fail "--slices: expected a number, got '$slices'"
[[ $# -gt 0 ]] || fail "CONFIG is missing: launch/tpu_vm.sh run NAME --zone=ZONE --type=TYPE CONFIG"
code=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
[[ $1 != /* && -f $code/$1 ]] || fail "$1: expected a file below $code, by its path from there"
if [[ -z $runtime ]]; then
  case $type in # https://cloud.google.com/tpu/docs/runtimes
    v6e-*) runtime=v2-alpha-tpuv6e ;;
    v5p-*) runtime=v2-alpha-tpuv5 ;;
    v5litepod-*) runtime=v2-alpha-tpuv5-lite ;;
    v4-*) runtime=tpu-ubuntu2204-base ;;
    *) fail "--runtime=VERSION is missing: none is known for $type" ;;
  esac
fi
nodes=("--node-id=$name")
[[ $slices -eq 1 ]] || nodes=("--node-count=$slices" "--node-prefix=$name")

work=$(mktemp -d)
trap 'rm -rf -- "$work"' EXIT

here() { # the state of the queued resource, nothing where there is none
  gcloud compute tpus queued-resources list "${where[@]}" --filter="name ~ /$name\$" --format='value(state.state)'
}

copy_and_install() { # `|| return`: where its status is asked for, set -e does not hold
  git -C "$code" ls-files -z --cached --others --exclude-standard |
    while IFS= read -r -d '' file; do
      if [[ -e $code/$file ]]; then printf '%s\0' "$file"; fi
    done |
    tar -czf "$work/code.tgz" -C "$code" --null --files-from=- || return
  gcloud compute tpus queued-resources scp "$work/code.tgz" "$name:vcppo_jax.tgz" "${where[@]}" \
    --node=all --worker=all || return
  [[ -z $setup ]] || on_workers "$setup" || return
  on_workers 'mkdir -p ~/vcppo_jax && tar -xzf ~/vcppo_jax.tgz -C ~/vcppo_jax &&
    cd ~/vcppo_jax && launch/tpu_worker.sh install'
}

printf -v arguments ' %q' "$@"
while true; do
  state=$(here)
  case $state in
    "")
      echo "tpu_vm.sh: asking for $slices x $type as $name"
      resources create "${nodes[@]}" --accelerator-type="$type" --runtime-version="$runtime" \
        ${create_flags[@]+"${create_flags[@]}"} # so written for Bash 3.2, of macOS
      continue
      ;;
    SUSPENDED) # preempted; it never comes back by itself
      echo "tpu_vm.sh: $name was preempted"
      resources delete --force --quiet
      continue
      ;;
    FAILED)
      fail "$name: the request failed; \`gcloud compute tpus queued-resources describe $name ${where[*]}\` says" \
        "why, launch/tpu_vm.sh delete $name ${where[*]} takes it away"
      ;;
    ACTIVE) ;;
    *)
      echo "tpu_vm.sh: $name is $state"
      sleep 30
      continue
      ;;
  esac

  # gcloud's status is the command's on the first worker that failed, 255 where the connection did.
  status=0
  on_workers 'cd ~/vcppo_jax 2>/dev/null && launch/tpu_worker.sh running' || status=$?
  if [[ $status -ne 0 ]]; then
    status=0
    { copy_and_install && on_workers "cd ~/vcppo_jax && launch/tpu_worker.sh start$arguments"; } || status=$?
  fi
  if [[ $status -eq 0 ]]; then
    echo "tpu_vm.sh: running; launch/tpu_vm.sh logs $name ${where[*]} shows its log"
    on_workers 'cd ~/vcppo_jax && launch/tpu_worker.sh wait' || status=$?
    [[ $status -ne 0 ]] || exit 0
  fi
  sleep 60 # so that a preemption, which ends commands, too, shows in the state
  [[ $status -eq 255 || $(here) != ACTIVE ]] ||
    fail "a worker ended with status $status; launch/tpu_vm.sh logs $name ${where[*]} shows its log"
done
