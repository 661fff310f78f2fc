#!/usr/bin/env bash
# The commands behind research/word2world/README.md and uses/README.md, in parts:
#
#     bash research/word2world/run.sh alfworld | webshop | textworld | prompted | scaling | uses
#
# On one core: alfworld 25 minutes, webshop 35, prompted 25, uses 90. prompted and scaling need what
# alfworld wrote. A rerun skips what is complete. Results are written to runs/w2w/results, and those of
# uses to runs/uses.
set -euo pipefail
out=runs/w2w/results
word2world() { python -m paw_min.world_models.word2world "$@"; }

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
    word2world consistency webshop --world-model runs/w2w/webshop-wm --agents teacher model \
        --ground --answer-tokens 400 --max-turns 8 --eval-tasks 12 --out $out/webshop-grounded
    word2world verify webshop --world-model runs/w2w/webshop-wm --max-turns 10 --eval-tasks 60 \
        --out $out/webshop
}

textworld() {
    word2world collect textworld --agents teacher random --slips 0.3 --episodes 240 \
        --max-turns 20 --out runs/w2w/textworld
    word2world collect textworld --agents teacher random --split held_out --max-turns 20 \
        --out runs/w2w/textworld-held_out
    word2world train textworld --width 64 --epochs 4 --batch 2 --lr 2e-3 --micro-tokens 4096 \
        --trajectories runs/w2w/textworld/trajectories.json --out runs/w2w/textworld-wm
    word2world fidelity textworld --world-model runs/w2w/textworld-wm \
        --trajectories runs/w2w/textworld-held_out/trajectories.json --out $out/textworld
}

prompted() {
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

scaling() {
    word2world collect alfworld --max-turns 20 --agents teacher --slips 0.3 --episodes 300 \
        --out runs/w2w/scaling/teacher
    word2world collect alfworld --max-turns 20 --agents random --episodes 300 \
        --out runs/w2w/scaling/random
    word2world collect alfworld --max-turns 20 --agents teacher --split held_out --eval-tasks 40 \
        --out runs/w2w/scaling/teacher-seen
    word2world collect alfworld --max-turns 20 --agents teacher --split held_out \
        --eval-split valid_unseen --eval-tasks 40 --out runs/w2w/scaling/teacher-unseen
    word2world collect alfworld --max-turns 20 --agents random --split held_out --eval-tasks 40 \
        --out runs/w2w/scaling/random-seen
    word2world collect alfworld --max-turns 20 --agents model --split held_out --eval-tasks 40 \
        --out runs/w2w/scaling/model-seen
    python -m research.word2world.scaling alfworld --limits 75 150 300 --widths 32 64 \
        --epochs 2 --batch 1 --lr 2e-3 --micro-tokens 4096 \
        --trajectories runs/w2w/scaling/teacher/trajectories.json \
        runs/w2w/scaling/random/trajectories.json \
        --held-out runs/w2w/scaling/teacher-seen/trajectories.json \
        runs/w2w/scaling/teacher-unseen/trajectories.json \
        runs/w2w/scaling/random-seen/trajectories.json \
        runs/w2w/scaling/model-seen/trajectories.json --out runs/w2w/scaling/alfworld
}

# Sections 7.2 and 7.3.
uses() {
    local open=runs/w2w/uses/open/trajectories.json teacher=runs/w2w/uses/teacher/trajectories.json
    local imitate="--epochs 2 --batch 16 --lr 1e-4"
    word2world collect alfworld --preset open --agents model --episodes 600 --max-turns 20 \
        --out runs/w2w/uses/open
    word2world collect alfworld --preset open --agents teacher --slips 0.3 --episodes 400 \
        --max-turns 20 --out runs/w2w/uses/teacher
    word2world train alfworld --preset open --epochs 1 --batch 2 --lr 2e-3 --micro-tokens 4096 \
        --trajectories $teacher $open --out runs/w2w/uses/wm
    word2world collect alfworld --preset open --agents model --world-model runs/w2w/uses/wm \
        --answer-tokens 120 --episodes 300 --max-turns 20 --out runs/w2w/uses/synthetic
    word2world imitate alfworld --preset open --trajectories $open --wins 44 $imitate \
        --out runs/w2w/uses/agent-real-44
    word2world imitate alfworld --preset open --wins 44 $imitate \
        --trajectories runs/w2w/uses/synthetic/trajectories.json \
        --out runs/w2w/uses/agent-synthetic-44
    word2world imitate alfworld --preset open --trajectories $open --wins 60 $imitate \
        --out runs/w2w/uses/agent-real
    word2world train alfworld --preset open --start open --context 2048 --epochs 1 --batch 4 \
        --lr 1e-4 --trajectories $open --out runs/w2w/uses/warm-wm
    word2world imitate alfworld --preset open --model runs/w2w/uses/warm-wm --wins 60 $imitate \
        --trajectories $teacher --out runs/w2w/uses/warm-agent
    word2world imitate alfworld --preset open --trajectories $teacher --wins 60 $imitate \
        --out runs/w2w/uses/cold-agent
    python run_alfworld.py --preset open --eval-only --eval-repeats 3 --out runs/uses --name eval-open
    for agent in agent-real-44 agent-synthetic-44 agent-real warm-agent cold-agent; do
        python run_alfworld.py --preset open --eval-only --eval-repeats 3 \
            --model "runs/w2w/uses/$agent" --out runs/uses --name "eval-$agent"
    done
    for start in cold warm; do
        python run_alfworld.py --preset open --no-paw --updates 16 \
            --model "runs/w2w/uses/$start-agent" --out runs/uses --name "$start-grpo"
    done
}

case ${1:-} in
    alfworld | webshop | textworld | prompted | scaling | uses) "$1" ;;
    *) sed -n 's/^#     //p' "$0" >&2; exit 2 ;;
esac
