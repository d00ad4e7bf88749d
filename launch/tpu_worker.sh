#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/tpu_worker.sh COMMAND

What launch/tpu_vm.sh runs on every worker of a TPU pod, in the directory of the code:

  install                        Python 3.12 and vcppo_jax with its TPU extra, in ~/venv
  start CONFIG [key.sub=value ...]
                                 `launch/host.sh --cluster CONFIG ...` in the background, logged to ~/vcppo.log;
                                 nothing if it runs already
  running                        whether it runs
  wait                           until it ends; its exit status
  stop                           SIGTERM: vcppo saves and ends
USAGE
}

fail() {
  echo "tpu_worker.sh on $(hostname): $*" >&2
  exit 1
}

running() {
  [[ -f ~/vcppo.pid ]] && kill -0 "$(<~/vcppo.pid)" 2>/dev/null
}

command=${1:-}
[[ $# -eq 0 ]] || shift
case $command in
  install)
    # The images' Python is 3.10; uv brings one that vcppo_jax runs on.
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --allow-existing --python 3.12 ~/venv
    python3 -m uv pip install --quiet --python ~/venv/bin/python -e '.[tpu]'
    ;;
  start)
    [[ -f ${1:-} ]] || fail "${1:-CONFIG}: no such file in $PWD"
    if running; then
      echo "tpu_worker.sh: runs already (process $(<~/vcppo.pid))"
      exit 0
    fi
    rm -f ~/vcppo.status
    # A file for its output and no terminal: it lives on when the connection ends.
    # shellcheck disable=SC2016 # expanded by the inner shell
    PATH=~/venv/bin:$PATH setsid nohup bash -c '
      trap : TERM # of a shutdown, which host.sh gets, too
      status=0
      launch/host.sh --cluster "$@" || status=$?
      echo $status >~/vcppo.status
    ' tpu_worker "$@" >>~/vcppo.log 2>&1 </dev/null &
    echo $! >~/vcppo.pid
    ;;
  running) running ;;
  wait)
    while running; do sleep 5; done
    [[ -f ~/vcppo.status ]] || fail "vcppo was killed; the last lines of ~/vcppo.log: $(tail -n 3 ~/vcppo.log)"
    status=$(<~/vcppo.status)
    [[ $status -eq 0 ]] || echo "tpu_worker.sh on $(hostname): vcppo ended with status $status" >&2
    exit "$status"
    ;;
  stop)
    if running; then
      pkill -TERM --parent "$(<~/vcppo.pid)"
      while running; do sleep 1; done
    fi
    ;;
  -h | --help) usage ;;
  *) fail "expected install, start, running, wait or stop, got '$command' (launch/tpu_worker.sh --help)" ;;
esac
