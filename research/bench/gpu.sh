#!/usr/bin/env bash
# All that needs a GPU, in one go; in the repository root:
#
#     bash research/bench/gpu.sh OUT [--tiny]
#
# OUT gets one JSON file and one log per part, and table.md. A part takes at most 8 minutes; one
# whose JSON exists is skipped, so rerun the same command after an interruption. Needs torch,
# transformers and this repository, no network; what else is missing is skipped with a line.
# --tiny: a rehearsal at small sizes on a CPU, in about a minute. PYTHON: the interpreter.
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
has trl || echo "TRL is not installed: the update is compared with the plain trainer only"
has vllm || echo "vLLM is not installed: the sampler is that of transformers"

part correctness research/bench/gpu.py correctness $size
if ! has textworld; then
    echo "TextWorld is not installed: no rollout"
elif [ "$size" = --tiny ]; then
    part rollout research/bench/rollout.py --quick
elif has vllm; then
    part rollout research/bench/rollout.py --gpu --sampler vllm
else
    part rollout research/bench/rollout.py --gpu --quick
fi
shapes="alfworld webshop search"
[ "$size" = --tiny ] && shapes=alfworld
for shape in $shapes; do
    [ "$shape" = search ] || part "overhead-$shape" research/bench/overhead.py --shape "$shape" --quick $size
    if [ "$shape" = alfworld ] || has trl; then  # the plain trainer is for ALFWorld only
        part "update-$shape" research/bench/update.py "$shape" $size
    fi
done
part roofline research/bench/gpu.py roofline $size
if has peft; then
    part lora research/bench/gpu.py lora $size
else
    echo "peft is not installed: no LoRA"
fi
"$python" research/bench/gpu.py table --out "$out" | tee "$out/table.md"
exit $failed
