"""A world-model loss of one's own: PaW's, on the tokens of o_{t+1} that h_t does not show.

    python -m examples.unseen alfworld

Much of an observation is in the prompt already: names of rooms and objects, the words of the game's
sentences. Here such tokens are context. |o| of Eq. 8 counts what is left; the loss of a row without
any is 0. Whether this helps was not measured: the file shows where a loss goes.

The flags are those of the benchmark's run script; --wm-loss and --rho choose what the tokens get.
"""

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from paw_min.cli import fork
from paw_min.config import Config
from paw_min.model.batches import Batch
from paw_min.rows import Rows
from paw_min.running.session import Session
from paw_min.train import learn_jointly
from paw_min.update import ObservationLoss, observation_loss


def unseen(cfg: Config, s: Session, rows: Rows, k: int) -> dict[str, float]:
    """Learn as PaW does, with another world-model loss -> metrics."""
    return learn_jointly(cfg, s, rows, k, partial(loss_of_unseen, rows))


def loss_of_unseen(rows: Rows, cfg: Config, logp: Tensor, batch: Batch) -> ObservationLoss:
    """The loss of each row of a batch, from log-probs (B, S)."""
    shown = [set(rows.tokens[i].prompt_ids) for i in batch.index]  # B
    # The scored tokens of the observations, one after another: row, column, id.
    of_obs = slice(batch.n_response, None)
    row, column = batch.row[of_obs], batch.column[of_obs]
    ids = batch.ids.flatten()[batch.at[of_obs]]
    new = [token not in shown[b] for b, token in zip(row.tolist(), ids.tolist())]
    mask = torch.zeros_like(batch.obs_mask)  # (B, S)
    mask[row, column] = torch.tensor(new, device=mask.device)
    # A rank that repeats another's row has an empty obs_mask, and keeps it.
    return observation_loss(cfg, logp, replace(batch, obs_mask=mask & batch.obs_mask))


if __name__ == "__main__":
    fork(unseen, {}, __doc__)
