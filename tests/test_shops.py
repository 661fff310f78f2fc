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
