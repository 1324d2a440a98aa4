#!/usr/bin/env bash
# Run a command of this repository as a workload on a GKE cluster made with xpk (github.com/AI-Hypercomputer/xpk).
#
#     xpk cluster create --cluster NAME --tpu-type v5p-8 --num-slices 1 --project PROJECT --zone ZONE     once
#     PROJECT=... ZONE=... CLUSTER=NAME launch/xpk.sh WORKLOAD v5p-8 envace train configs/tpu_1.7b.yaml model=/mnt/data/Qwen3-1.7B
#
# Model, tasks and output_dir must lie where every host sees them, such as a bucket mounted with `xpk storage attach`.
set -euo pipefail

usage="usage: PROJECT=... ZONE=... CLUSTER=... $0 WORKLOAD TPU_TYPE COMMAND..."
: "${PROJECT:?$usage}" "${ZONE:?$usage}" "${CLUSTER:?$usage}"
(($# >= 3)) || { echo "$usage" >&2; exit 2; }
workload=$1 type=$2
shift 2
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

# xpk puts the directory into a layer on top of the image, and starts the command on every host of the slice.
xpk workload create \
  --project "$PROJECT" --zone "$ZONE" --cluster "$CLUSTER" \
  --workload "$workload" --tpu-type "$type" --num-slices 1 \
  --base-docker-image "${IMAGE:-python:3.12}" --script-dir "$root" \
  --command "pip install -q -e '.[tpu]' && $(printf '%q ' "$@")"
