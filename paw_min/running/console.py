"""What a run prints: progress bars, the table of updates, the final report. Rank 0 only."""

from tqdm import tqdm

from paw_min.running import distributed


def say(text: str) -> None:
    if distributed.rank() == 0:
        print(text, flush=True)


def progress_bar(total: int, label: str, unit: str) -> tqdm:
    hidden = True if distributed.rank() > 0 else None  # None: hidden if the output is no terminal
    return tqdm(total=total, desc=label, unit=unit, leave=False, disable=hidden)


COLUMNS = {  # of the table of updates: metric -> title, width, format
    "update": ("update", 7, "d"), "success": ("success", 7, ".3f"), "return": ("return", 6, ".2f"),
    "length": ("length", 6, ".1f"), "valid": ("valid", 5, ".3f"), "lambda": ("lambda", 6, ".3f"),
    "wm_loss": ("wm loss", 7, ".4f"), "entropy": ("entropy", 7, ".4f"),
    "clip_fraction": ("clipped", 7, ".4f"), "approx_kl": ("kl old", 6, ".4f"),
    "seconds": ("s", 3, ".0f"), "eval_success": ("held out", 8, ".3f"),
}  # fmt: skip
HEADER = "  ".join(f"{title:>{width}}" for title, width, _ in COLUMNS.values())


def table_line(m: dict[str, float]) -> str:
    """One line per update, aligned with HEADER; blank where a metric does not exist."""
    if "seconds_rollout" in m:
        m = m | {"seconds": m["seconds_rollout"] + m["seconds_old_pass"] + m["seconds_update"]}
    cells = (f"{m[k]:{w}{form}}" if k in m else " " * w for k, (_, w, form) in COLUMNS.items())
    return "  ".join(cells)


def print_start(s) -> None:
    """What a session trains, and the lines so far of a resumed run."""
    ranks = f", {distributed.n_ranks()} ranks" if distributed.n_ranks() > 1 else ""
    say(
        f"run {s.run.folder}: {s.policy.model.num_parameters():,} parameters on "
        f"{s.policy.device}{ranks}, {len(s.tasks.train)} training tasks, "
        f"panel of {len(s.tasks.held_out)}\n{HEADER}"
    )
    for line in s.run.metrics():
        say(table_line(line))


def report(folder, lines: list[dict[str, float]]) -> None:
    """Held-out success (pooled, then averaged over task types) and score, before and after."""
    evaluated, shown = [line for line in lines if "eval_success" in line], []
    for key, form in (("success", ".3f"), ("success_types", ".3f"), ("score", ".1f")):
        if evaluated and not evaluated[0]["update"] and f"eval_{key}" in evaluated[0]:
            ends = [f"{m[f'eval_{key}']:{form}}" for m in (evaluated[0], evaluated[-1])]
            name = key.replace("_types", " averaged over task types")
            if ends not in shown:  # the average is that of all tasks where types are equally many
                after = f"{ends[1]} after {evaluated[-1]['update']} updates"
                say(f"held-out {name}: {ends[0]} before, {after} ({folder})")
            shown.append(ends)
    if "-paw-" in folder.name:  # the name that a run has by default
        other = folder.with_name(folder.name.replace("-paw-", "-"))
        say(
            "two runs, one picture: the same command with --no-paw, then\n"
            f"python -m paw_min.running.plot {other} {folder} --out compared"
        )
