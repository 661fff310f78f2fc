"""The output head, a few hundred positions at a time, without the logits of a whole batch.

    z = W h / T      log p(y) = z_y - log sum_v exp z_v      H = -sum_v p_v log p_v

With a vocabulary of 151,936, the logits of one position take 600 KB, and those of a micro-batch
more than everything else in memory. So logits exist for one chunk of positions at a time, are
reduced to log p and H, and are recomputed in the backward pass from closed forms:

    d log p(y) / d z_v = [v = y] - p_v        d H / d z_v = -p_v (log p_v + H)

torch.utils.checkpoint would give the same gradient in 1.6 times the time: autograd passes over the
logits of a chunk many more times and allocates a gradient as large as W for each chunk.

Legend: M scored positions, D hidden size, V vocabulary, C positions of a chunk.
"""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 2**26  # logits per chunk: 256 MB in fp32, 441 positions of 151,936


def token_scores(
    hidden: Tensor, weight: Tensor, target: Tensor, n_entropy: int
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target, entropy of the first n_entropy -> (M,), (M,), fp32, in nats.

    hidden: (M, D), already divided by the temperature; matrix products use its type. weight:
    (V, D), of any type. target: (M,). The entropy of all other positions is 0.
    """
    return TokenScores.apply(hidden, weight, target, n_entropy)


def spans(n_entropy: int, n: int, vocabulary: int):
    """The chunks, as (slice of positions, is their entropy needed?)."""
    size = max(1, CHUNK // vocabulary)
    for start in range(0, n_entropy, size):
        yield slice(start, min(start + size, n_entropy)), True
    for start in range(n_entropy, n, size):
        yield slice(start, min(start + size, n)), False


class TokenScores(torch.autograd.Function):
    """token_scores with its gradient; saves `hidden` and two numbers per position."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, target: Tensor, n_entropy: int):
        w = weight.to(hidden.dtype)  # (V, D)
        wide = torch.promote_types(hidden.dtype, torch.float32)  # softmax in fp32 at least
        logp = torch.zeros(len(hidden), dtype=wide, device=hidden.device)  # (M,)
        entropy, total = torch.zeros_like(logp), torch.zeros_like(logp)  # (M,), (M,)
        for part, with_entropy in spans(n_entropy, len(hidden), len(weight)):
            logits = (hidden[part] @ w.T).to(wide)  # (C, V)
            total[part] = logits.logsumexp(-1)
            all_logp = logits.sub_(total[part, None])  # in place, like everything of size (C, V)
            logp[part] = all_logp.gather(-1, target[part, None])[:, 0]
            if with_entropy:
                entropy[part] = -all_logp.exp().mul_(all_logp).sum(-1)
        ctx.save_for_backward(hidden, weight, target, total, entropy)
        ctx.n_entropy = n_entropy
        return logp, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, d_logp: Tensor, d_entropy: Tensor):  # (M,), (M,)
        hidden, weight, target, total, entropy = ctx.saved_tensors
        w = weight.to(hidden.dtype)  # (V, D)
        d_hidden = torch.empty_like(hidden)  # (M, D)
        # (V, D), accumulated in fp32; a head that is frozen (LoRA) needs none.
        d_weight = torch.zeros_like(weight, dtype=total.dtype) if ctx.needs_input_grad[1] else None
        for part, with_entropy in spans(ctx.n_entropy, len(hidden), len(weight)):
            logits = (hidden[part] @ w.T).to(total.dtype)  # (C, V)
            all_logp = logits.sub_(total[part, None])
            g = d_logp[part, None]  # (C, 1)
            if with_entropy:  # -p (g + h (log p + H))
                p = all_logp.exp()
                d_logits = all_logp.add_(entropy[part, None]).mul_(d_entropy[part, None]).add_(g)
                d_logits.mul_(p).neg_()
                del p
            else:  # -p g
                d_logits = all_logp.exp_().mul_(-g)
            d_logits.scatter_add_(1, target[part, None], g)  # [v = y] g
            d_logits = d_logits.to(hidden.dtype)
            d_hidden[part] = d_logits @ w
            if d_weight is not None:
                d_weight += d_logits.T @ hidden[part]
        return d_hidden, d_weight if d_weight is None else d_weight.to(weight.dtype), None, None
