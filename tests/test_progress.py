"""How far a run is, on stderr and nowhere else."""

import sys

import pytest

from gpupipe import progress
from gpupipe.progress import progress_bar


def test_progress_that_is_not_shown_writes_nothing(capsys):
    with progress_bar(10, "packing", show=False) as count:
        count(10)
    assert capsys.readouterr() == ("", "")


def test_progress_with_tqdm_is_on_stderr(capsys):
    pytest.importorskip("tqdm")
    with progress_bar(10, "packing", show=True, done=4) as count:
        count(6)
    found = capsys.readouterr()
    assert found.out == ""
    assert "packing" in found.err
    assert "4/10" in found.err


def test_progress_without_tqdm_is_a_line_now_and_then(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    with progress_bar(10, "packing", show=True, done=4) as count:
        count(1)
        count(5)
    assert capsys.readouterr() == ("", "packing: 5 of 10\npacking: 10 of 10\n")
