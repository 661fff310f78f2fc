"""The stand-in: a language model of about a million parameters, and how it learned to play badly.

No weights can be fetched where this has to run, so the default policy is a tiny Qwen3 with a
word-level tokenizer. It plays the part of the pretrained model: it knows the language of the games,
observations included, and how to act; and it has a bad habit that RL has to cure. It is an ordinary
Hugging Face folder; no other file knows that it is small.

Not in the paper. It imitates envs/expert.py, who searches with its eyes open, in two phases:

    skill   the expert's actions; in SLIPS of the steps a random command is executed in place of the
            expert's, so that the model sees what to do where no expert would get to
    haste   a short while on a demonstrator who, in HASTE of the steps that allow it, grabs whatever
            lies there or drops what it carries, against its own better thought

Its thought is the present errand ("find mug"): with it, what to do next is a question of the last
few words, which a model of this size learns much faster than without.

The result is kept in the repository (standin/), because it takes ten minutes. This remakes it:

    python -m paw_min.tiny --out standin
"""

import argparse
import hashlib
import json
import random
import re
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paw_min.envs import alfworld, games
from paw_min.envs.expert import Expert
from paw_min.prompts import Context, compact

STANDIN = Path(__file__).parent.parent / "standin"
DATA = Path("data") / "alfworld"  # where generated games are kept, below the working directory
N_GAMES = {"train": 400, "valid_seen": 60, "valid_unseen": 60}
BATCH = 16  # demonstrated transitions per step
CONTEXT_WEIGHT = 0.3  # loss weight of prompt and observation tokens; a response token has 1
SLIPS, HASTE = 0.2, 0.35
# phase: share of hasty steps, episodes per game, training steps, peak learning rate
PHASES = {"skill": (0.0, 4, 1500, 3e-3), "haste": (HASTE, 1, 60, 3e-4)}

SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<agent>"]
TAGS = ["<think>", "</think>", "<action>", "</action>"]  # plain tokens: decoding must keep them
CHAT = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<agent>"


def generated_games(root: Path = DATA) -> Path:
    """The default data: small games in the published layout, made on first use (a minute)."""
    for split, n in N_GAMES.items():
        games.generate(root, split, n, seed=0, progress=True)
    return root


def demonstrations(
    train_games: list[str], seed: int, haste: float = 0.0, episodes: int = 1
) -> list[tuple[str, str, str]]:
    """(prompt, response, next observation) of each step of `episodes` episodes per game."""
    rng = random.Random(f"demonstrations {seed} {haste}")
    env, rows = alfworld.AlfworldEnv(), []
    progress = tqdm(train_games, "demonstrations", unit="game", leave=False, disable=None)
    for game in [game for game in progress for _ in range(episodes)]:
        observation, info = env.reset(game)
        expert = Expert(random.Random(rng.random()))
        expert.reset(observation)
        context = Context(info["task"], observation, info["admissible"])
        for _ in range(25):
            action = expert.act(observation, info["admissible"])
            hasty = [a for a in info["admissible"] if a.startswith(("take ", "move "))]
            if hasty and rng.random() < haste:
                action = rng.choice(hasty)
            prompt = compact(context, history_length=1)
            response = f"<think>{expert.thought()}</think><action>{action}</action>"
            if rng.random() < SLIPS:
                action = rng.choice(info["admissible"])
            observation, _, done, info = env.step(action)
            rows.append((prompt, response, observation))
            context.history.append((context.observation, action))
            context.observation, context.admissible = observation, info["admissible"]
            if done:
                break
    return rows


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """One token per lower-case word or run of punctuation that occurs in `texts`."""
    words = set()
    for text in texts:
        text = re.sub("|".join(TAGS), " ", text.lower())
        words.update(re.findall(r"\w+|[^\w\s]+", text))
    vocab = {word: i for i, word in enumerate(SPECIAL + TAGS + sorted(words))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)  # joins words with spaces
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in TAGS])
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


def warm_start(train_games: list[str], out: Path, seed: int = 0) -> None:
    """Make the stand-in from scratch (ten minutes) and write it to `out` with record.json.

    record.json: the loss of each step by phase, and what `miniature` gives with the same code, by
    which a test notices that the recipe is no longer the one that made the weights.
    """
    train_games = sorted(train_games, key=lambda game: Path(game).parent.name)  # trial_T00000, ...
    model = tokenizer = None
    record = {}
    for phase, (haste, episodes, steps, peak) in PHASES.items():
        rows = demonstrations(train_games, seed, haste, episodes)
        if model is None:
            tokenizer = make_tokenizer([text for row in rows for text in row])
            model = make_model(tokenizer, seed)
        losses = imitate(model, tokenizer, rows, seed, steps, peak)
        record[phase] = [round(loss, 5) for loss in losses]
    record["miniature"] = miniature(train_games[:12], tokenizer, seed)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "record.json").write_text(json.dumps(record) + "\n")


def miniature(train_games: list[str], tokenizer, seed: int) -> dict:
    """The recipe on a few games: digest of the demonstrations and first losses, by phase."""
    result = {}
    for phase, (haste, episodes, steps, peak) in PHASES.items():
        rows = demonstrations(train_games, seed, haste, episodes)
        text = hashlib.sha256(json.dumps(rows).encode()).hexdigest()
        model = make_model(tokenizer, seed)
        losses = imitate(model, tokenizer, rows, seed, steps, peak, stop=3)
        result[phase] = {"demonstrations": text, "loss": losses}
    return result


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Remake the stand-in model (ten minutes).")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    out = parser.parse_args().out
    torch.set_num_threads(2)  # named, because the last bits of the result depend on it
    warm_start(alfworld.list_games(generated_games(), "train"), out)
