"""The placebo: which observation a row predicts, if not its own (--wm-target shuffled).

A second loss changes training whatever it teaches. The placebo trains on the same observations with
the same loss, but each stands behind another row's action. A gain that survives it does not come
from learning what actions do. Not in the paper.
"""

from dataclasses import replace

from paw_min.base.seeds import generator
from paw_min.rows import TokenRow


def shuffled(rows: list[TokenRow], seed: int, update: int) -> list[TokenRow]:
    """Give each row with an observation that of another such row, by a cycle drawn per update.

    A cycle over all rows leaves no row its own. Texts that occur several times may still coincide.
    If only one row has an observation, it gets no target.
    """
    cycle = [i for i, row in enumerate(rows) if row.obs_ids]
    generator("shuffled", seed, update).shuffle(cycle)
    result = list(rows)
    for i, source in zip(cycle, cycle[1:] + cycle[:1]):
        if source == i:
            result[i] = replace(rows[i], obs_ids=[], given=[])
        else:
            result[i] = replace(rows[i], obs_ids=rows[source].obs_ids, given=rows[source].given)
    return result
