"""PaW in verl equals paw_min.update (verl_cases.py); without verl, one sentence says so.

verl runs in a process of its own, because its engine fails beside the trl of test_trl.py.
"""

import pytest

from tests.helpers import python


@pytest.mark.slow
def test_in_verl_loss_and_gradient_are_ours():
    python("-m", "pytest", "-p", "no:xdist", "tests/examples/verl_cases.py")


def test_without_verl_one_sentence_says_what_to_install():
    hidden = "import sys; sys.modules['verl'] = None; import examples.verl_paw"
    said = python("-c", hidden, code=1).stderr
    assert said.startswith("error: verl ") and "pip install" in said and said.count("\n") == 1
