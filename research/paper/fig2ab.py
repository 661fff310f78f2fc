"""Fig. 2a and 2b: equal observation and command, different next observation, in real rollouts.

    python -m research.paper.fig2ab SOURCE [--episodes N] [--out FOLDER] [flags]

The paper shows one example each. Here all transitions of a rollout are grouped by a key, and a key
with several next observations is a conflict. Three keys, from what the paper compares to what the
model can tell apart:

    o_t, command            as in the paper: games, shops and questions are not told apart
    o_t, command, task      in one game, for one instruction or question
    h_t, command            the whole prompt, which has the task and earlier steps

Transitions without a next observation are left out: they are not world-model targets.
SOURCE and the flags: see transitions.py.
"""

from collections import defaultdict
from collections.abc import Hashable
from dataclasses import asdict, dataclass
from difflib import SequenceMatcher

from paw_min.base.errors import user_errors
from research.paper import transitions
from research.paper.transitions import TextRow
from research.study import markdown_table

KEYS = ("o_t, command", "o_t, command, task", "h_t, command")
EXAMPLES = 3  # shown conflicts per benchmark
WORDS = 14  # length of a shown passage


@dataclass
class Counts:
    keys: int  # different keys
    repeated: int  # ... with two transitions or more
    conflicts: int  # ... of which have different next observations
    rows: int  # transitions in conflicts


def grouped(rows: list[TextRow], key: str = KEYS[0]) -> dict[Hashable, list[TextRow]]:
    """The transitions with a next observation, by key."""
    groups = defaultdict(list)
    for row in rows:
        if not row.next_observation:
            continue
        state = row.tokens.prompt_ids if key == KEYS[2] else row.observation
        task = row.task if key == KEYS[1] else ""
        groups[tuple(state), row.command, task].append(row)
    return groups


def conflicts(groups: dict[Hashable, list[TextRow]]) -> list[list[TextRow]]:
    """The groups with different next observations, the largest first."""
    found = []
    for rows in groups.values():
        results = {row.next_observation for row in rows}
        if len(results) > 1:
            found.append(rows)
    return sorted(found, key=len, reverse=True)


def count(groups: dict[Hashable, list[TextRow]]) -> Counts:
    found = conflicts(groups)
    repeated = sum(len(rows) > 1 for rows in groups.values())
    return Counts(
        keys=len(groups),
        repeated=repeated,
        conflicts=len(found),
        rows=sum(len(rows) for rows in found),
    )


def mark_difference(a: str, b: str) -> tuple[str, ...]:
    """Both texts with {{ }} around what differs, and equal passages shortened."""
    words = a.split()
    others = b.split()
    one = []
    two = []
    matcher = SequenceMatcher(None, words, others, autojunk=False)
    for tag, first, last, other_first, other_last in matcher.get_opcodes():
        one.append(passage(words[first:last], tag))
        two.append(passage(others[other_first:other_last], tag))
    return tuple(transitions.shorten(" ".join(part), 5 * WORDS) for part in (one, two))


def passage(words: list[str], tag: str) -> str:
    text = transitions.shorten(" ".join(words), WORDS)
    return text if tag == "equal" else "{{" + text + "}}"


def example(rows: list[TextRow]) -> str:
    """One conflict as Markdown: o_t, the command, and two of its next observations."""
    first = rows[0]
    other = next(row for row in rows if row.next_observation != first.next_observation)
    tasks = len({row.task for row in rows})
    results = len({row.next_observation for row in rows})
    one, two = mark_difference(first.next_observation, other.next_observation)
    return (
        f"{len(rows)} times, in {tasks} task(s), with {results} different next observations:\n\n"
        f"```\no_t      {transitions.shorten(first.observation, 3 * WORDS)}\n"
        f"command  {first.command}\no_t+1    {one}\nor       {two}\n```"
    )


def main(argv: list[str] | None = None) -> None:
    played = transitions.play(transitions.arguments(__doc__, argv))
    groups = {key: grouped(played.rows, key) for key in KEYS}
    counts = {key: asdict(count(groups[key])) for key in KEYS}
    header = ["equal", "different keys", "twice or more", "of these, in conflict", "transitions"]
    lines = [[key, *counts[key].values()] for key in KEYS]
    print(f"## Fig. 2a, 2b\n\n{played.summary}\n\n{markdown_table(header, lines)}\n")
    # Different tasks may be of different games or shops, so conflicts within a task come first.
    found = conflicts(groups[KEYS[1]]) or conflicts(groups[KEYS[0]])
    for rows in found[:EXAMPLES]:
        print(example(rows) + "\n")
    played.save("fig2ab", counts)


if __name__ == "__main__":
    with user_errors():
        main()
