"""Load a policy from a Hugging Face folder or hub name, with the checks that need the model.

    load_tokenizer   the tokenizer; refuses what cannot be trained, before any weight is read
    load_policy      tokenizer and weights
    check_by_use     are Policy's log-probabilities the model's own?

What config.json and the tokenizer's files tell is checked in published.py.
"""

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from paw_min.base.errors import UserError
from paw_min.model import lora
from paw_min.model.batches import collate
from paw_min.model.policy import Policy
from paw_min.model.published import checked_tokenizer, load_config, load_errors, small_model
from paw_min.rows import TokenRow


def load_tokenizer(folder: str, positions: int = 0):
    """Tokenizer of a Hugging Face folder or hub name; the door for models of others.

    UserError for a model or tokenizer that published.py refuses, for one with fewer positions
    (tokens), and for a family whose log-probabilities are not those of Policy. No weights are read:
    a plan and a start refuse the same.
    """
    config = load_config(folder)
    with load_errors(folder):
        tokenizer = checked_tokenizer(folder, config)
        limit = getattr(config, "max_position_embeddings", positions)
        if limit < positions:
            flags = "--max-prompt-tokens and --max-response-tokens"
            raise UserError(f"{folder} has {limit} positions: lower {flags}, together {positions}.")
        check_by_use(small_model(config), tokenizer)
        return tokenizer


# Two lengths; the first also without its observation.
PROBES = [
    TokenRow([1, 2, 3], [4, 5], [6, 7]),
    TokenRow([1, 2, 3], [4, 5], []),
    TokenRow([7, 6, 5, 4, 3], [2, 1, 2, 3], [4, 5, 6]),
]


@torch.no_grad()
def check_by_use(model, tokenizer) -> None:
    """UserError unless Policy's log-probabilities are the model's own, of rows alone and together.

    Policy.forward needs logits that are the last hidden states times the head's weight, and that
    depend neither on later tokens nor on other rows of the pass.
    """
    own = [own_logps(model, row) for row in PROBES]  # first: Policy replaces the head
    policy = Policy(model, tokenizer)
    # Padded by 0: a small model has no embedding for the tokenizer's pad token.
    alone = [policy(collate([row], [True], pad_id=0)).logp[0] for row in PROBES]
    together = policy(collate(PROBES, [True] * len(PROBES), pad_id=0)).logp  # (B, S)
    for ours, difference in (
        (alone, "changes its logits after the head, or what enters it (a head with a bias, a "
                "scale, a cap)"),
        (together, "gives a row other logits beside a longer one (rotary factors for the longest, "
                   "as longrope and dynamic in config.json, or attention to later tokens)"),
    ):
        if not all(torch.allclose(a[: len(b)], b, atol=1e-3) for a, b in zip(ours, own)):  # nats
            raise UserError(f"{type(model).__name__} {difference}, which is not supported: use "
                            "another model")


def own_logps(model, row: TokenRow) -> Tensor:
    """log p of each token after the prompt, (S,), by a plain pass of transformers."""
    ids = torch.tensor([row.prompt_ids + row.response_ids + row.obs_ids])
    logits = model(ids, use_cache=False).logits[0, :-1]  # (L - 1, V)
    logp = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
    return logp[len(row.prompt_ids) - 1 :]


def load_policy(
    folder: str, temperature: float = 1.0, device: str = "cpu", precision: str = "fp32"
) -> Policy:
    """Policy from a Hugging Face folder or hub name, with fp32 weights; see load_tokenizer.

    The folder of an adapter (lora.py) gives its start model with the adapter merged. Dropout is
    off: trained log-probabilities would differ from the sampled ones.
    """
    tokenizer = load_tokenizer(folder)
    with load_errors(folder):
        start_folder = lora.base_model(folder)
        if start_folder:
            start = load_policy(start_folder, device=device).model
            merged = lora.merge(start, folder)
            if precision == "bf16":
                lora.round_layers(merged)
            return Policy(merged, tokenizer, temperature, precision)
        config = load_config(folder)
        for name, value in vars(config).items():
            if isinstance(value, float) and "drop" in name:  # attention_dropout, resid_pdrop, ...
                setattr(config, name, 0.0)
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=torch.float32, output_loading_info=True,
            trust_remote_code=False,
        )
        # transformers would draw missing weights at random.
        if info["missing_keys"]:
            raise UserError(f"{folder} has no weights for {min(info['missing_keys'])}: use another "
                            "model")
        # It also drops weights that config.json has no place for. Weights that a family always
        # drops, such as layers that predict further tokens, are not among these keys.
        if info["unexpected_keys"]:
            raise UserError(f"{folder} has weights for {min(info['unexpected_keys'])}, which its "
                            "config.json does not: restore config.json, or use another model")
        policy = Policy(model.to(device), tokenizer, temperature, precision)
        check_weights(policy)
        return policy


@torch.no_grad()
def check_weights(policy: Policy) -> None:
    """UserError for logits that are not numbers."""
    ids = torch.tensor([[policy.pad_id, policy.eos_ids[0]]], device=policy.device)
    if not policy.model(ids, use_cache=False).logits.isfinite().all():
        name = type(policy.model).__name__
        raise UserError(f"{name} has weights that are NaN or infinite: use another model")
