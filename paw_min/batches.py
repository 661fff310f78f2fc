"""From transition rows to what one forward pass takes: which rows together, and how laid out.

`plan` cuts rows into micro-batches of bounded size, rows of like length together, so that little of
them is padding. `collate` lays one out in one of two ways:

    padded   one row of the tensor each, padding on the right: it then stands behind every real
             token, where causal attention hides it and position numbers need no care
    packed   all rows end to end in one, positions starting anew at 0 with each: no padding at all,
             for attention that tells rows apart by that (flash_attention_2; any other builds a mask
             over all pairs of tokens, right but slow)

Padded rows with equal prompts, of which groups have many, are a family and share one sequence:

    prompt  tail of row 1  tail of row 2 ...       a tail is a response, perhaps an observation

where a tail sees the prompt and itself, at the positions that it would have alone. The prompt is
computed once, forward and backward.

A row that teaches the world model brings its observation along, which costs its own tokens and
nothing else: the others stay as short as they are.

Legend: B rows, F families, L tokens of the longest sequence, S scored tokens of the longest row, M
scored tokens in all.
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

    ids: Tensor  # (F, L) a sequence per family, padding; packed: (1, all tokens)
    positions: Tensor | None  # (F, L), packed (1, all tokens); None: 0, 1, 2 ...
    mask: Tensor | None  # (F, 1, L, L) bool, who sees whom; None: all that came before
    at: Tensor  # (M,) place of each scored token in ids.flatten()
    before: Tensor  # (M,) place of the token that predicts it
    row: Tensor  # (M,) its row in the (B, S) results
    slot: Tensor  # (M,) its column there
    n_action: int  # how many of the M are action tokens
    action_mask: Tensor  # (B, S) bool
    obs_mask: Tensor  # (B, S) bool


def collate(
    rows: list,
    with_obs: list[bool],
    pad_id: int,
    device: str = "cpu",
    packed: bool = False,
    families: list[list[int]] | None = None,
) -> Batch:
    """Batch of transition rows; row i brings its observation along where with_obs[i].

    rows: objects with prompt_ids, response_ids and obs_ids, lists of token ids. families: lists of
    positions in `rows` whose prompts are equal, each position once; default: no row shares its own.
    """
    tails = [r.response_ids + (r.obs_ids if keep else []) for r, keep in zip(rows, with_obs)]
    families = families or [[i] for i in range(len(rows))]
    prompts = [rows[family[0]].prompt_ids for family in families]
    lengths = [len(p) + sum(len(tails[i]) for i in f) for p, f in zip(prompts, families)]
    width = max(lengths)
    starts = [0, *accumulate(lengths)] if packed else [k * width for k in range(len(families))]
    shared = len(families) < len(rows)

    shape = (1, sum(lengths)) if packed else (len(families), width)
    ids = torch.full(shape, pad_id)  # (F, L)
    positions = torch.zeros(shape, dtype=torch.long)  # (F, L)
    member = torch.zeros(shape, dtype=torch.long)  # (F, L) whose tail; 0: prompt or padding
    first, last = torch.zeros(2, len(rows), dtype=torch.long)  # (B,) of the tail, of the prompt
    for start, length, prompt, family in zip(starts, lengths, prompts, families):
        n = len(prompt)
        ids.view(-1)[start : start + length] = torch.tensor(
            prompt + [token for i in family for token in tails[i]]
        )
        positions.view(-1)[start : start + n] = torch.arange(n)
        end = start + n
        for k, i in enumerate(family, start=1):
            first[i], last[i] = end, start + n - 1
            place = slice(end, end + len(tails[i]))
            positions.view(-1)[place] = torch.arange(n, n + len(tails[i]))
            member.view(-1)[place] = k
            end = place.stop
    mask = None
    if shared:  # one sees the prompt and what came before of one's own
        own = (member[:, None, :] == 0) | (member[:, None, :] == member[:, :, None])  # (F, L, L)
        mask = own.tril()[:, None]  # (F, 1, L, L)

    n_response = torch.tensor([len(r.response_ids) for r in rows])[:, None]  # (B, 1)
    n_tail = torch.tensor([len(tail) for tail in tails])[:, None]  # (B, 1)
    slots = torch.arange(int(n_tail.max()))  # (S,)
    action_mask = slots < n_response  # (B, S)
    obs_mask = (slots < n_tail) & ~action_mask  # (B, S)
    scored = torch.cat([action_mask.nonzero(), obs_mask.nonzero()])  # (M, 2)
    row, slot = scored[:, 0], scored[:, 1]
    at = first[row] + slot  # (M,)
    before = torch.where(slot == 0, last[row], at - 1)  # (M,)
    positions = positions if packed or shared else None
    tensors = (ids, positions, mask, at, before, row, slot)
    on_device = [t if t is None else t.to(device) for t in tensors]
    n_action = int(action_mask.sum())
    return Batch(*on_device, n_action, action_mask.to(device), obs_mask.to(device))


def find_families(prompts: list[list[int]], tails: list[int], budget: int) -> list[list[int]]:
    """Positions of equal prompts, together; in order of first appearance, each position once.

    tails: tokens that each adds behind the prompt. No family is longer than `budget` tokens unless
    a single row is.
    """
    families, open_family, room = [], {}, {}
    for i, prompt in enumerate(prompts):
        key = tuple(prompt)
        if room.get(key, -1) < tails[i]:
            open_family[key], room[key] = [], budget - len(prompt)
            families.append(open_family[key])
        open_family[key].append(i)
        room[key] -= tails[i]
    return families


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
