"""The policy: one forward pass of a causal language model serves RL and the world model.

`Policy.forward` takes a batch of rows (h_t, a_t, o_{t+1}). It gives the log-probabilities of the
response's tokens, for RL, and of the next observation's tokens, for the world model, and the
entropies of the former. Attention is causal: no token of the response attends to the observation
behind it. So an observation changes no log-probability of the response, to the last bit on a CPU
(tests/method/test_policy.py). The model gets our own head (head.py), which computes logits only
where they are needed: all of a batch at once would take more memory than the model.

The paper does not say which tokens separate a and o. Here they are what the chat template puts
between a response and the next user message (Policy.separator), because a chat model has seen an
environment's text only in such messages. Nor does it say at which temperature o is scored. Here it
is 1, because observations are not sampled: only the logits of responses are divided by the sampling
temperature.

Loading is in loading.py, text to tokens and back in chat.py.

Legend: B rows, L tokens of the longest, S columns (see batches.py), M scored tokens in all, D
hidden size.
"""

import sys
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from paw_min.base.files import apply_umask
from paw_min.model.batches import Batch
from paw_min.model.chat import ChatTokenizer
from paw_min.model.head import Head, token_scores
from paw_min.model.published import end_tokens

MODEL = "model."  # prefix of the language model's weights in Policy.state_dict()


class Scores(NamedTuple):  # A tuple, because FSDP looks for tensors in what a pass returns.
    """The result of a pass: (B, S) each, fp32, in nats, 0 where no token is scored."""

    logp: Tensor  # log-probability of the token
    entropy: Tensor  # of the full vocabulary before it; 0 on observation tokens


class Policy(torch.nn.Module, ChatTokenizer):
    """A causal language model of transformers with its tokenizer and sampling temperature.

    Everything that is trained belongs in this module: it is sharded, saved and restored as a whole
    (session.make_optimizer lists what is optimized). `critic` is there with PPO only.

    precision: of the forward pass, "fp32" or "bf16"; the weights keep their type.
    """

    def __init__(self, model, tokenizer, temperature: float = 1.0, precision: str = "fp32"):
        super().__init__()
        ChatTokenizer.__init__(self, tokenizer, end_tokens(model.generation_config))
        self.model = model
        self.temperature = temperature
        self.precision = precision
        self.critic = None
        # The largest number of tokens in a sequence; a model may have no limit.
        self.positions = getattr(model.config, "max_position_embeddings", sys.maxsize)
        # Published generation defaults (top-p, repetition penalty) would make the sampled
        # distribution differ from the one whose log-probabilities are trained.
        model.generation_config = GenerationConfig(
            eos_token_id=self.eos_ids, pad_token_id=self.pad_id
        )
        model.set_output_embeddings(Head(model.get_output_embeddings().weight))

    @property
    def device(self) -> torch.device:
        return self.model.device

    def forward(self, batch: Batch) -> Scores:
        """Score the response and observation tokens of a batch."""
        head = self.model.get_output_embeddings()
        # The head only sees scored positions. Position t - 1 predicts token t.
        hidden = last_hidden(self.model.get_decoder(), batch, self.precision)  # (B * L, D)
        hidden = hidden[batch.at - 1]  # (M, D)
        # Logits are linear in the hidden states, so dividing these applies the temperature. Only
        # responses were sampled at it: the observation's rows keep 1.
        divisor = torch.ones(len(hidden), 1, device=hidden.device)  # (M, 1) fp32
        divisor[: batch.n_response] = self.temperature
        head_type = torch.bfloat16 if self.precision == "bf16" else head.weight.dtype
        hidden = (hidden / divisor).to(head_type)
        target = batch.ids.flatten()[batch.at]  # (M,)
        logp, entropy = token_scores(hidden, head.weight, target, batch.n_response)  # (M,), (M,)

        # Give each transition a row again.
        place = (batch.row, batch.column)
        empty = torch.zeros(batch.response_mask.shape, device=hidden.device)  # (B, S)
        return Scores(empty.index_put(place, logp), empty.index_put(place, entropy))

    def values(self, batch: Batch) -> Tensor:
        """The critic's values of response tokens -> (B, S); see critic.py.

        Called through the policy, which is the root that FSDP shards (shard.py).
        """
        return self.critic(batch)

    def save(self, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
        """Write the language model as a Hugging Face folder. LoRA: only the adapter.

        weights: the unsharded state_dict(), where this module is sharded.
        """
        if weights is None:
            weights = self.state_dict()
        ours = {
            name.removeprefix(MODEL): weight
            for name, weight in weights.items()
            if name.startswith(MODEL)
        }
        self.model.save_pretrained(folder, state_dict=ours)
        self.model.config.save_pretrained(folder)  # left out beside an adapter
        self.tokenizer.save_pretrained(folder)
        apply_umask(folder)

    def besides_the_model(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        """The part of these weights that `save` does not write, such as PPO's critic."""
        return {name: weight for name, weight in weights.items() if not name.startswith(MODEL)}


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The block in which a model is called: with bf16, its products are computed in bf16."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")


def last_hidden(decoder, batch: Batch, precision: str) -> Tensor:
    """The last hidden states of all tokens -> (B * L, D)."""
    with autocast(batch.ids.device, precision):
        out = decoder(input_ids=batch.ids, use_cache=False)
    return out.last_hidden_state.flatten(0, 1)
