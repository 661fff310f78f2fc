"""Shared by all tests: small ALFWorld games, generated and proved once per session (~3 s)."""

import pytest

SIZES = {"train": 12, "valid_seen": 6, "valid_unseen": 6}


@pytest.fixture(scope="session")
def games_root(tmp_path_factory):
    """A data folder with json_2.1.1 in it. Shared: copy what you want to change."""
    games = pytest.importorskip("paw_min.envs.games", reason="needs alfworld and textworld",
                                exc_type=ImportError)
    root = tmp_path_factory.mktemp("alfworld")
    for split, n in SIZES.items():
        games.generate(root, split, n, seed=0)
    return root
