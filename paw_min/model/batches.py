"""Which rows share a forward pass, and where their tokens are in it.

Rows of similar length share a batch of at most --micro-tokens tokens, and each rank gets its part
of the batches. (A row of more tokens than that has a batch of its own.) Every rank gets equally
many batches, because their gradients are summed in collective calls.

One row, with prompt h, response a, separator s, next observation o and padding:

    ids             h h h h a a a s s o o o o . .      (B, L)
    columns                 a a a s s o o o o .        (B, S): the row without its prompt
    response_mask           1 1 1 0 0 0 0 0 0 0
    obs_mask                0 0 0 0 0 1 1 1 1 0

S is 10 here, because another row of the batch has 10 tokens after its prompt. All numbers per token
are in these columns: what the pass gives (log-probabilities, entropies, values), the masks, and
what `training_batches` adds of an update's Rows. The M tokens under either mask are also listed one
after another, those of responses first: Policy.forward scores these and gives the temperature to
the first `n_response`.

Only rows that train the world model have s and o. So PaW makes rows longer, but adds no pass over
them: with alpha = 0.75, a quarter of the rows or more stay as they are. Attention is causal, so no
token attends to the padding behind it, and no attention mask is needed.

Legend: N rows of the update, B rows of a batch, L tokens of its longest row, S columns: the largest
number of tokens after a prompt of the batch, M scored tokens of the batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from paw_min.base import distributed
from paw_min.rows import PerToken, Rows, TokenRow


@dataclass
class Batch:
    """Rows laid out for one forward pass."""

    index: list[int]  # B positions in the list of rows that the batch was made from
    ids: Tensor  # (B, L)
    at: Tensor  # (M,) position of each scored token in ids.flatten(); the one before has its logits
    row: Tensor  # (M,) its row in the (B, S) results
    column: Tensor  # (M,) its column there
    n_response: int  # how many of the M are response tokens
    response_mask: Tensor  # (B, S) bool, 1 on response tokens
    obs_mask: Tensor  # (B, S) bool, 1 on observation tokens
    share: float = 1.0  # its response tokens / those of all rows that were cut into batches

    # Only training_batches fills these; where Rows has None, so has the batch.
    advantage: Tensor | None = None  # (B, S) A of Eq. 1
    old_logp: Tensor | None = None  # (B, S) log pi_old(a_t), 0 outside of responses
    ref_logp: Tensor | None = None  # (B, S) log pi_ref(a_t), 0 outside of responses
    row_weight: Tensor | None = None  # (B,) weight of the world-model loss

    def in_columns(self, values: Tensor | PerToken | None) -> Tensor | None:
        """One number per response, (N,), or per token, N x T_i, in columns of this batch: (B, S).

        values: of all rows; None stays None.
        """
        if values is None:
            return None
        if isinstance(values, Tensor):
            return values[self.index, None].to(self.ids.device).expand(self.response_mask.shape)
        width = self.response_mask.shape[1]
        padded = [values[i] + [0.0] * (width - len(values[i])) for i in self.index]
        return torch.tensor(padded, dtype=torch.float32, device=self.ids.device)


def training_batches(policy, rows: Rows, chosen: list[int], budget: int) -> Iterator[Batch]:
    """micro_batches of an update's rows, with what their losses need besides the tokens."""
    # Append o_{t+1} only where its loss counts. Rows of a group at R_max (lambda_g = 0) cost
    # nothing beyond RL. A fork's weight may be negative.
    with_obs = (rows.row_weight != 0).tolist()
    for batch in micro_batches(policy, rows.tokens, chosen, with_obs, budget):
        batch.advantage = batch.in_columns(rows.advantage)
        batch.old_logp = batch.in_columns(rows.old_logp)
        batch.ref_logp = batch.in_columns(rows.ref_logp)
        batch.row_weight = rows.row_weight[batch.index].to(batch.ids.device)
        yield batch


def micro_batches(
    policy, rows: list[TokenRow], chosen: list[int], with_obs: list[bool], budget: int
) -> Iterator[Batch]:
    """This rank's batches of the rows `chosen`, an equal number of batches on every rank.

    policy: provides pad_id and device. with_obs: whether to append the observation, per row of
    `rows`. budget: tokens per batch with padding; a longer row gets a batch of its own.
    """
    lengths = []
    for i in chosen:
        length = len(rows[i].prompt_ids) + len(rows[i].response_ids)
        if with_obs[i]:
            length += len(rows[i].separator_ids) + len(rows[i].obs_ids)
        lengths.append(length)
    n_tokens = sum(len(rows[i].response_ids) for i in chosen)

    # All ranks compute the same parts and take every n-th: equally many, because a rank with one
    # pass less would leave the others waiting.
    n_ranks = distributed.n_ranks()
    parts = split(lengths, budget, multiple=n_ranks)
    for part in parts[distributed.rank() :: n_ranks]:
        # FSDP needs every rank in every pass. A rank without rows left repeats the first row with
        # empty masks: no loss, no gradient, no count in any metric but tokens_forward.
        index = [chosen[k] for k in part] or chosen[:1]
        part_rows = [rows[i] for i in index]
        part_obs = [with_obs[i] for i in index]
        batch = collate(part_rows, part_obs, policy.pad_id, policy.device)
        batch.index = index
        if not part:
            batch.response_mask.zero_()
            batch.obs_mask.zero_()
        # Rows of a fork (examples/tapo.py) may have no response at all.
        batch.share = int(batch.response_mask.sum()) / max(1, n_tokens)
        yield batch


def split(lengths: list[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Parts with rows x longest <= budget, as indices into `lengths`; each index exactly once.

    As few parts as the budget allows, in a number that is a multiple of `multiple` (the ranks). The
    longest rows come first: if the budget exceeds the memory, the first batch fails.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def fill(limit: int) -> list[list[int]]:
        """Parts of neighbors in this order, each as large as the limit allows."""
        parts = []
        for i in order:
            # The first row of a part is its longest one, to which the others are padded.
            if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= limit:
                parts[-1].append(i)
            else:
                parts.append([i])
        return parts

    count = -(-len(fill(budget)) // multiple) * multiple  # rounded up
    # With the budget as the limit, the last part may be small. The lowest limit that needs no more
    # parts makes them nearly equal. A binary search finds it: a higher limit never needs more.
    lowest, highest = 0, budget
    while lowest < highest:
        middle = (lowest + highest) // 2
        if len(fill(middle)) <= count:
            highest = middle
        else:
            lowest = middle + 1
    parts = fill(lowest)
    return parts + [[] for _ in range(count - len(parts))]  # empty, where there are too few rows


def collate(rows: list[TokenRow], with_obs: list[bool], pad_id: int, device="cpu") -> Batch:
    """Batch of these rows, with the observation of row b where with_obs[b]."""
    sequences = []
    kinds = []  # of the tokens after the prompt: 1 response, 2 observation, 0 neither
    for row, keep in zip(rows, with_obs, strict=True):
        ids = row.prompt_ids + row.response_ids
        kind = [1] * len(row.response_ids)
        if keep:
            ids = ids + row.separator_ids + row.obs_ids
            # The policy did not choose the separator, and the environment did not write it.
            kind += [0] * len(row.separator_ids)
            context = set(row.context_positions)
            kind += [0 if k in context else 2 for k in range(len(row.obs_ids))]
        sequences.append(torch.tensor(ids))
        kinds.append(torch.tensor(kind, dtype=torch.long))
    ids = pad_sequence(sequences, batch_first=True, padding_value=pad_id)  # (B, L)
    kind = pad_sequence(kinds, batch_first=True)  # (B, S)

    # All response tokens come first, since Policy.forward computes entropies for those only.
    scored = torch.cat([(kind == 1).nonzero(), (kind == 2).nonzero()])  # (M, 2)
    row_of, column_of = scored.unbind(1)  # (M,) each
    # Row b starts at b * L in ids.flatten(), and its tail after its prompt.
    n_prompt = torch.tensor([len(row.prompt_ids) for row in rows])  # (B,)
    first = torch.arange(len(rows)) * ids.shape[1] + n_prompt  # (B,)
    return Batch(
        index=list(range(len(rows))),
        ids=ids.to(device),
        at=(first[row_of] + column_of).to(device),  # (M,)
        row=row_of.to(device),
        column=column_of.to(device),
        n_response=int((kind == 1).sum()),
        response_mask=(kind == 1).to(device),
        obs_mask=(kind == 2).to(device),
    )
