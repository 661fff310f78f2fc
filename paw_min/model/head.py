"""The output head, a few thousand tokens of the vocabulary at a time.

    z = W h / T      log p(y) = z_y - log sum_v exp z_v      H = -sum_v p_v log p_v

With a vocabulary of 151,936, the logits of one position take 600 KB, and those of a micro-batch
more than everything else in memory. So logits exist for one tile at a time, all positions by a part
of the vocabulary. Each tile is folded into running values of log sum exp and H, and recomputed in
the backward pass from closed forms:

    d log p(y) / d z_v = [v = y] - p_v        d H / d z_v = -p_v (log p_v + H)

Every row of W belongs to one tile, so each row of its gradient is written once, not accumulated.

With bf16 factors, the results of matrix products are fp32, in both passes and in the sampler: bf16
would round a logit of 20 by up to 0.06, and so its p by 6 %.

Legend: M scored positions, of which the first N have an entropy, D hidden size, V vocabulary, C
of its tokens in a tile.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TILE = 2**22  # logits per tile: 16 MB in fp32
# A GPU's fast kernels for products of bf16 matrices take widths that are multiples of 8; those of
# 64 fill its blocks. An odd width was 3.5 times as slow on an H100 (pytorch issue 146817).
ALIGNED = 64


def token_scores(
    hidden: Tensor, weight: Tensor, target: Tensor, n_entropy: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, entropy of the first n_entropy -> (M,), (M,), fp32, in nats.

    hidden: (M, D), already divided by the temperature; its type is that of the factors of matrix
    products. weight: (V, D), of any type. target: (M,). The entropy of all other positions is 0.
    """
    return TokenScores.apply(hidden, weight, target, n_entropy)


def product(a: Tensor, b: Tensor) -> Tensor:
    """The matrix product (A, K), (K, B) -> (A, B), in fp32 where a and b are bf16."""
    if a.dtype != torch.bfloat16:
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()  # a CPU has no such kernel; a product of bf16 is exact in fp32


class Head(torch.nn.Linear):
    """The head of a causal language model, whose logits are fp32 under autocast, too."""

    def __init__(self, weight: torch.nn.Parameter):  # (V, D)
        super().__init__(*reversed(weight.shape), bias=False, device="meta")
        self.weight = weight  # the same one: it may be tied to the embedding

    def forward(self, hidden: Tensor) -> Tensor:  # (B, L, D) or (L, D)
        device = hidden.device.type
        if not torch.is_autocast_enabled(device):
            return super().forward(hidden)
        kind = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            logits = product(hidden.to(kind).flatten(0, -2), self.weight.to(kind).T)
        return logits.unflatten(0, hidden.shape[:-1])


def tiles(hidden: Tensor, weight: Tensor, target: Tensor):
    """Each tile: its part of the vocabulary, W (C, D), logits (M, C), and of each target the column
    (M, 1), which counts only where the target is in this tile, bool (M,).
    """
    size = max(1, TILE // max(1, len(hidden)))
    if size > ALIGNED:
        size -= size % ALIGNED
    for start in range(0, len(weight), size):
        part = slice(start, min(start + size, len(weight)))
        w = weight[part].to(hidden.dtype)  # (C, D)
        column = (target - start).clamp(0, len(w) - 1)[:, None]
        here = (target >= part.start) & (target < part.stop)  # (M,)
        yield part, w, product(hidden, w.T), column, here


class TokenScores(torch.autograd.Function):
    """token_scores with its gradient; saves `hidden` and two numbers per position."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, target: Tensor, n_entropy: int):
        wide = torch.promote_types(hidden.dtype, torch.float32)
        chosen = torch.zeros(len(hidden), dtype=wide, device=hidden.device)  # (M,) z_y
        entropy = torch.zeros_like(chosen)  # (M,) of the vocabulary so far
        total = torch.full_like(chosen, torch.finfo(wide).min)  # (M,) log sum exp so far
        first = slice(n_entropy)  # positions with an entropy
        for _, _, logits, column, here in tiles(hidden, weight, target):
            chosen = torch.where(here, logits.gather(-1, column)[:, 0], chosen)
            before = total
            total = torch.logaddexp(before, logits.logsumexp(-1))
            # Merge the entropy H of the tokens before this tile with the tile's. A token before it
            # had the probability p under the old total and has s p now, with s = exp(before -
            # total), the share of the old tokens in the new total:
            #     -sum s p log(s p)  =  s H - s log s  =  s (H - log s)
            log_share = (before - total)[first]  # log s
            logp = logits[first].sub_(total[first, None])  # in place: logits are (M, C)
            entropy[first] = log_share.exp() * (entropy[first] - log_share)
            entropy[first] -= logp.exp().mul_(logp).sum(-1)
        ctx.save_for_backward(hidden, weight, target, total, entropy)
        ctx.n_entropy = n_entropy
        return chosen - total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logp: Tensor, d_entropy: Tensor):  # (M,), (M,)
        hidden, weight, target, total, entropy = ctx.saved_tensors
        first = slice(ctx.n_entropy)  # positions with an entropy
        rest = slice(ctx.n_entropy, None)
        d_hidden = torch.zeros_like(hidden, dtype=total.dtype)  # (M, D), accumulated in fp32
        # (V, D); a head that is frozen (LoRA) needs none.
        d_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        g = d_logp[:, None]  # (M, 1), the incoming gradient of log p(y)
        h = d_entropy[first, None]  # (N, 1), that of the entropy H
        for part, w, logits, column, here in tiles(hidden, weight, target):
            # d z_v = [v = y] g - p_v (g + h (log p_v + H)), in place; h = 0 without an entropy.
            logp = logits.sub_(total[:, None])
            factor = (logp[first] + entropy[first, None]).mul_(h).add_(g[first])
            d_logits = logp.exp_()  # p
            d_logits[first].mul_(factor)
            d_logits[rest].mul_(g[rest])
            d_logits.neg_().scatter_add_(1, column, g * here[:, None])
            # bf16 keeps three digits of each, however small: [v = y] - p was subtracted in fp32.
            d_logits = d_logits.to(hidden.dtype)
            d_hidden += product(d_logits, w)
            if d_weight is not None:
                d_weight[part] = product(d_logits.T, hidden)
        return d_hidden.to(hidden.dtype), d_weight, None, None
