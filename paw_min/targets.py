"""What the world model predicts: the next observation (the paper), a control, two extensions.

    shuffled            the observations of other rows: the placebo, --wm-target shuffled. If a gain
                        survives it, the gain did not come from learning what actions do
    multi_step          the next K observations, given the actions in between (the first limit that
                        section 7 of the paper leaves open)
    first_occurrences   which transitions are not equal to an earlier one (the second)

The first two only replace `obs_ids` (and `given`) of the rows that update.learn gets. A run with
the other two: examples/section_7.py.
"""

from dataclasses import replace

from paw_min.base.seeds import generator
from paw_min.rows import TokenRow


def multi_step(rows: list[TokenRow], trajectory: list[int], k: int) -> list[TokenRow]:
    """Append a_{t+1} o_{t+2} ... o_{t+k} to each o_{t+1}, until the trajectory ends.

    rows: in time order within each trajectory. The actions in between are context, not targets.
    An empty observation ends the chain: after a purchase, or an invalid or the last turn of search.
    """
    # From the end to the start, so that the later rows of each trajectory are known.
    following: dict[int, list[TokenRow]] = {}  # trajectory -> its later rows, the nearest first
    longer = []
    for row, label in zip(reversed(rows), reversed(trajectory), strict=True):
        later = following.setdefault(label, [])
        ids = list(row.obs_ids)
        given = []
        for step in later:
            if not step.obs_ids or not ids:
                break
            between = step.response_ids + step.separator_ids
            given += range(len(ids), len(ids) + len(between))
            ids += between + step.obs_ids
        longer.append(replace(row, obs_ids=ids, given=given))
        later.insert(0, row)
        del later[k - 1 :]  # the row before this one reaches no further
    longer.reverse()
    return longer


def shuffled(rows: list[TokenRow], seed: int, update: int) -> list[TokenRow]:
    """Give each row with an observation that of another such row, by a cycle drawn per update.

    A cycle over all rows leaves no row its own. Texts that occur several times may still coincide.
    A lone row with an observation gets none.
    """
    observed = [i for i, row in enumerate(rows) if row.obs_ids]
    result = list(rows)
    for i, source in random_cycle(observed, "shuffled", seed, update).items():
        if source == i:
            result[i] = replace(rows[i], obs_ids=[], given=[])
        else:
            result[i] = replace(rows[i], obs_ids=rows[source].obs_ids, given=rows[source].given)
    return result


def random_cycle(positions: list[int], *key) -> dict[int, int]:
    """Each position -> another one, along one cycle through all; a lone one -> itself."""
    order = list(positions)
    generator(*key).shuffle(order)
    return dict(zip(order, order[1:] + order[:1]))


def first_occurrences(rows: list[TokenRow]) -> list[bool]:
    """Whether (h, a, o') is the first of its kind among the rows."""
    seen = set()
    first = []
    for row in rows:
        key = (tuple(row.prompt_ids), tuple(row.response_ids), tuple(row.obs_ids))
        first.append(key not in seen)
        seen.add(key)
    return first
