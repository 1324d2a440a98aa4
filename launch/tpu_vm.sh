#!/usr/bin/env bash
# Run a command of this repository on every host of a Cloud TPU VM slice, which is created when it is not there.
#
#     PROJECT=my-project ZONE=us-east5-a launch/tpu_vm.sh NAME v5p-8 envace train configs/tpu_1.7b.yaml model=/mnt/data/Qwen3-1.7B
#
# The slice stays up afterwards: gcloud compute tpus tpu-vm delete NAME --project PROJECT --zone ZONE
set -euo pipefail

usage="usage: PROJECT=... ZONE=... $0 NAME ACCELERATOR_TYPE COMMAND..."
: "${PROJECT:?$usage}" "${ZONE:?$usage}"
(($# >= 3)) || { echo "$usage" >&2; exit 2; }
name=$1 type=$2
shift 2

case $type in
  v5litepod-*) version=v2-alpha-tpuv5-lite ;;
  v5p-*) version=v2-alpha-tpuv5 ;;
  v6e-*) version=v2-alpha-tpuv6e ;;
  *) echo "unknown accelerator type $type: v5litepod-N, v5p-N or v6e-N" >&2; exit 2 ;;
esac
where=(--project "$PROJECT" --zone "$ZONE")
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

if ! gcloud compute tpus tpu-vm describe "$name" "${where[@]}" >/dev/null 2>&1; then
  gcloud compute tpus tpu-vm create "$name" "${where[@]}" --accelerator-type "$type" --version "$version"
fi

# What is committed is what runs.
archive=$(mktemp --suffix .tar.gz)
trap 'rm -f "$archive"' EXIT
git -C "$root" archive --format tar.gz -o "$archive" HEAD
gcloud compute tpus tpu-vm scp "$archive" "$name:envace.tar.gz" "${where[@]}" --worker=all

# The command starts on all hosts at once: JAX finds the others by the metadata of the slice.
setup="mkdir -p envace && tar xzf envace.tar.gz -C envace && cd envace"
setup+=" && { test -x .venv/bin/envace || { python3 -m venv .venv && .venv/bin/pip install -q -e '.[tpu]'; }; }"
gcloud compute tpus tpu-vm ssh "$name" "${where[@]}" --worker=all \
  --command "$setup && export ENVACE_DISTRIBUTED=1 PATH=\$PWD/.venv/bin:\$PATH && $(printf '%q ' "$@")"
