"""A test that something missing skips: the run passes on a machine of one's own, and fails in CI.

    python -m pytest tests/test_skips.py
"""

import pytest

from tests import conftest

pytest_plugins = "pytester"  # pytest inside pytest, on files of its own

ONE_TEST = """
import pytest

def test_page():
    pytest.skip("needs a browser: apt-get install chromium")
"""
WHOLE_FILE = """
import pytest

pytest.importorskip("no_such_package")
"""
SENTENCE = "Failed: with CI=true no test may be skipped: test_it.py"


@pytest.fixture
def run(pytester, monkeypatch):
    """A function (value of CI, content of test_it.py) -> the result of pytest with our hooks."""

    def run(ci: str, content: str):
        monkeypatch.setenv("CI", ci)
        pytester.makepyfile(test_it=content, test_other="def test_passes(): pass")
        # A second faulthandler would end that of the session.
        return pytester.runpytest_inprocess("-rs", "-p", "no:faulthandler", plugins=[conftest])

    return run


def test_elsewhere_a_skip_passes_with_its_reason(run):
    result = run("", ONE_TEST)
    assert result.ret == 0
    result.stdout.fnmatch_lines("*needs a browser: apt-get install chromium")


@pytest.mark.parametrize("content, name", [(ONE_TEST, "::test_page"), (WHOLE_FILE, "")])
def test_in_ci_a_skip_fails_by_name(run, content, name):
    result = run("true", content)
    assert result.ret == 1
    result.stdout.fnmatch_lines(SENTENCE + name)
