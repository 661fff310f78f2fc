"""Small language models for worlds with words of their own: tokenizer, model, warm start.

The default policy of each benchmark is a Qwen3 of 0.9 million parameters with a word-level
tokenizer, an ordinary Hugging Face folder in weights/. It takes the place of the pretrained model,
so that runs need no download and no GPU. world_models/teachers has trained it, and says what it has
learned. The worlds of examples/ make theirs here.

Not in the paper. `imitate` is cross entropy on the tokens of demonstrated responses, and on
observations as documents of their own: the model has read what the environment may say, but never
after an action. So a world-model loss still has something to teach.
"""

import re
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paw_min.model.batches import collate
from paw_min.model.policy import Policy
from paw_min.rows import TokenRow

BATCH = 16  # demonstrated steps per training step, and as many documents
PASS = 4  # sequences per forward pass
PEAK = 3e-3  # highest learning rate
DOCUMENT = 0.3  # weight of the cross entropy of a token of a document; of a response: 1
CHAT = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<agent>"


class Demonstration(NamedTuple):
    """One step of a teacher's episode, as text: a row of the warm start."""

    prompt: str
    response: str
    observation: str  # what followed in the environment


SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<agent>"]
# They are not special: decoding must keep them. A vocabulary has those that its teacher uses.
TAGS = ["<think>", "</think>", "<action>", "</action>", "<search>", "</search>", "<answer>",
        "</answer>"]


def make_tokenizer(texts: list[str], complete: bool = False) -> PreTrainedTokenizerFast:
    """A word-level tokenizer for the lower-case words and runs of punctuation in `texts`.

    complete: any other word is an error (ChatTokenizer.tokenized); without, it becomes <unk>.
    """
    words = set()
    for text in texts:
        # Drop the tags, which would fall apart into words and brackets.
        text = re.sub("|".join(TAGS), " ", text.lower())
        words.update(re.findall(r"\w+|[^\w\s]+", text))
    tags = [tag for tag in TAGS if any(tag in text for text in texts)]
    vocab = {word: i for i, word in enumerate(SPECIAL + tags + sorted(words))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="" if complete else "<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    # Spaces between words, but not inside brackets: WebShop's commands are like search[red mug].
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.WordPiece(cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(r" ?\[ ?"), "["),
            decoders.Replace(Regex(r" ?\]"), "]"),
        ]
    )
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    return chat_tokenizer(tokenizer, CHAT)


def chat_tokenizer(tokenizer: Tokenizer, template: str) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers has it, with the words of SPECIAL and a chat template."""
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        chat_template=template,
        clean_up_tokenization_spaces=False,
    )


def make_model(
    tokenizer, seed: int, width: int = 128, positions: int = 2048
) -> Qwen3ForCausalLM:
    """A Qwen3, randomly initialized; with the default width, it has 0.9 million parameters."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=4,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # weights depend on `seed` only
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def documents(policy: Policy, observations: list[str]) -> list[TokenRow]:
    """Observations alone, without what led to them; of WebShop's pages, each text alone.

    Each text appears twice, so that the model learns to copy what it has read.
    """
    texts = {}  # an ordered set: each text once, in the order of its first appearance
    for observation in observations:
        texts |= dict.fromkeys(observation.split(" [SEP] "))
    texts.pop("", None)
    rows = []
    for text in texts:
        # An end token before each: that is what separates documents. Nothing predicts the first.
        first, *rest = [policy.eos_ids[0], *policy.encode(text)] * 2
        rows.append(TokenRow([first], [], rest))
    return rows


def imitate(
    policy: Policy, rows: list[Demonstration], seed: int, steps: int, stop: int | None = None
) -> list[float]:
    """Train with cross entropy; returns the loss of each step.

    Each step draws BATCH of the rows and BATCH documents. With Muon it takes fewer steps than with
    AdamW alone. The learning rates warm up in 50 steps and decay to 5 % linearly. stop: end after
    this many of the `steps`.
    """
    texts = documents(policy, [row.observation for row in rows])
    acts = []
    for prompt, response, _ in rows:
        acts.append(TokenRow(policy.encode_chat(prompt), policy.encode_response(response), []))
    optimizers = make_optimizers(policy.model, PEAK)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    generator = torch.Generator().manual_seed(seed)
    policy.train()
    history = []
    for step in tqdm(range(stop or steps), "warm start", unit="step", leave=False, disable=None):
        warm_up = (step + 1) / 50
        decay = max(1 - step / steps, 0.05)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(warm_up, decay)
        loss = mean_loss(policy, _draw(acts, generator) + _draw(texts, generator))
        policy.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        history.append(loss.item())
    return history


def mean_loss(policy: Policy, rows: list[TokenRow]) -> Tensor:
    """The weighted mean of the cross entropy over all responses and documents -> (), in nats."""

    def length(row: TokenRow) -> int:
        return len(row.prompt_ids) + len(row.response_ids) + len(row.obs_ids)

    total = 0.0
    weights = 0.0
    rows = sorted(rows, key=length)  # rows of about the same length: little padding
    for start in range(0, len(rows), PASS):
        part = rows[start : start + PASS]
        batch = collate(part, [True] * len(part), policy.pad_id)
        logp, _ = policy(batch)  # (B, S)
        weight = batch.response_mask + DOCUMENT * batch.obs_mask  # (B, S)
        total = total - (logp * weight).sum()
        weights = weights + weight.sum()
    return total / weights


def make_optimizers(model, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, at three times the rate, and AdamW for the rest."""
    matrices = []
    rest = []
    for name, parameter in model.named_parameters():
        is_matrix = ".layers." in name and parameter.ndim == 2
        (matrices if is_matrix else rest).append(parameter)
    return [
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98)),
        torch.optim.Muon(matrices, lr=3 * lr, weight_decay=0.0),
    ]


def _draw(source: list[TokenRow], generator: torch.Generator) -> list[TokenRow]:
    chosen = torch.randint(len(source), (BATCH,), generator=generator).tolist()
    return [source[i] for i in chosen]
