"""A small corpus, a random encoder and our retrieval server in a process of its own."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import BertConfig, BertModel, BertTokenizerFast

from tests.helpers import ROOT

TEXTS = [
    '"Hamlet"\nHamlet is a tragedy written by William Shakespeare.',
    '"Rovaniemi"\nRovaniemi is a city in the north of Finland.',
    '"Photosynthesis"\nPlants turn sunlight, water and air into sugar.',
    '"Suspension bridge"\nIts deck hangs below cables between two towers.',
    '"Zoë"\nA name – of Greek origin.',
]
WORDS = "[PAD] [UNK] [CLS] [SEP] query passage : a b c d e f g h".split()


def write_corpus(path, texts=TEXTS, ids=None) -> Path:
    ids = ids or [str(n) for n in range(len(texts))]
    rows = [json.dumps({"id": id, "contents": text}) for id, text in zip(ids, texts)]
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


def make_encoder(folder, seed=0) -> str:
    folder.mkdir()
    torch.manual_seed(seed)
    config = BertConfig(vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1,
                        num_attention_heads=2, intermediate_size=16, max_position_embeddings=32)
    BertModel(config).save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join(WORDS))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    return str(folder)


@contextmanager
def started(*arguments):
    """The process of our server, which is killed at the end."""
    command = [sys.executable, "-m", "paw_min.retrieval.server", *map(str, arguments)]
    process = subprocess.Popen(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_for(process, word) -> str:
    """The first line of output that contains the word."""
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"the server ended without {word!r}")


@contextmanager
def serving(*arguments):
    """The URL of a server that is ready."""
    with started(*arguments, "--port", 0) as process:
        yield wait_for(process, "ready: ").split()[-1]
