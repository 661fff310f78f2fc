"""Micro-batching: which rows share a forward pass, and how their tokens are laid out in it.

Rows of similar length share a batch of bounded size, and each rank gets its part of the batches.
`collate` lays out a batch in one of two ways:

    padded   one row of the tensor each, right-padded; causal attention never attends to padding
    packed   all rows end to end in one row of the tensor, positions restarting at 0, without
             padding; for attention that separates rows by their positions (flash_attention_2;
             others build a dense mask: correct, but slow)

The observation is appended only to rows that train the world model, so it adds only its own tokens.

Legend: B rows, L tokens of the longest row, S scored tokens of the longest row, M scored tokens.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from paw_min.running import distributed


@dataclass
class TokenRow:
    """The tokens of one transition: what a forward pass takes."""

    prompt_ids: list[int]  # h_t
    response_ids: list[int]  # a_t, exactly as sampled
    obs_ids: list[int]  # o_{t+1}; may be empty
    # Positions in obs_ids that are context, not targets: the actions between several observations.
    given: list[int] = field(default_factory=list, kw_only=True)


@dataclass
class Batch:
    """Rows laid out for one forward pass. Row b scores its response tokens, then its observation's.

    The M scored tokens are numbered with the response tokens of all rows first.
    """

    index: list[int]  # B positions in the list of rows that the batch was made from
    ids: Tensor  # (B, L) padded, or (1, total tokens) packed
    positions: Tensor | None  # (1, total tokens) if packed; None: 0, 1, 2 ...
    at: Tensor  # (M,) position of each scored token in ids.flatten()
    before: Tensor  # (M,) position of the token that predicts it
    row: Tensor  # (M,) its row in the (B, S) results
    column: Tensor  # (M,) its column there
    n_response: int  # how many of the M are response tokens
    response_mask: Tensor  # (B, S) bool, 1 on response tokens
    obs_mask: Tensor  # (B, S) bool, 1 on observation tokens


def micro_batches(
    policy, rows: list[TokenRow], chosen: list[int], with_obs: list[bool], budget: int
) -> Iterator[Batch]:
    """This rank's batches of the rows `chosen`, an equal number of batches on every rank.

    policy: provides pad_id, device and packed. with_obs: whether to append the observation, per row
    of `rows`. budget: tokens per batch with padding; a longer row gets a batch of its own.
    """
    tails = [len(rows[i].response_ids) + len(rows[i].obs_ids) * with_obs[i] for i in chosen]
    lengths = [len(rows[i].prompt_ids) + tail for i, tail in zip(chosen, tails)]
    parts = split(lengths, budget, multiple=distributed.world())
    parts += [[]] * (-len(parts) % distributed.world())  # fewer rows than ranks
    for part in parts[distributed.rank() :: distributed.world()]:
        index = [chosen[k] for k in part] or chosen[:1]
        part_rows, part_obs = [rows[i] for i in index], [with_obs[i] for i in index]
        batch = collate(part_rows, part_obs, policy.pad_id, policy.device, policy.packed)
        batch.index = index
        if not part:
            # FSDP needs every rank in every pass. A rank without rows left computes one of the
            # others' with empty masks: no loss, no gradient, no count in any metric.
            batch.response_mask.zero_()
            batch.obs_mask.zero_()
        yield batch


def split(lengths: list[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Parts with rows x longest <= budget, as indices into `lengths`; each index exactly once.

    As few parts as possible, but a multiple of `multiple` (the ranks); then of sizes as equal as
    possible. The longest rows come first: a budget that exceeds the memory fails at once.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))

    def fill(limit: int) -> list[list[int]]:
        parts = []
        for i in order:
            if parts and (len(parts[-1]) + 1) * lengths[parts[-1][0]] <= limit:
                parts[-1].append(i)
            else:
                parts.append([i])
        return parts

    count = min(-(-len(fill(budget)) // multiple) * multiple, len(lengths))
    # The number of parts never rises with the limit, so a binary search finds the lowest limit that
    # needs at most `count` parts, which balances them.
    limit = bisect_left(range(budget), True, key=lambda limit: len(fill(limit)) <= count)
    parts = fill(limit)
    while len(parts) < count:  # halve the largest part that has two rows
        k = max((k for k in range(len(parts)) if len(parts[k]) > 1),
                key=lambda k: len(parts[k]) * lengths[parts[k][0]])  # fmt: skip
        half = (len(parts[k]) + 1) // 2
        parts[k : k + 1] = [parts[k][:half], parts[k][half:]]
    return parts


def collate(
    rows: list[TokenRow], with_obs: list[bool], pad_id: int, device="cpu", packed: bool = False
) -> Batch:
    """Batch of these rows, with the observation of row b where with_obs[b]."""
    # A row's tail has its scored tokens: the response and, where kept, the observation.
    tails = [r.response_ids + (r.obs_ids if keep else []) for r, keep in zip(rows, with_obs)]
    sequences = [r.prompt_ids + tail for r, tail in zip(rows, tails)]
    lengths = [len(s) for s in sequences]
    if packed:
        starts = [0, *accumulate(lengths)][:-1]
        ids = torch.tensor([[token for s in sequences for token in s]])  # (1, total)
        positions = torch.cat([torch.arange(n) for n in lengths])[None]  # (1, total)
    else:
        width = max(lengths)
        starts = [b * width for b in range(len(rows))]
        ids = torch.tensor([s + [pad_id] * (width - len(s)) for s in sequences])  # (B, L)
        positions = None

    # Where each row's tail begins in ids.flatten(): tail token s is at first + s.
    first = torch.tensor([start + len(r.prompt_ids) for start, r in zip(starts, rows)])  # (B,)
    n_response = torch.tensor([len(r.response_ids) for r in rows])[:, None]  # (B, 1)
    n_tail = torch.tensor([len(tail) for tail in tails])[:, None]  # (B, 1)
    columns = torch.arange(int(n_tail.max()))  # (S,)
    response_mask = columns < n_response  # (B, S)
    obs_mask = (columns < n_tail) & ~response_mask  # (B, S)
    for b, row in enumerate(rows):
        if with_obs[b] and row.given:
            obs_mask[b, [len(row.response_ids) + k for k in row.given]] = False
    # All response tokens come first, since forward() computes entropies for those only.
    row, column = torch.cat([response_mask.nonzero(), obs_mask.nonzero()]).T  # (M,), (M,)
    at = first[row] + column  # (M,)
    tensors = dict(ids=ids, at=at, before=at - 1, row=row, column=column, obs_mask=obs_mask,
                   response_mask=response_mask, positions=positions)  # fmt: skip
    on_device = {k: None if t is None else t.to(device) for k, t in tensors.items()}
    return Batch(index=list(range(len(rows))), n_response=int(response_mask.sum()), **on_device)
