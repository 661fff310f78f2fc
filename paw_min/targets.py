"""The placebo: each row predicts the observation of another one (--wm-target shuffled).

Any second loss changes training, even one that teaches nothing. The placebo trains on the same
observations with the same loss, but each follows another row's action. A gain that the placebo has,
too, does not come from learning what actions do. Called in update.prepare. Not in the paper.
"""

from dataclasses import replace

from paw_min.base.seeds import generator
from paw_min.rows import TokenRow


def cut(row: TokenRow, positions: int) -> TokenRow:
    """The row without target tokens beyond the model's positions, as a rollout cuts them."""
    left = positions - len(row.prompt_ids) - len(row.response_ids) - len(row.separator_ids)
    context = [k for k in row.context_positions if k < left]
    return replace(row, obs_ids=row.obs_ids[:left], context_positions=context)


def shuffled(rows: list[TokenRow], positions: int, seed: int, update: int) -> list[TokenRow]:
    """Give each row with an observation that of another such row, by a cycle drawn per update.

    A cycle over all rows leaves no row its own. Texts that occur several times may still coincide.
    If only one row has an observation, it gets no target. A row whose prompt and response are long
    may have no room for all of it: positions are the model's.
    """
    cycle = [i for i, row in enumerate(rows) if row.obs_ids]
    generator("shuffled", seed, update).shuffle(cycle)
    result = list(rows)
    for i, source in zip(cycle, cycle[1:] + cycle[:1]):
        obs_ids, context = rows[source].obs_ids, rows[source].context_positions
        if source == i:
            obs_ids, context = [], []
        row = replace(rows[i], obs_ids=obs_ids, context_positions=context)
        result[i] = cut(row, positions)
    return result
