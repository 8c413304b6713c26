#!/usr/bin/env bash
# One GPU, at most 8 minutes, no network, no one watching: measures the update and prints one JSON object.
#   scripts/gpu_check.sh > gpu.json         (needs torch, transformers, peft and lightning)
#   scripts/gpu_check.sh --dry              the same path at toy sizes, on a CPU
# bf16 update at 4k, 16k and 32k tokens (tokens/s, MFU, peak memory), packed against padded rows, a world of one over
# the collective path, and an adapter's way to the disk and back.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python="${PYTHON:-.venv/bin/python}"
[ -x "$python" ] || python=python3
export HF_HUB_OFFLINE=1 PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
export PYTORCH_CUDA_ALLOC_CONF="${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True}"
exec timeout --signal=INT 480 "$python" scripts/gpu_check.py "$@"
