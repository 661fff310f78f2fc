"""What a run prints: progress bars, the table of updates, the final report. Rank 0 only."""

from tqdm import tqdm

from paw_min.base import distributed


def say(text: str) -> None:
    if distributed.rank() == 0:
        print(text, flush=True)


def progress_bar(total: int, label: str, unit: str) -> tqdm:
    hidden = True if distributed.rank() > 0 else None  # None: hidden off a terminal
    return tqdm(total=total, desc=label, unit=unit, leave=False, disable=hidden)


COLUMNS = {  # the table of updates: metric -> title, width, format
    "update": ("update", 7, "d"), "success": ("success", 7, ".3f"), "return": ("return", 6, ".2f"),
    "length": ("length", 6, ".1f"), "valid": ("valid", 5, ".3f"), "lambda": ("lambda", 6, ".3f"),
    "wm_loss": ("wm loss", 7, ".4f"), "entropy": ("entropy", 7, ".4f"),
    "grad_norm": ("grad", 5, ".2f"), "clip_fraction": ("pg clip", 7, ".4f"),
    "approx_kl": ("kl old", 6, ".4f"),
    "seconds": ("s", 3, ".0f"), "eval_success": ("held out", 8, ".3f"),
}
HEADER = "  ".join(f"{title:>{width}}" for title, width, _ in COLUMNS.values())


# The wall time between two lines of metrics.jsonl, in parts that do not overlap. Older runs have
# the first three only.
PARTS = ("seconds_rollout", "seconds_old_pass", "seconds_update", "seconds_evaluate",
         "seconds_save", "seconds_other")


def wall_time(metrics: dict[str, float]) -> float:
    """Seconds between this line of metrics.jsonl and the one before."""
    return sum(metrics.get(part, 0.0) for part in PARTS)


def table_line(metrics: dict[str, float]) -> str:
    """One line per update, aligned with HEADER; blank where a metric does not exist."""
    shown = dict(metrics)
    if seconds := wall_time(metrics):
        shown["seconds"] = seconds
    cells = []
    for name, (_, width, form) in COLUMNS.items():
        cells.append(f"{shown[name]:{width}{form}}" if name in shown else " " * width)
    return "  ".join(cells)


def cut_line(metrics: dict[str, float]) -> str:
    """What was cut by a limit of tokens; "" if nothing was."""
    parts = []
    for name, of in (("responses_cut", "responses"), ("eval_responses_cut", "held-out responses")):
        if metrics.get(name):
            parts.append(f"{metrics[name]:.1%} of the {of} at --max-response-tokens")
    if metrics.get("obs_tokens_cut"):
        parts.append(f"{metrics['obs_tokens_cut']} tokens of observations at --max-obs-tokens")
    return f"         cut: {', '.join(parts)}" if parts else ""


def report(folder, lines: list[dict[str, float]]) -> None:
    """Where the run is, and its held-out success and score, before and after."""
    say(f"the run: {folder}")  # run.sh reads it
    evaluated = [line for line in lines if "eval_success" in line]
    # A run that was not evaluated before training has nothing to compare with.
    if evaluated and not evaluated[0]["update"]:
        first = evaluated[0]
        last = evaluated[-1]
        end = f"after {last['update']} update{'s' * (last['update'] != 1)}"
        for name, form in (("success", ".3f"), ("score", ".1f")):
            key = f"eval_{name}"
            if key in first:
                say(f"held-out {name}: {first[key]:{form}} before, {last[key]:{form}} {end}")
