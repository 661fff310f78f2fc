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
