"""Two variants that section 7 of the paper leaves open: longer targets, and equal transitions once.

    python -m examples.multi_step alfworld

The target of a row is the next STEPS observations, given the actions in between. Of transitions
with equal prompt, response and observation, the first alone competes in Eq. 4: on the stand-ins,
half of them are equal to an earlier one. STEPS = 1 or ONCE = False leaves one of the two out; then
give the run another --name.

The flags are those of the benchmark's run script. The page of a run (paw_min.page) shows what
PaW would have selected.
"""

from dataclasses import replace

import torch

from paw_min import losses
from paw_min.cli import fork
from paw_min.config import Config
from paw_min.metrics import describe_selection
from paw_min.rows import Rows, TokenRow
from paw_min.running.session import Session
from paw_min.select import select_transitions
from paw_min.targets import cut
from paw_min.train import paw

STEPS = 2
ONCE = True


def multi_step(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """Learn as PaW does, from other rows -> metrics."""
    if ONCE:
        rows = without_repeats(cfg, rows)
    # An empty first observation leaves the target empty: weights and selection stay right.
    longer = with_later_observations(rows.tokens, rows.trajectory, STEPS)
    rows = replace(rows, tokens=[cut(row, s.policy.positions) for row in longer])
    return describe_selection(rows) | paw(cfg, s, rows, k)


def without_repeats(cfg: Config, rows: Rows) -> Rows:
    """Eq. 4 anew, among the first occurrences of each transition, and the weights that follow."""
    first = torch.tensor(first_occurrences(rows.transitions))  # (N,)
    candidates = rows.candidates & first
    selected = select_transitions(candidates, rows.entropy, cfg.alpha)
    weight = losses.row_weights(rows.group, selected, rows.lambdas)
    return replace(rows, candidates=candidates, selected=selected, row_weight=weight)


def with_later_observations(rows: list[TokenRow], trajectory: list[int], k: int) -> list[TokenRow]:
    """Append a_{t+1} o_{t+2} ... o_{t+k} to each o_{t+1}, until the trajectory ends.

    rows: in time order within each trajectory. The actions in between are context, not targets.
    An empty observation ends the chain: after a purchase, or an invalid or the last turn of search.
    """
    # The loop runs from the end, so that the later rows of each trajectory are known.
    following: dict[int, list[TokenRow]] = {}  # trajectory -> its later rows, the nearest first
    longer = []
    for row, label in zip(reversed(rows), reversed(trajectory), strict=True):
        later = following.setdefault(label, [])
        ids = list(row.obs_ids)
        context = []
        for step in later:
            if not step.obs_ids or not ids:
                break
            between = step.response_ids + step.separator_ids
            context += range(len(ids), len(ids) + len(between))
            ids += between + step.obs_ids
        longer.append(replace(row, obs_ids=ids, context_positions=context))
        later.insert(0, row)
        del later[k - 1 :]  # the row before this one reaches no further
    longer.reverse()
    return longer


def first_occurrences(rows: list[TokenRow]) -> list[bool]:
    """Whether (h, a, o') is the first of its kind among the rows."""
    seen = set()
    first = []
    for row in rows:
        key = (tuple(row.prompt_ids), tuple(row.response_ids), tuple(row.obs_ids))
        first.append(key not in seen)
        seen.add(key)
    return first


if __name__ == "__main__":
    fork(multi_step, {}, __doc__)
