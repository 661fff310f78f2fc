"""The generator of shops. Its teacher: test_demonstrate.py."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paw_min.toy import webshop_shops as shops

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The default shop."""
    return shops.generate(tmp_path_factory.mktemp("shop") / "s")


def digest(folder):
    return hashlib.sha256(b"".join((folder / n).read_bytes() for n in shops.FILES)).hexdigest()


def test_bytes_are_pinned_and_do_not_depend_on_the_hash_seed(folder, tmp_path):
    code = "from paw_min.toy import webshop_shops; import sys; webshop_shops.generate(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, tmp_path / "shop"], cwd=ROOT, check=True,
                   env={**os.environ, "PYTHONHASHSEED": "1"})
    assert digest(tmp_path / "shop") == digest(folder)
    assert (shops.VERSION, digest(folder)[:32]) == (1, "beb1d214d4d68caf622379d457f2484f"), (
        "the shop has changed: increase shops.VERSION, then write the new digest here")


def test_another_shop_in_the_folder_is_an_error(tmp_path):
    """What else can happen to a generated folder: tests/test_corpus.py."""
    folder = shops.generate(tmp_path / "shop", 10)
    with pytest.raises(ValueError, match="shop has n_products 10, not 11: delete it"):
        shops.generate(folder, 11)
