"""From transition rows to what one forward pass takes: which rows together, and how laid out.

`plan` cuts rows into micro-batches of bounded size, rows of like length together, so that little of
them is padding. `collate` lays one out in one of two ways:

    padded   one row of the tensor each, padding on the right: it then stands behind every real
             token, where causal attention hides it and position numbers need no care
    packed   all rows end to end in one, positions starting anew at 0 with each: no padding at all,
             for attention that tells rows apart by that (flash_attention_2; any other builds a mask
             over all pairs of tokens, right but slow)

A row that teaches the world model brings its observation along, which costs its own tokens and
nothing else: the others stay as short as they are.

Legend: B rows, L tokens of the longest row, S scored tokens of the longest row, M scored tokens
in all.
"""

from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass
class Batch:
    """Rows laid out for one forward pass. Row i scores its action tokens, then its observation's.

    The M scored tokens are numbered through: first the action tokens of all rows.
    """

    ids: Tensor  # (B, L) prompt, response, observation, padding; packed: (1, all tokens)
    positions: Tensor | None  # packed: (1, all tokens)
    at: Tensor  # (M,) place of each scored token in ids.flatten()
    row: Tensor  # (M,) its row in the (B, S) results
    slot: Tensor  # (M,) its column there
    n_action: int  # how many of the M are action tokens
    action_mask: Tensor  # (B, S) bool
    obs_mask: Tensor  # (B, S) bool


def collate(
    rows: list, with_obs: list[bool], pad_id: int, device: str = "cpu", packed: bool = False
) -> Batch:
    """Batch of transition rows; row i brings its observation along where with_obs[i].

    rows: objects with prompt_ids, response_ids and obs_ids, lists of token ids.
    """
    tails = [r.response_ids + (r.obs_ids if keep else []) for r, keep in zip(rows, with_obs)]
    lengths = [len(r.prompt_ids) + len(tail) for r, tail in zip(rows, tails)]
    positions = None
    if packed:
        starts = [0, *accumulate(lengths)][: len(rows)]
        ids = torch.tensor([[t for r, tail in zip(rows, tails) for t in r.prompt_ids + tail]])
        positions = torch.cat([torch.arange(n) for n in lengths])[None]
    else:
        starts = [i * max(lengths) for i in range(len(rows))]
        ids = torch.full((len(rows), max(lengths)), pad_id)
        for i, (r, tail) in enumerate(zip(rows, tails)):
            ids[i, : lengths[i]] = torch.tensor(r.prompt_ids + tail)

    n_response = torch.tensor([len(r.response_ids) for r in rows])[:, None]  # (B, 1)
    n_tail = torch.tensor([len(tail) for tail in tails])[:, None]  # (B, 1)
    slots = torch.arange(int(n_tail.max()))  # (S,)
    action_mask = slots < n_response  # (B, S)
    obs_mask = (slots < n_tail) & ~action_mask  # (B, S)
    scored = torch.cat([action_mask.nonzero(), obs_mask.nonzero()])  # (M, 2)
    row, slot = scored[:, 0], scored[:, 1]
    first = torch.tensor([s + len(r.prompt_ids) for s, r in zip(starts, rows)])  # (B,)
    tensors = (ids, positions, first[row] + slot, row, slot)
    on_device = [t if t is None else t.to(device) for t in tensors]
    n_action = int(action_mask.sum())
    return Batch(*on_device, n_action, action_mask.to(device), obs_mask.to(device))


def plan(lengths: list[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Micro-batches with rows x longest <= budget, as indices into `lengths`; each index once.

    A row that is longer than the budget stands alone. As few micro-batches as can be, but a
    multiple of `multiple` (the ranks) where there are enough rows; then as even as can be. The
    longest come first: too large a budget shows in the first of them.
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
    # A lower limit never needs fewer: the lowest that needs no more than `count` is the most even.
    limit = bisect_left(range(budget), True, key=lambda limit: len(fill(limit)) <= count)
    parts = fill(limit)
    while len(parts) < count:  # the largest that can be halved, until there are enough
        k = max((k for k in range(len(parts)) if len(parts[k]) > 1),
                key=lambda k: len(parts[k]) * lengths[parts[k][0]])  # fmt: skip
        half = (len(parts[k]) + 1) // 2
        parts[k : k + 1] = [parts[k][:half], parts[k][half:]]
    return parts
