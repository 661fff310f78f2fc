"""The prompting rows of Table 1: plain, ReAct and Reflexion agents, without training.

    python -m research.paper.prompting alfworld --agent react --preset paper --data DIR \\
        --model Qwen/Qwen2.5-1.5B-Instruct
    python -m research.paper.prompting webshop --agent reflexion --data DIR \\
        --endpoint https://api.openai.com/v1 --model gpt-4o          key: $OPENAI_API_KEY

The first argument is the benchmark. All flags of its run script are accepted as well (python
run_alfworld.py --help), with its presets tiny and paper. Panel, environments, parsers and metrics
are those of its --eval-only. agents.py describes the agents, endpoint.py the endpoint. Results, in
runs/<name>/: metrics.json, evaluation.json, episodes.md and, of an endpoint, responses.jsonl.
"""

import json
import sys
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from paw_min.base.console import say
from paw_min.base.distributed import refuse_ranks
from paw_min.base.errors import Parser, UserError, user_errors
from paw_min.config import Config, parse_args
from paw_min.envs.benchmarks import BENCHMARKS, presets_of
from paw_min.rows import Episode
from paw_min.running.evaluate import evaluate, outcomes, panel_metrics, transcript
from paw_min.running.runs import Run
from paw_min.running.session import PANEL_SLOTS, Session, find_tasks, open_session
from research.paper.prompting.agents import TRIALS, React, count, prompted, reflexion
from research.paper.prompting.demonstrations import EXAMPLES
from research.paper.prompting.endpoint import Endpoint

# A trajectory is longer than a plain prompt. The stand-ins have 2,048 positions, Qwen2.5 32,768.
TRAJECTORY_TOKENS = {"tiny": 1900, "paper": 16384}
CHARACTERS = 4  # per token, for endpoints
UNLIMITED = 10**9


def parse(argv: list[str]) -> tuple[Config, Namespace, bool]:
    """-> settings, the flags that the run scripts do not have, whether this is a dry run."""
    usage = "%(prog)s BENCHMARK [flags of run_BENCHMARK.py] [flags below]"
    parser = Parser(usage=usage, description=__doc__)
    add = parser.add_argument
    add("env", choices=EXAMPLES, metavar="BENCHMARK", help=", ".join(EXAMPLES))
    add("--agent", choices=("plain", "react", "reflexion"), default="plain", help="default: plain")
    add(
        "--endpoint",
        default="",
        help="URL before /chat/completions; --model is then the model's name there, and the preset "
        "is paper; the key is read from $OPENAI_API_KEY; needs `pip install openai`",
    )
    add("--name", default="", help="run name; default: from the settings")
    options, rest = parser.parse_known_args(argv)
    refuse_ranks("prompting")
    presets = find_presets(options)
    rest.append("--no-paw")
    if options.name:
        rest += ["--name", options.name]
    cfg, mode = parse_args(options.env, presets, "", rest)
    cfg = replace(cfg, groups=1)  # nothing is trained, so there may be few training tasks
    if not options.name:
        # The last one: --model may be a checkpoint of a run with such a name.
        before, _, after = cfg.name.rpartition(f"-{cfg.algo}")
        cfg = replace(cfg, name=f"{before}-{options.agent}{after}")
    if options.endpoint and not cfg.model:
        raise UserError("--endpoint needs --model, the name of a model there: add it.")
    if options.agent == "reflexion" and cfg.eval_repeats > 1:
        raise UserError(f"--eval-repeats {cfg.eval_repeats}: Reflexion's trials are repeats of a "
                        "task already; omit it.")
    return cfg, options, mode == "dry-run"


def find_presets(options: Namespace) -> dict[str, dict]:
    """Those of the run script; the first is the default."""
    known = presets_of(options.env)
    presets = {size: known[size] for size in ("tiny", "paper")}
    if options.agent != "plain":
        for size, limit in TRAJECTORY_TOKENS.items():
            presets[size] = presets[size] | {"max_prompt_tokens": limit}
    return dict(reversed(presets.items())) if options.endpoint else presets


@contextmanager
def open_endpoint(cfg: Config, options: Namespace) -> Iterator[Session]:
    """As session.open_session, with the endpoint as policy and sampler."""
    run = Run(cfg)
    file = run.folder / "responses.jsonl"
    endpoint = Endpoint(options.endpoint, cfg.model, file)
    tasks = find_tasks(cfg)
    slots = min(len(tasks.held_out), PANEL_SLOTS)
    with closing(endpoint), closing(tasks.make_pool(slots)) as pool:
        yield Session(run, endpoint, None, None, endpoint, pool, tasks, done=0)


def play(cfg: Config, s: Session, options: Namespace) -> tuple[list[Episode], dict, Counter]:
    """Play the panel -> episodes, their metrics, calls and tokens (of an endpoint: characters)."""
    tokens = Counter()
    benchmark = BENCHMARKS[cfg.env]
    limit = cfg.max_prompt_tokens
    if options.endpoint:  # the server has a limit of its own
        limit = CHARACTERS * limit
        cfg = replace(cfg, max_prompt_tokens=UNLIMITED)
    if options.agent != "plain":

        def length(text: str) -> int:
            return len(s.policy.encode_chat(text))

        react = React(benchmark.prompts[cfg.prompt], EXAMPLES[cfg.env], length, limit)
        benchmark = prompted(cfg, react)
    if options.agent == "reflexion":
        episodes, success = reflexion(cfg, s, react, tokens)
        return episodes, panel_metrics(episodes) | success, tokens
    tasks = s.tasks.held_out
    evaluation = evaluate(cfg, s.policy, s.sampler, s.pool, tasks, benchmark=benchmark)
    return evaluation.episodes, evaluation.metrics, count(evaluation.episodes)


def costs(endpoint: Endpoint) -> Counter:
    """Calls and tokens as an endpoint reports them, answers of earlier starts included."""
    answers = endpoint.used.values()
    return Counter(
        calls=len(answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        completion_tokens=sum(answer.completion_tokens for answer in answers),
    )


def run(cfg: Config, options: Namespace) -> None:
    """Play, write the files of the run, and print its metrics."""
    start = time.perf_counter()
    if options.endpoint:
        opened = open_endpoint(cfg, options)
    else:
        opened = open_session(cfg, eval_only=True)
    with opened as s:
        episodes, metrics, tokens = play(cfg, s, options)
        if options.endpoint:
            tokens = costs(s.sampler)
        metrics |= dict(tokens) | {"seconds": time.perf_counter() - start}
        s.run.write("episodes.md", transcript(episodes))
        s.run.write("evaluation.json", outcomes(0, episodes))
        about = {"env": cfg.env, "agent": options.agent, "model": cfg.model or "stand-in"}
        s.run.write("metrics.json", json.dumps(about | metrics, indent=2) + "\n")
        for key, value in metrics.items():
            digits = 3 if isinstance(value, float) else 0
            say(f"{key:48s} {value:12,.{digits}f}")
        say(f"{' '.join(about.values())}: {s.run.folder}")


def plan(cfg: Config, options: Namespace) -> None:
    """What a run may cost, before it starts."""
    n = len(find_tasks(cfg).held_out) * cfg.eval_repeats
    trials = TRIALS if options.agent == "reflexion" else 1
    calls = n * (cfg.max_turns * trials + trials - 1)
    say(f"panel of {n}, at most {cfg.max_turns} turns and {trials} trials: up to {calls:,} calls")


def main(argv: list[str]) -> None:
    with user_errors():
        cfg, options, dry_run = parse(argv)
        if dry_run:
            plan(cfg, options)
        else:
            run(cfg, options)


if __name__ == "__main__":
    main(sys.argv[1:])
