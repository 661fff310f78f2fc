#!/usr/bin/env bash
# Train PaW in ALFWorld's engine, on a CPU, in an environment of its own (.venv).
#
#     bash run.sh                                    examples/hidden.py: PaW
#     bash run.sh --no-paw                           flags of this run: here GRPO alone
#     bash run.sh run_alfworld.py --updates 8        another program, in the same environment
#     bash run.sh python -m paw_min.page RUN         or any command
#
# The same command resumes a run.
set -euo pipefail
cd "$(dirname "$0")"

# ---- the environment: made once, and again after requirements.txt has changed ----

python3 -m paw_min >/dev/null # Python, its venv, and a compiler for ALFWorld's planner
# Many container images set this variable. With it, every process would compile torch again.
unset PYTHONDONTWRITEBYTECODE
if ! cmp -s requirements.txt .venv/requirements.txt; then
    echo "installing the packages of requirements.txt in .venv, a few minutes"
    python3 -m venv .venv
    . .venv/bin/activate # ALFWorld's planner is compiled by a program called python
    pip install -q --no-compile -r requirements.txt # Python compiles what it imports
    cp requirements.txt .venv/requirements.txt # the last step: an installation that was cut is repeated
fi
. .venv/bin/activate

# ---- a program or command of the user ----

case "${1:-}" in
    "" | -*) ;;
    *.py) exec python "$@" ;;
    *) exec "$@" ;;
esac

# ---- examples/hidden.py ----

output=$(mktemp)
trap 'rm -f "$output"' EXIT
# tee -i: after Ctrl-C, the run still says how to resume.
python -u -m examples.hidden "$@" | tee -i "$output"
run=$(sed -n 's/^the run: //p' "$output")
[ -n "$run" ] || exit 0 # --help, --dry-run, --eval-only
python -m paw_min.page "$run" >/dev/null
echo "to open: $run/page.html (what was learned, token by token) and $run/curves.png"
echo "to try next: bash run.sh --no-paw (GRPO alone), bash run.sh run_alfworld.py, and LEARN.md"
