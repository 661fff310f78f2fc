"""Training of the stand-in models: small language models that play poorly.

The default policy of each benchmark is a Qwen3 of 0.9 million parameters with a word-level
tokenizer, so that runs need no download and no GPU. It takes the place of the pretrained model: it
knows the words of the environment and how to act, and it has a bad habit for RL to correct. It has
not been taught what its actions do, so a world-model loss has something to teach. It is an ordinary
Hugging Face folder.

Not in the paper. The model imitates a rule-based teacher with the agent's observations
(<benchmark>_teacher.py). The teacher is hasty: it often acts too early, against its own thought. It
takes or drops objects at random, buys before all options are chosen, answers before it has
searched. In some steps, a command other than the demonstrated one is executed, so that the data
include states that the teacher never reaches (such a step has no observation).

The loss is on the tokens of responses, and on observations as documents of their own: the model has
read what the environment may say, but never after an action. The thought in a response is the
current subgoal ("find mug"). The next command then depends on the last few words mostly, which a
model of this size learns much faster.

The weights are part of the repository, because training takes 7 to 10 minutes on one idle core
(sparse: two; smollm2: 40). To train them again:

    python -m paw_min.toy.standins alfworld --out paw_min/toy/weights/alfworld
    python -m paw_min.toy.standins sparse --out paw_min/toy/weights/sparse
    python -m paw_min.toy.standins webshop --out paw_min/toy/weights/webshop
    python -m paw_min.toy.standins search --out paw_min/toy/weights/search
    python -m paw_min.toy.standins smollm2 --out paw_min/toy/weights/smollm2

sparse continues alfworld with a teacher so hasty that almost no episode is won. smollm2 is a LoRA
adapter that teaches a pretrained model, SmolLM2-135M-Instruct (smollm2.py), the format of
responses.
"""

import argparse
import hashlib
import json
import re
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paw_min.envs.benchmarks import BENCHMARKS
from paw_min.envs.interface import Context
from paw_min.model import lora
from paw_min.model.policy import Policy, load_policy
from paw_min.toy import (
    Demonstration,
    alfworld_teacher,
    default_model,
    search_teacher,
    smollm2,
    webshop_teacher,
)

TEACHERS = {
    "alfworld": alfworld_teacher,
    "webshop": webshop_teacher,
    "search": search_teacher,
}
BATCH = 16  # demonstrated steps per training step, and as many documents
PASS = 4  # sequences per forward pass
WEIGHTS = {  # of the loss on tokens of response, observation after it, and observation alone
    "words": (1.0, 0.0, 0.3),  # the stand-ins
    "sft": (1.0, 0.0, 0.0),  # plain imitation: smollm2, which has read enough
    "actobs": (1.0, 1.0, 0.0),  # ActObs (arXiv 2609.20715): observations weigh as much as actions
}
HISTORY = {"alfworld": 1, "webshop": 3, "search": 4}  # history length of the prompts


class Lesson(NamedTuple):
    """What a stand-in is trained on."""

    env: str
    haste: float  # probability that the teacher is hasty in a step that allows it
    episodes: int  # per task
    steps: int  # of training
    peak: float  # learning rate
    kind: str = "words"


RANK = 4  # of the adapter smollm2
LESSONS = {
    "alfworld": Lesson("alfworld", 0.5, 4, 1500, 3e-3),
    "sparse": Lesson("alfworld", 0.8, 1, 100, 6e-4),
    "webshop": Lesson("webshop", 0.25, 2, 1000, 3e-3),
    "search": Lesson("search", 0.5, 1, 1200, 3e-3),
    "smollm2": Lesson("alfworld", 0.5, 1, 100, 2e-3, "sft"),
}

SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<agent>"]
# Not special, since decoding must keep them; a vocabulary has those that its teacher uses.
TAGS = [f"<{slash}{tag}>" for tag in ("think", "action", "search", "answer") for slash in ("", "/")]


class Weighted(NamedTuple):
    """A training sequence."""

    ids: list[int]
    weights: list[float]  # of each token's cross entropy


CHAT = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<agent>"


def demonstrations(
    env: str, tasks: list[str], seed: int, haste: float, episodes: int
) -> list[Demonstration]:
    """The teacher's episodes with compact prompts."""

    def render(context: Context) -> str:
        return BENCHMARKS[env].prompts["compact"](context, HISTORY[env])

    return TEACHERS[env].demonstrations(tasks, seed, haste, episodes, render)


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A word-level tokenizer for the lower-case words and runs of punctuation in `texts`."""
    words = set()
    for text in texts:
        text = re.sub("|".join(TAGS), " ", text.lower())
        words.update(re.findall(r"\w+|[^\w\s]+", text))
    tags = [tag for tag in TAGS if any(tag in text for text in texts)]
    vocab = {word: i for i, word in enumerate(SPECIAL + tags + sorted(words))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Sequence(  # spaces between words, but not inside brackets
        [
            decoders.WordPiece(cleanup=False),
            decoders.Fuse(),
            decoders.Replace(Regex(r" ?\[ ?"), "["),
            decoders.Replace(Regex(r" ?\]"), "]"),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<end>",
        chat_template=CHAT,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer, seed: int) -> Qwen3ForCausalLM:
    """A Qwen3 with 0.9 million parameters, randomly initialized."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # weights depend on `seed` only
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def encode(tokenizer, rows: list[Demonstration], kind: str) -> list[Weighted]:
    """The demonstrated steps: chat, response with end token, observation. kind: see WEIGHTS."""
    encoded = []
    for prompt, response, observation in rows:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        parts = [chat, response + tokenizer.eos_token, observation]
        ids = [tokenizer(part, add_special_tokens=False)["input_ids"] for part in parts]
        weights = [w for w, part in zip((0.0, *WEIGHTS[kind][:2]), ids) for _ in part]
        encoded.append(Weighted(sum(ids, []), weights))
    return encoded


def documents(tokenizer, observations: list[str], weight: float) -> list[Weighted]:
    """Observations alone, without what led to them; of WebShop's pages, each text alone.

    Each text appears twice, so that the model learns to copy what it has read.
    """
    texts = dict.fromkeys(part for text in observations for part in text.split(" [SEP] ") if part)
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    twice = [[tokenizer.eos_token_id, *part] * 2 for part in ids]
    return [Weighted(part, [weight] * len(part)) for part in twice]


def weighted_loss(model, batch: list[Weighted]) -> tuple[torch.Tensor, float]:
    """(weighted sum of the cross entropy of all tokens, sum of the weights)."""
    length = max(len(row.ids) for row in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)  # (B, L), padded on the right
    weight = torch.zeros(len(batch), length)  # (B, L)
    for k, row in enumerate(batch):
        ids[k, : len(row.ids)] = torch.tensor(row.ids)
        weight[k, : len(row.ids)] = torch.tensor(row.weights)
    scored = weight[:, 1:] > 0  # (B, L - 1); the head on M of them only: it costs most
    hidden = model.get_decoder()(ids).last_hidden_state[:, :-1][scored]  # (M, D)
    logits = model.get_output_embeddings()(hidden)  # (M, V)
    loss = torch.nn.functional.cross_entropy(logits, ids[:, 1:][scored], reduction="none")
    return (loss * weight[:, 1:][scored]).sum(), weight[:, 1:].sum().item()


def imitate(
    model, tokenizer, rows: list[Demonstration], seed: int, steps: int, peak: float,
    kind: str = "words", stop: int | None = None,
) -> list[float]:  # fmt: skip
    """Train `model` with cross entropy; returns the loss of each step.

    Each step draws BATCH of the rows and, where the kind has weight on them, BATCH documents. Muon
    trains the matrices of the layers and AdamW the rest: fewer steps than with AdamW alone. AdamW
    trains adapters. The learning rate warms up to `peak` (Muon's to three times that) in 50 steps
    and decays to 5 % of it linearly. kind: a name in WEIGHTS. stop: end after this many of the
    `steps`.
    """
    encoded = encode(tokenizer, rows, kind)
    weight = WEIGHTS[kind][2]
    texts = documents(tokenizer, [row.observation for row in rows], weight) if weight else []
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    muon = [n for n, p in trained.items() if ".layers." in n and p.ndim == 2 and "lora" not in n]
    rest = [p for n, p in trained.items() if n not in muon]
    optimizers = {torch.optim.AdamW(rest, betas=(0.9, 0.98)): peak}
    if muon:
        matrices = [trained[n] for n in muon]
        optimizers[torch.optim.Muon(matrices, weight_decay=0.0)] = 3 * peak
    generator = torch.Generator().manual_seed(seed)
    model.train()
    history = []
    for step in tqdm(range(stop or steps), "warm start", unit="step", leave=False, disable=None):
        for optimizer, rate in optimizers.items():
            rate *= min((step + 1) / 50, max(1 - step / steps, 0.05))
            optimizer.param_groups[0]["lr"] = rate
        batch = []
        for source in filter(None, (encoded, texts)):
            chosen = torch.randint(len(source), (BATCH,), generator=generator).tolist()
            batch += [source[i] for i in chosen]
        batch.sort(key=lambda row: len(row.ids))  # rows of about the same length: little padding
        total, weights = 0.0, 0.0
        for start in range(0, len(batch), PASS):
            loss, weight = weighted_loss(model, batch[start : start + PASS])
            total, weights = total + loss, weights + weight
        loss = total / weights
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        history.append(loss.item())
    return history


def warm_start(name: str, out: Path, seed: int = 0, kind: str | None = None) -> None:
    """Train a stand-in (minutes); write it to `out` with record.json.

    kind: a name in WEIGHTS; None: that of the lesson. record.json: the mean loss of each hundred
    steps, and the result of `miniature`, with which a test checks that the current code is the code
    that trained the weights in the repository.
    """
    lesson = LESSONS[name]
    tasks = TEACHERS[lesson.env].training_tasks()
    rows = demonstrations(lesson.env, tasks, seed, lesson.haste, lesson.episodes)
    if name == lesson.env:
        tokenizer = make_tokenizer([text for row in rows for text in row])
        policy = Policy(make_model(tokenizer, seed), tokenizer)
    elif name == "smollm2":
        policy = load_policy(str(smollm2.write()))
        lora.attach(policy.model, RANK, "fp32", seed, None)
    else:
        policy = load_policy(default_model(lesson.env))
    model, tokenizer = policy.model, policy.tokenizer
    losses = imitate(model, tokenizer, rows, seed, lesson.steps, lesson.peak, kind or lesson.kind)
    hundreds = [losses[i : i + 100] for i in range(0, len(losses), 100)]
    record = {"loss": [round(sum(part) / len(part), 4) for part in hundreds]}
    record["miniature"] = miniature(name, tasks[:12], tokenizer, seed)
    policy.save(out)
    (out / "record.json").write_text(json.dumps(record) + "\n")


def miniature(name: str, tasks: list[str], tokenizer, seed: int) -> dict:
    """Three steps on a few tasks: digest of the demonstrations, and losses."""
    env, haste, episodes, steps, peak, kind = LESSONS[name]
    rows = demonstrations(env, tasks, seed, haste, episodes)
    model = make_model(tokenizer, seed)
    if name == "smollm2":
        lora.attach(model, RANK, "fp32", seed, None)
    losses = imitate(model, tokenizer, rows, seed, steps, peak, kind, stop=3)
    return {"demonstrations": hashlib.sha256(json.dumps(rows).encode()).hexdigest(), "loss": losses}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a stand-in model (minutes).")
    parser.add_argument("name", choices=list(LESSONS), metavar="NAME", help=", ".join(LESSONS))
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    kinds = "loss on responses, and, words: observations alone; actobs: observations after them"
    parser.add_argument("--warm-start", choices=list(WEIGHTS), help=kinds)
    parser.add_argument("--threads", type=int, default=1, help="affects the last bits")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warm_start(args.name, args.out, kind=args.warm_start)
