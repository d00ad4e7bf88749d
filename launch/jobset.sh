#!/usr/bin/env bash
set -euo pipefail

usage() {
  cat <<'USAGE'
usage: launch/jobset.sh --name=NAME --image=IMAGE --claim=CLAIM --hosts=N ACCELERATOR CONFIG run_dir=/shared/... \
         [key.sub=value ...] | kubectl apply -f -

Writes the manifest of a Kubernetes JobSet (jobset.sigs.k8s.io, 0.8 or newer) that runs `vcppo run CONFIG ...
--distributed` in one pod per host. A preempted pod, a lost process, a drained node restart all pods, which go
on from the last checkpoint; an error of the user's (status 1) ends the JobSet.

ACCELERATOR  --gpus=N                                     N NVIDIA GPUs a host
             --tpu=TYPE --topology=AxBxC --chips=N [--slices=N]
                                                          GKE: node label cloud.google.com/gke-tpu-accelerator,
                                                          e.g. tpu-v5p-slice; topology of a slice; chips a host;
                                                          --hosts counts those of one slice
IMAGE        built with launch/Dockerfile, for instance; CONFIG is a path in it, or below /shared
CLAIM        PersistentVolumeClaim that all pods can write (ReadWriteMany), mounted at /shared: run_dir, model, data
USAGE
}

fail() {
  echo "jobset.sh: $*" >&2
  exit 1
}

number() { # OPTION VALUE
  [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1: expected a number from 1, got '$2'"
}

name="" image="" claim="" hosts="" gpus="" tpu="" topology="" chips="" slices=1
while [[ ${1:-} == -* ]]; do
  case $1 in
    -h | --help)
      usage
      exit 0
      ;;
    --name=*) name=${1#*=} ;;
    --image=*) image=${1#*=} ;;
    --claim=*) claim=${1#*=} ;;
    --hosts=*) hosts=${1#*=} ;;
    --gpus=*) gpus=${1#*=} ;;
    --tpu=*) tpu=${1#*=} ;;
    --topology=*) topology=${1#*=} ;;
    --chips=*) chips=${1#*=} ;;
    --slices=*) slices=${1#*=} ;;
    *) fail "$1: unknown option (launch/jobset.sh --help)" ;;
  esac
  shift
done
[[ $name =~ ^[a-z]([-a-z0-9]*[a-z0-9])?$ ]] || fail "--name: expected small letters, digits and dashes, got '$name'"
[[ $image =~ ^[^[:space:]\"\\]+$ ]] || fail "--image: expected the name of an image, got '$image'"
[[ $claim =~ ^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$ ]] || fail "--claim: expected the name of a claim, got '$claim'"
number --hosts "$hosts"
number --slices "$slices"
[[ $# -gt 0 ]] || fail "CONFIG is missing: launch/jobset.sh ... CONFIG run_dir=/shared/... [key.sub=value ...]"
[[ " $* " == *" run_dir=/shared/"* ]] || fail "run_dir=/shared/... is missing: a run elsewhere is lost with its pod"
# Kubernetes names a pod NAME-host-SLICE-HOST-xxxxx, in at most 63 characters.
longest=$name-host-$((slices - 1))-$((hosts - 1))-xxxxx
[[ ${#longest} -le 63 ]] || fail "--name: $name is $((${#longest} - 63)) characters too long for the names of pods"

annotations="" selector="" variables="" shm_mount="" shm=""
if [[ -n $gpus && -z $tpu$topology$chips ]]; then
  number --gpus "$gpus"
  [[ $slices -eq 1 ]] || fail "--slices is for TPUs: use --hosts=$((hosts * slices))"
  resource="nvidia.com/gpu: \"$gpus\""
  variables="
              env:
              - {name: JAX_COORDINATOR_ADDRESS, value: \"$name-host-0-0.$name:8476\"}
              - {name: JAX_NUM_PROCESSES, value: \"$hosts\"}
              - name: JAX_PROCESS_ID
                valueFrom:
                  fieldRef: {fieldPath: \"metadata.annotations['batch.kubernetes.io/job-completion-index']\"}"
  # NCCL's shared memory is more than the 64 MB that a container has.
  shm_mount="
              - {name: shm, mountPath: /dev/shm}"
  shm="
            - {name: shm, emptyDir: {medium: Memory}}"
elif [[ -n $tpu && -n $topology && -n $chips && -z $gpus ]]; then
  number --chips "$chips"
  [[ $topology =~ ^[0-9]+x[0-9]+(x[0-9]+)?$ ]] || fail "--topology: expected AxB or AxBxC, got '$topology'"
  [[ $((${topology//x/*})) -eq $((hosts * chips)) ]] ||
    fail "--topology: $topology has $((${topology//x/*})) chips, got $hosts hosts x $chips chips = $((hosts * chips))"
  resource="google.com/tpu: \"$chips\""
  # All pods of a slice go to one node pool, and no others: a slice is a node pool.
  annotations="
  annotations: {alpha.jobset.sigs.k8s.io/exclusive-topology: cloud.google.com/gke-nodepool}"
  selector="
            nodeSelector:
              cloud.google.com/gke-tpu-accelerator: \"$tpu\"
              cloud.google.com/gke-tpu-topology: \"$topology\""
else
  fail "expected either --gpus=N or --tpu=TYPE --topology=AxBxC --chips=N"
fi

args=""
for argument in run "$@" --distributed; do
  [[ $argument != *[[:cntrl:]]* ]] || fail "an argument has a line break or a control character: '$argument'"
  argument=${argument//\\/\\\\}
  argument=${argument//\$(/\$\$(} # Kubernetes puts variables in for $(NAME)
  args+="
              - \"${argument//\"/\\\"}\""
done

cat <<YAML
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: $name$annotations
spec:
  network: {enableDNSHostnames: true, subdomain: $name}
  failurePolicy:
    maxRestarts: 100
    # No new pod before the last old one has saved and gone.
    restartStrategy: BlockingRecreate
    rules:
    - {name: again, action: RestartJobSet, onJobFailureReasons: [PodFailurePolicy]}
    - {name: usersError, action: FailJobSet, onJobFailureReasons: [BackoffLimitExceeded]}
  replicatedJobs:
  - name: host
    replicas: $slices
    template:
      spec:
        completionMode: Indexed
        completions: $hosts
        parallelism: $hosts
        backoffLimit: 0
        podFailurePolicy:
          rules:
          - action: FailJob
            onPodConditions: [{type: DisruptionTarget, status: "True"}]
          # 143: SIGTERM, saved; 75: another process was lost; 137, 139: died of a signal.
          - action: FailJob
            onExitCodes: {operator: In, values: [75, 137, 139, 143]}
        template:
          spec:
            restartPolicy: Never
            terminationGracePeriodSeconds: 600$selector
            containers:
            - name: vcppo
              image: "$image"
              args:$args$variables
              resources:
                limits: {$resource}
              volumeMounts:
              - {name: shared, mountPath: /shared}$shm_mount
            volumes:
            - {name: shared, persistentVolumeClaim: {claimName: $claim}}$shm
YAML
