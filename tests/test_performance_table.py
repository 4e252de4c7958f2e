"""The table of targets: figures come from results, what is missing is said to be, and verdicts are right."""

import importlib
import json

import pytest

from tests.conftest import REPO


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """The script, on results of the test's own."""
    monkeypatch.syspath_prepend(str(REPO / "benchmarks"))
    module = importlib.import_module("performance_table")
    monkeypatch.setattr(module.readme_tables, "RESULTS", tmp_path)
    return module


@pytest.fixture
def write(tmp_path):
    def write(name, measured):
        (tmp_path / f"{name}.json").write_text(json.dumps({"measured": measured}))

    return write


def lines(text, begin):
    return [line for line in text.splitlines() if line.startswith(f"| {begin}")]


def test_performance_table_without_results_has_no_figure_and_says_what_measures_it(tables):
    for rows in tables.LISTS.values():
        for target in rows:
            what, _, measured, script = target.row()
            assert measured == "missing", what
            assert (REPO / "benchmarks" / script.strip("`")).is_file(), script
    assert "missing" in tables.targets()
    assert "met" not in tables.whole()


def test_performance_table_compares_with_the_bound_in_its_own_sense(tables, write):
    write("plan", {"plans_per_s": {"train with jitter, batch 256": 149_999}, "whole_epochs_plans_per_s": {}})
    write("resume", {"samples": {"10000000": {"above_fresh_s": {"a": 0.02, "b": 0.1}}}})
    text = tables.table(["", "", "", ""], [target.row() for target in tables.SCALE])
    assert lines(text, "plans a second, batch 256") == [
        "| plans a second, batch 256, with jitter | at least 150,000 | 149,999 | **not met** |"
    ]
    assert lines(text, "resume anywhere in 10,000,000")[0].endswith("| at most 0.1 s | 0.1 s | met |")
    assert "missing" in lines(text, "resume anywhere in 1,281,167")[0]


def test_performance_table_has_every_peer_with_its_measured_ratio_or_missing(tables, write):
    recipes = {name: {"SPDL, threads": {"ratio": 1.234}, "missing": {"FFCV, JPEG": "why"}} for name in tables.RECIPES}
    write("cpu", {"recipes": recipes})
    text = tables.peers()
    assert lines(text, "SPDL") == ["| SPDL, threads | 1.23 (1.00) | 1.23 (0.87) | 1.23 (1.06) |"]
    assert lines(text, "litData") == ["| litData | missing (0.91) | missing (1.02) | missing (1.01) |"]
    assert "FFCV, JPEG did not take part: why" in text


def test_performance_table_of_the_results_that_are_there_can_be_made(tables, monkeypatch):
    monkeypatch.setattr(tables.readme_tables, "RESULTS", REPO / "benchmarks" / "results")
    text = tables.whole()
    for recipe_target in (2.5, 3.5, 2.6):
        assert f"of {recipe_target}: " in text
