"""The critic of PPO: a second copy of the start model with a linear head of one output.

Its head starts at zero, verl-agent's at random. ppo.py trains it.

Legend: B rows, S columns and L positions of a batch (batches.py), M response tokens, D hidden size.
"""

import torch
from torch import Tensor

from paw_min.model.batches import Batch
from paw_min.model.loading import load_policy
from paw_min.model.policy import Policy, last_hidden

# The critic's rate is so many times the policy's; A.1: 1e-5 and 1e-6. With LoRA, the two are equal.
LR_FACTOR = 10


class Critic(torch.nn.Module):
    """Values of response tokens: a decoder and a linear head."""

    def __init__(self, decoder: torch.nn.Module, precision: str = "fp32"):
        super().__init__()
        self.decoder = decoder
        self.precision = precision
        width = decoder.config.hidden_size
        self.head = torch.nn.Linear(width, 1, device=decoder.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, batch: Batch) -> Tensor:
        """V of the state before each response token -> (B, S) fp32, 0 elsewhere."""
        hidden = last_hidden(self.decoder, batch, self.precision)  # (B * L, D)
        # The state before a token is at the token that precedes it.
        n = batch.n_response
        hidden = hidden[batch.at[:n] - 1]  # (M, D)
        value = self.head(hidden.to(self.head.weight.dtype))[:, 0].float()  # (M,)
        empty = torch.zeros(batch.response_mask.shape, device=value.device)  # (B, S)
        return empty.index_put((batch.row[:n], batch.column[:n]), value)


def load_critic(folder: str, policy: Policy) -> Critic:
    """A critic that starts from the language model in `folder`."""
    model = load_policy(folder, device=str(policy.device)).model
    return Critic(model.get_decoder(), policy.precision)
