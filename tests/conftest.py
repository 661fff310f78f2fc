"""Shared by all tests: one thread for torch, and small ALFWorld games made once (~3 s)."""

import os

import pytest
import torch

from paw_min.toy import alfworld_games as games

SIZES = {"train": 12, "valid_seen": 6, "valid_unseen": 6}

torch.set_num_threads(1)  # two threads on a busy machine are far slower than one
os.environ["OMP_NUM_THREADS"] = "1"  # for the processes that tests start


@pytest.fixture(scope="session")
def games_root(tmp_path_factory):
    """A data folder with json_2.1.1 in it. Shared: copy what you want to change."""
    root = tmp_path_factory.mktemp("alfworld")
    for split, n in SIZES.items():
        games.generate(root, split, n, seed=0)
    return root
