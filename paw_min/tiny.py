"""The stand-ins: language models of about a million parameters that have learned to play badly.

No weights can be fetched where this has to run, so the default policy of each benchmark is a tiny
Qwen3 with a word-level tokenizer. It plays the part of the pretrained model: it knows the language
of the environment, observations included, and how to act; and it has a bad habit that RL has to
cure. It is an ordinary Hugging Face folder; no other file knows that it is small.

Not in the paper. It imitates a teacher who sees what the agent sees (envs/expert.py for ALFWorld,
envs/shopper.py for WebShop, envs/scholar.py for search), in two phases:

    skill   the teacher's actions; in some of the steps a random action is executed in place of the
            teacher's, so that the model sees what to do where no teacher would get to
    haste   a short while on a teacher who, in a share of the steps that allow it, acts too early,
            against its own better thought: grabs or drops what is at hand, buys before the options
            are chosen, answers before it has read

Its thought is the present errand ("find mug"): with it, what to do next is a question of the last
few words, which a model of this size learns much faster than without.

The results are kept in the repository (standin/), because each takes minutes. This remakes them:

    python -m paw_min.tiny alfworld --out standin/alfworld --threads 2
    python -m paw_min.tiny webshop --out standin/webshop
    python -m paw_min.tiny search --out standin/search
"""

import argparse
import hashlib
import importlib
import json
import re
from pathlib import Path

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paw_min.prompts import Context, render

STANDINS = Path(__file__).parent.parent / "standin"
BATCH = 16  # demonstrated transitions per step
CONTEXT_WEIGHT = 0.3  # loss weight of prompt and observation tokens; a response token has 1
TEACHERS = {"alfworld": "expert", "webshop": "shopper", "search": "scholar"}  # files of envs/
HISTORY = {"alfworld": 1, "webshop": 3, "search": 4}  # earlier steps in the prompt
# phase: share of hasty steps, episodes per task, training steps, peak learning rate
PHASES = {
    "alfworld": {"skill": (0.0, 4, 1500, 3e-3), "haste": (0.35, 1, 60, 3e-4)},
    "webshop": {"skill": (0.0, 2, 1400, 3e-3), "haste": (0.35, 1, 60, 3e-4)},
    "search": {"skill": (0.0, 1, 2000, 3e-3), "haste": (0.35, 1, 60, 3e-4)},
}

SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<agent>"]
# Plain tokens, since decoding must keep them; a model has those that its teacher uses.
TAGS = [f"<{slash}{tag}>" for tag in ("think", "action", "search", "answer") for slash in ("", "/")]
CHAT = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<agent>"


def demonstrations(env: str, tasks: list[str], seed: int, haste: float, episodes: int):
    """(prompt, response, next observation) of each step of a teacher's episodes."""

    def prompt(context: Context) -> str:
        return render(env, "compact", context, HISTORY[env])

    return teacher(env).demonstrations(tasks, seed, haste, episodes, prompt)


def teacher(env: str):
    """The module with `training_tasks` and `demonstrations`; only its engine gets loaded."""
    return importlib.import_module(f"paw_min.envs.{TEACHERS[env]}")


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token per lower-case word or run of punctuation that occurs in `texts`."""
    words = set()
    for text in texts:
        text = re.sub("|".join(TAGS), " ", text.lower())
        words.update(re.findall(r"\w+|[^\w\s]+", text))
    tags = [tag for tag in TAGS if any(tag in text for text in texts)]
    vocab = {word: i for i, word in enumerate(SPECIAL + tags + sorted(words))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.Sequence(  # words with spaces between, none inside of brackets
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
    """A Qwen3 with 0.9 million random parameters."""
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
    with torch.random.fork_rng(devices=[]):  # weights depend on `seed` alone
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config)


def imitate(model, tokenizer, rows, seed: int, steps: int, peak: float, stop: int | None = None):
    """Train `model` by cross entropy on demonstrated transitions -> loss of each step.

    One batch of BATCH random rows a step; the learning rate rises to `peak` in 50 steps and falls
    to 5 % of it linearly. stop: end after so many of the `steps`.
    """

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    encoded = []  # (token ids, loss weights) per row
    for prompt, response, observation in rows:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
        parts = [ids(chat), ids(response) + [tokenizer.eos_token_id], ids(observation)]
        weights = [CONTEXT_WEIGHT, 1.0, CONTEXT_WEIGHT]
        tokens = parts[0] + parts[1] + parts[2]
        encoded.append((tokens, [w for p, w in zip(parts, weights) for _ in p]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=peak, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(seed)
    model.train()
    history = []
    for step in tqdm(range(stop or steps), "warm start", unit="step", leave=False, disable=None):
        for group in optimizer.param_groups:
            group["lr"] = peak * min((step + 1) / 50, max(1 - step / steps, 0.05))
        chosen = torch.randint(len(encoded), (BATCH,), generator=generator).tolist()
        length = max(len(encoded[i][0]) for i in chosen)
        batch = torch.full((BATCH, length), tokenizer.pad_token_id)  # (B, L)
        weight = torch.zeros(BATCH, length)  # (B, L)
        for k, i in enumerate(chosen):
            tokens, weights = encoded[i]
            batch[k, : len(tokens)] = torch.tensor(tokens)
            weight[k, : len(tokens)] = torch.tensor(weights)
        logits = model(batch).logits[:, :-1]  # (B, L - 1, V)
        loss = torch.nn.functional.cross_entropy(
            logits.transpose(1, 2), batch[:, 1:], reduction="none"
        )  # (B, L - 1)
        loss = (loss * weight[:, 1:]).sum() / weight[:, 1:].sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        history.append(loss.item())
    return history


def warm_start(env: str, out: Path, seed: int = 0) -> None:
    """Make a stand-in from scratch (up to ten minutes) and write it to `out` with record.json.

    record.json: the mean loss of each hundred steps by phase, and what `miniature` gives with the
    same code, by which a test notices that the recipe is no longer the one that made the weights.
    """
    tasks = teacher(env).training_tasks()
    model = tokenizer = None
    record = {}
    for phase, (haste, episodes, steps, peak) in PHASES[env].items():
        rows = demonstrations(env, tasks, seed, haste, episodes)
        if model is None:
            tokenizer = make_tokenizer([text for row in rows for text in row])
            model = make_model(tokenizer, seed)
        losses = imitate(model, tokenizer, rows, seed, steps, peak)
        hundreds = [losses[i : i + 100] for i in range(0, steps, 100)]
        record[phase] = [round(sum(part) / len(part), 4) for part in hundreds]
    record["miniature"] = miniature(env, tasks[:12], tokenizer, seed)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "record.json").write_text(json.dumps(record) + "\n")


def miniature(env: str, tasks: list[str], tokenizer, seed: int) -> dict:
    """The recipe on a few tasks: digest of the demonstrations and first losses, by phase."""
    result = {}
    for phase, (haste, episodes, steps, peak) in PHASES[env].items():
        rows = demonstrations(env, tasks, seed, haste, episodes)
        text = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        model = make_model(tokenizer, seed)
        losses = imitate(model, tokenizer, rows, seed, steps, peak, stop=3)
        result[phase] = {"demonstrations": text, "loss": losses}
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Remake a stand-in model (minutes).")
    parser.add_argument("benchmark", choices=list(PHASES))
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--threads", type=int, default=1, help="its last bits depend on it")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    warm_start(args.benchmark, args.out)
