#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/host.sh CONFIG [key.sub=value ...]                                          one host, all its GPUs
       launch/host.sh --coordinator=HOST:PORT --hosts=N --host=I CONFIG [key.sub=value ...]   one of N hosts
       launch/host.sh --cluster CONFIG [key.sub=value ...]        a host of a cluster that JAX knows (TPU pod)

Runs `vcppo run CONFIG ...` in one process that drives all accelerators of the host; CUDA_VISIBLE_DEVICES
leaves some out. With several hosts, start it on each: the same command but for --host, which is 0 on the
coordinator and N-1 on the last. When a process dies, each host starts its own again, at most 20 times, and all go
on from the last checkpoint. SIGTERM and Ctrl-C save first; the same command goes on.
run_dir, model and data must be at the same path on all hosts.
USAGE
}

fail() {
  echo "host.sh: $*" >&2
  exit 1
}

coordinator="" hosts="" host="" cluster=""
while [[ ${1:-} == -* ]]; do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --coordinator=*) coordinator=${1#*=} ;;
    --hosts=*) hosts=${1#*=} ;;
    --host=*) host=${1#*=} ;;
    --cluster) cluster=yes ;;
    *) fail "$1: unknown option (launch/host.sh --help)" ;;
  esac
  shift
done
[[ $# -gt 0 ]] || fail "CONFIG is missing: launch/host.sh CONFIG [key.sub=value ...]"
[[ -f $1 ]] || fail "$1: no such file in $PWD"
command -v vcppo >/dev/null || fail "vcppo is not on PATH: activate its environment"

if [[ -n $coordinator$hosts$host ]]; then
  [[ -z $cluster ]] || fail "--cluster finds the other hosts itself: leave out --coordinator, --hosts, --host"
  [[ $coordinator =~ ^[^:]+:[0-9]+$ ]] || fail "--coordinator: expected HOST:PORT, got '$coordinator'"
  [[ $hosts =~ ^[1-9][0-9]*$ ]] || fail "--hosts: expected the number of hosts, got '$hosts'"
  [[ $host =~ ^[0-9]+$ && $host -lt $hosts ]] || fail "--host: expected 0 to $((hosts - 1)), got '$host'"
  export JAX_COORDINATOR_ADDRESS=$coordinator JAX_NUM_PROCESSES=$hosts JAX_PROCESS_ID=$host
elif [[ -z $cluster ]]; then
  exec vcppo run "$@"
fi

signal="" child=""
trap 'signal=TERM; kill -TERM "$child" 2>/dev/null || true' TERM
trap 'signal=INT' INT # the terminal sends it to vcppo, too, and a second one would end it without saving

# 75: another process was lost; 137, 139: this one died of a signal.
for ((start = 0; start <= 20; start++)); do
  vcppo run "$@" --distributed &
  child=$!
  status=0
  wait "$child" || status=$?
  while kill -0 "$child" 2>/dev/null; do # a signal ends `wait`, not the child, which saves
    status=0
    wait "$child" || status=$?
  done
  [[ $status =~ ^(75|137|139)$ && -z $signal ]] || exit "$status"
  echo "host.sh: vcppo ended with status $status, start $((start + 1)) of 21" >&2
done
exit "$status"
