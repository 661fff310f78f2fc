"""Which rows share a forward pass, and where are their tokens in it?

Rows of similar length share a batch of at most --micro-tokens tokens, and each rank gets its part
of the batches. (A row of more tokens than that has a batch of its own.) Every rank gets equally
many batches, because their gradients are summed in collective calls.

One row, with prompt h, response a, separator s, next observation o and padding:

    ids             h h h h a a a s s o o o o . .      (B, L)
    columns                 a a a s s o o o o .        (B, S): the row without its prompt
    response_mask           1 1 1 0 0 0 0 0 0 0
    obs_mask                0 0 0 0 0 1 1 1 1 0

S is 10 here, because another row of the batch has 10 tokens after its prompt. The M tokens under
either mask are also listed one after another, those of responses first: Policy.forward scores these
and gives temperature and entropies to the first `n_response`; the masks serve the losses.

Only rows that train the world model have s and o. So PaW makes rows longer, but adds no pass over
them: with alpha = 0.75, a quarter of the rows or more stay as they are. Attention is causal, so no
token attends to the padding behind it, and no attention mask is needed.

Legend: N rows of the update, B rows of a batch, L tokens of its longest row, T tokens of the
longest response, S columns: the largest number of tokens after a prompt of the batch, M scored
tokens of the batch.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paw_min.base import distributed
from paw_min.rows import TokenRow


@dataclass
class Batch:
    """Rows laid out for one forward pass.

    Results of the forward pass (log-probabilities, entropies, values) are (B, S): column k is the
    k-th token after the prompt. What is stored for a whole update (old and reference
    log-probabilities) is (N, T), responses only: the same columns, without those of o.
    `to_columns` turns the second layout into the first.
    """

    index: list[int]  # B positions in the list of rows that the batch was made from
    ids: Tensor  # (B, L)
    at: Tensor  # (M,) position of each scored token in ids.flatten(); the one before has its logits
    row: Tensor  # (M,) its row in the (B, S) results
    column: Tensor  # (M,) its column there
    n_response: int  # how many of the M are response tokens
    response_mask: Tensor  # (B, S) bool, 1 on response tokens
    obs_mask: Tensor  # (B, S) bool, 1 on observation tokens


def to_columns(stored: Tensor, like: Tensor) -> Tensor:
    """Stored values per response token (B, T), cut or padded with 0 to the (B, S) of `like`."""
    width = like.shape[1]
    missing = max(0, width - stored.shape[1])
    return torch.nn.functional.pad(stored[:, :width], (0, missing)).to(like)


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

    # All ranks compute the same parts and take every n-th. The number of parts is a multiple of the
    # ranks: a rank with one pass less would leave the others waiting.
    n_ranks = distributed.n_ranks()
    parts = split(lengths, budget, multiple=n_ranks)
    while len(parts) % n_ranks:  # fewer rows than ranks
        parts.append([])
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
        yield batch


def split(lengths: list[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Parts with rows x longest <= budget, as indices into `lengths`; each index exactly once.

    1. Fill parts with rows in the order of their lengths: the fewest parts within the budget.
    2. Round their number up to a multiple of `multiple` (the ranks), if there are as many rows.
    3. Find the lowest limit of tokens with this number of parts: they become nearly equal.
    4. If that gives fewer parts, halve the largest until the number is reached.

    The longest rows come first: if the budget exceeds the memory, the first batch fails.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def fill(limit: int) -> list[list[int]]:
        parts = []
        for i in order:
            # The first row of a part is its longest one, to which the others are padded.
            if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= limit:
                parts[-1].append(i)
            else:
                parts.append([i])
        return parts

    fewest = len(fill(budget))
    count = -(-fewest // multiple) * multiple  # rounded up
    count = min(count, len(lengths))
    # The number of parts never rises with the limit: a binary search finds the lowest one.
    limit = bisect_left(range(budget), True, key=lambda tokens: len(fill(tokens)) <= count)
    parts = fill(limit)
    while len(parts) < count:
        divisible = [k for k in range(len(parts)) if len(parts[k]) > 1]
        largest = max(divisible, key=lambda k: len(parts[k]) * lengths[parts[k][0]])
        part = parts[largest]
        half = (len(part) + 1) // 2
        parts[largest : largest + 1] = [part[:half], part[half:]]
    return parts


def collate(rows: list[TokenRow], with_obs: list[bool], pad_id: int, device="cpu") -> Batch:
    """Batch of these rows, with the observation of row b where with_obs[b]."""
    # A row's tail: the response and, where kept, the observation after its separator.
    tails = []
    for row, keep in zip(rows, with_obs, strict=True):
        tails.append(row.response_ids + (row.separator_ids + row.obs_ids if keep else []))
    sequences = [row.prompt_ids + tail for row, tail in zip(rows, tails)]
    width = max(len(sequence) for sequence in sequences)  # L
    padded = [sequence + [pad_id] * (width - len(sequence)) for sequence in sequences]
    ids = torch.tensor(padded)  # (B, L)

    n_response = torch.tensor([len(row.response_ids) for row in rows])[:, None]  # (B, 1)
    # The separator is in neither mask: the policy did not choose it, and it says nothing of the
    # world.
    n_separator = torch.tensor([len(row.separator_ids) for row in rows])[:, None]  # (B, 1)
    n_tail = torch.tensor([len(tail) for tail in tails])[:, None]  # (B, 1)
    columns = torch.arange(int(n_tail.max()))  # (S,)
    response_mask = columns < n_response  # (B, S)
    obs_mask = (columns < n_tail) & (columns >= n_response + n_separator)  # (B, S)
    for b, row in enumerate(rows):
        if with_obs[b] and row.given:
            first_obs = len(row.response_ids) + len(row.separator_ids)
            obs_mask[b, [first_obs + k for k in row.given]] = False

    # All response tokens come first, since Policy.forward computes entropies for those only.
    scored = torch.cat([response_mask.nonzero(), obs_mask.nonzero()])  # (M, 2)
    row_of = scored[:, 0]  # (M,)
    column_of = scored[:, 1]  # (M,)
    # Row b starts at b * L in ids.flatten(), and its tail after its prompt.
    n_prompt = torch.tensor([len(row.prompt_ids) for row in rows])  # (B,)
    first = torch.arange(len(rows)) * width + n_prompt  # (B,)
    at = first[row_of] + column_of  # (M,)
    return Batch(
        index=list(range(len(rows))),
        ids=ids.to(device),
        at=at.to(device),
        row=row_of.to(device),
        column=column_of.to(device),
        n_response=int(response_mask.sum()),
        response_mask=response_mask.to(device),
        obs_mask=obs_mask.to(device),
    )
