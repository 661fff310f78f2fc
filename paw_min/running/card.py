"""The model card of an exported policy: README.md in its folder, as the Hugging Face hub shows it.

It has the base model, the benchmark and its data, a command that repeats the run, and its last
metrics. It names no license, which depends on the base model. Of an absolute path it shows the last
part only, and of a URL no password, since a card is public.
"""

import re
import shlex
from dataclasses import asdict
from pathlib import Path

from huggingface_hub import ModelCardData

from paw_min.base.errors import masked
from paw_min.base.hub import is_hub_name
from paw_min.config import PUBLISHED, Config, fit_to_algo, flag, settings
from paw_min.running.presets import SCRIPTS, presets_of
from paw_min.running.runs import read_metrics, updates_done
from paw_min.running.untrusted import read_config

KEY_SETTINGS = (
    "algo", "paw", "wm_loss", "rho", "alpha", "lambda_g", "wm_scale", "groups",
    "group_size", "lr", "kl_coef", "lora_rank", "temperature", "prompt", "history_length", "seed",
)
CARD = """\
---
{head}
---

# {name}

A policy for `{env}`, trained with paw_min, an implementation of PaW (*Policy and World Modeling
Co-Training for Language Agents*, [arXiv 2606.02388](https://arxiv.org/abs/2606.02388)).

- Base model: {base}. Its license applies: add `license` to the head of this file.
- Data: {data}. Held-out split: `{split}`.
- Updates: {updates}.

{command}| setting | value |
|---|---|
{settings}

The last metrics, from `metrics.jsonl` in this folder:

| metric | update | value |
|---|---|---|
{metrics}
"""


def model_card(checkpoint: Path) -> str:
    """The card of the policy in a checkpoint of a run folder."""
    stored = asdict(read_config(checkpoint.parent / "config.json"))
    texts = {name: shown(value) for name, value in stored.items() if isinstance(value, str)}
    cfg = Config(**stored | texts | {"out": Config.out})
    updates = updates_done(checkpoint)
    last = {}  # of each metric, its latest update and value
    for line in read_metrics(checkpoint.parent):
        if line["update"] <= updates:
            last |= {key: (key, line["update"], f"{value:.4g}") for key, value in line.items()}
    results = [name for name in last if re.fullmatch(r"eval_\w+", name)]
    is_ours = cfg.learn == Config.learn  # else a fork's (cli.fork), with a command of its own
    hub_name = cfg.model if "/" in cfg.model and is_hub_name(cfg.model) else None
    head = ModelCardData(
        base_model=hub_name, library_name="transformers", pipeline_tag="text-generation",
        tags=["paw", "reinforcement-learning", cfg.env],
    )
    return CARD.format(
        head=head, name=cfg.name, env=cfg.env, split=cfg.eval_split,
        updates=updates if is_ours else f"{updates}, by `{cfg.learn}`",
        base=f"`{cfg.model}`" if cfg.model else "the small one in paw_min",
        data=f"`{cfg.data}`" if cfg.data else "generated",
        command=f"    {command(cfg)}\n\n" if cfg.env in SCRIPTS and is_ours else "",
        settings=rows((f"`{flag(name)}`", getattr(cfg, name)) for name in KEY_SETTINGS),
        metrics=rows(last[name] for name in ("success", "return", *results) if name in last),
    )


def shown(value: str) -> str:
    """A setting as the public may read it."""
    return Path(value).name if Path(value).is_absolute() else masked(value)


def command(cfg: Config) -> str:
    """The command of a run script with these settings: the preset that needs the fewest flags."""
    choices = []
    for preset, values in presets_of(cfg.env).items():
        if preset in PUBLISHED and not cfg.data:
            continue  # parse_args refuses them
        usual = asdict(Config()) | fit_to_algo(values, preset, cfg.algo)
        words = [f"--preset={preset}"]
        for name in (f.name for f in settings(cfg.env)):
            value = getattr(cfg, name)
            if value == usual[name]:
                continue
            if isinstance(value, bool):
                words.append(flag(name) if value else flag(f"no_{name}"))
            else:
                words.append(f"{flag(name)}={value}")
        if not any(word.endswith("=") for word in words):  # parse_args refuses an empty value
            choices.append(words)
    return shlex.join(["python", f"run_{cfg.env}.py", *min(choices, key=len)])


def rows(of_table) -> str:
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in of_table)
