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
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

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


class Weighted(NamedTuple):
    """A training sequence."""

    ids: list[int]
    weights: list[float]  # weight of each token's cross entropy


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer for the lower-case words and runs of punctuation in `texts`."""
    words = set()
    for text in texts:
        # Drop the tags, which would fall apart into words and brackets.
        text = re.sub("|".join(TAGS), " ", text.lower())
        words.update(re.findall(r"\w+|[^\w\s]+", text))
    tags = [tag for tag in TAGS if any(tag in text for text in texts)]
    vocab = {word: i for i, word in enumerate(SPECIAL + tags + sorted(words))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
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


def encode(tokenizer, rows: list[Demonstration]) -> list[Weighted]:
    """The demonstrated steps: prompt, and response with end token."""

    def ids_of(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    encoded = []
    for prompt, response, _ in rows:
        message = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        # Tokenized separately, as in training: no token reaches over the end of a part.
        given = ids_of(message)
        own = ids_of(response + tokenizer.eos_token)
        encoded.append(Weighted(given + own, [0.0] * len(given) + [1.0] * len(own)))
    return encoded


def documents(tokenizer, observations: list[str]) -> list[Weighted]:
    """Observations alone, without what led to them; of WebShop's pages, each text alone.

    Each text appears twice, so that the model learns to copy what it has read.
    """
    texts = {}  # an ordered set: each text once, in the order of its first appearance
    for observation in observations:
        texts |= dict.fromkeys(observation.split(" [SEP] "))
    texts.pop("", None)
    encoded = []
    for text in texts:
        # An end token before each: that is what separates documents.
        text = tokenizer.eos_token + text
        twice = tokenizer(text, add_special_tokens=False)["input_ids"] * 2
        encoded.append(Weighted(twice, [DOCUMENT] * len(twice)))
    return encoded


def weighted_loss(model, batch: list[Weighted]) -> tuple[torch.Tensor, float]:
    """(weighted sum of the cross entropy of all tokens in nats, sum of the weights)."""
    length = max(len(row.ids) for row in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)  # (B, L), padded on the right
    weight = torch.zeros(len(batch), length)  # (B, L)
    for k, row in enumerate(batch):
        ids[k, : len(row.ids)] = torch.tensor(row.ids)
        weight[k, : len(row.ids)] = torch.tensor(row.weights)
    # A position predicts the next token: targets and their weights start at the second.
    targets = ids[:, 1:]  # (B, L - 1)
    weight = weight[:, 1:]  # (B, L - 1)
    # No mask: padding is on the right, where no scored position attends to it.
    hidden = model.get_decoder()(ids).last_hidden_state[:, :-1]  # (B, L - 1, D)
    # The head on the M positions with weight only: in a model of this size, it costs most.
    scored = weight > 0  # (B, L - 1)
    logits = model.get_output_embeddings()(hidden[scored])  # (M, V)
    loss = torch.nn.functional.cross_entropy(logits, targets[scored], reduction="none")  # (M,)
    return (loss * weight[scored]).sum(), weight.sum().item()


def imitate(
    model, tokenizer, rows: list[Demonstration], seed: int, steps: int, stop: int | None = None
) -> list[float]:
    """Train `model` with cross entropy; returns the loss of each step.

    Each step draws BATCH of the rows and BATCH documents. With Muon it takes fewer steps than with
    AdamW alone. The learning rates warm up in 50 steps and decay to 5 % linearly. stop: end after
    this many of the `steps`.
    """
    texts = documents(tokenizer, [row.observation for row in rows])
    encoded = encode(tokenizer, rows)
    optimizers = make_optimizers(model, PEAK)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    generator = torch.Generator().manual_seed(seed)
    model.train()
    history = []
    for step in tqdm(range(stop or steps), "warm start", unit="step", leave=False, disable=None):
        warm_up = (step + 1) / 50
        decay = max(1 - step / steps, 0.05)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * min(warm_up, decay)
        batch = _draw(encoded, generator) + _draw(texts, generator)
        loss = _mean_loss(model, batch)
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        history.append(loss.item())
    return history


def make_optimizers(model, lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, at three times the rate, and AdamW for the rest."""
    matrices = []  # the matrices of the layers
    rest = []
    for name, parameter in model.named_parameters():
        is_matrix = ".layers." in name and parameter.ndim == 2
        (matrices if is_matrix else rest).append(parameter)
    return [
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.98)),
        torch.optim.Muon(matrices, lr=3 * lr, weight_decay=0.0),
    ]


def _draw(source: list[Weighted], generator: torch.Generator) -> list[Weighted]:
    chosen = torch.randint(len(source), (BATCH,), generator=generator).tolist()
    return [source[i] for i in chosen]


def _mean_loss(model, batch: list[Weighted]) -> torch.Tensor:
    """The weighted mean of the cross entropy over all tokens of a batch, PASS rows at a time."""

    def length(row: Weighted) -> int:
        return len(row.ids)

    total = 0.0
    weights = 0.0
    rows = sorted(batch, key=length)  # rows of about the same length: little padding
    for start in range(0, len(rows), PASS):
        loss, weight = weighted_loss(model, rows[start : start + PASS])
        total = total + loss
        weights = weights + weight
    return total / weights
