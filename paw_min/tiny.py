"""The stand-in: a language model of about a million parameters, and how it learns to play badly.

No weights can be fetched where this has to run, so the default policy is a tiny Qwen2 with a
word-level tokenizer. It plays the part of the pretrained model: it has read what observations look
like and has seen an expert act, briefly, so that it is a mediocre agent and RL has the rest to do.
The result is an ordinary Hugging Face folder; no other file knows that it is small.

Not in the paper. Demonstrations are those of envs/expert.py, which searches with its eyes open;
now and then a random command is executed in place of the expert's, so that the model also sees
what to do in a situation that no expert would get into. The label is always the expert's command.
"""

import hashlib
import random
import re
import shutil
from pathlib import Path

import textworld  # noqa: F401
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tqdm import tqdm
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from paw_min.envs import alfworld, games
from paw_min.envs.expert import Expert
from paw_min.prompts import Context, compact

DATA = Path("data")  # where generated games and the warm-started model are kept
N_GAMES = {"train": 240, "valid_seen": 60, "valid_unseen": 60}
STEPS = 200  # of the warm start
BATCH = 32  # demonstrated transitions per step
LR = 2e-3  # peak; linear warm-up, then linear decay
SLIPS = 0.2  # share of demonstrated steps in which a random command is executed instead
CONTEXT_WEIGHT = 0.3  # loss weight of prompt and observation tokens; a response token has 1

SPECIAL = ["<pad>", "<unk>", "<end>", "<user>", "<agent>"]
TAGS = ["<think>", "</think>", "<action>", "</action>"]  # plain tokens: decoding must keep them
CHAT = "{% for m in messages %}<user>{{ m['content'] }}{% endfor %}<agent>"


def generated_games(root: Path = DATA / "alfworld") -> Path:
    """The default data: small games in the published layout, made on first use."""
    for split, n in N_GAMES.items():
        games.generate(root, split, n, seed=0, progress=True)
    return root


def warm_start(train_games: list[str]) -> Path:
    """Folder of the warm-started stand-in for these games, made on first use (minutes)."""
    folder = DATA / "tiny"
    if folder.exists():
        return folder
    rows = demonstrations(train_games, seed=0)
    tokenizer = make_tokenizer([text for row in rows for text in row])
    model = imitate(make_model(tokenizer, seed=0), tokenizer, rows, seed=0)
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    return folder


def demonstrations(train_games: list[str], seed: int) -> list[tuple[str, str, str]]:
    """(prompt, response, next observation) of each step of one expert episode per game."""
    rng = random.Random(f"demonstrations {seed}")
    env, rows = alfworld.AlfworldEnv(), []
    for game in tqdm(train_games, "demonstrations", unit="game", leave=False, disable=None):
        observation, info = env.reset(game)
        expert = Expert(random.Random(rng.random()))
        expert.reset(observation)
        context = Context(info["task"], observation, info["admissible"])
        for _ in range(30):
            action = expert.act(observation, info["admissible"])
            prompt, response = compact(context, 2), f"<think></think><action>{action}</action>"
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


def imitate(model, tokenizer, rows: list[tuple[str, str, str]], seed: int, steps: int = STEPS):
    """Train `model` by cross entropy on `steps` batches of demonstrated transitions."""

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    encoded = []  # (token ids, loss weights) per row
    for prompt, response, observation in rows:
        parts = [ids(f"<user>{prompt}<agent>"), ids(response) + [tokenizer.eos_token_id]]
        parts += [ids(observation)]
        weights = [CONTEXT_WEIGHT, 1.0, CONTEXT_WEIGHT]
        encoded.append((sum(parts, []), [w for p, w in zip(parts, weights) for _ in p]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98))
    generator = torch.Generator().manual_seed(seed)
    model.train()
    for step in tqdm(range(steps), "warm start", unit="step", leave=False, disable=None):
        for group in optimizer.param_groups:
            group["lr"] = LR * min((step + 1) / 50, max(1 - step / steps, 0.05))
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
    return model
