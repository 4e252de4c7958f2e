"""The benchmarks' shared helper: what it times, and that it hides no failure."""

import importlib.util
import json
import time

import pytest

from tests.conftest import REPO


@pytest.fixture
def harness(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("harness", REPO / "benchmarks" / "harness.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    return module


def test_interleaved_takes_turns_and_counts_no_warm_up(harness):
    calls = []
    times = harness.interleaved({"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}, rounds=3, warm_up=1)
    assert "".join(calls) == "ba" + "ab" + "ba" + "ab"
    assert [times[name]["rounds"] for name in "ab"] == [3, 3]


def test_interleaved_measures_seconds(harness):
    times = harness.interleaved({"sleep": lambda: time.sleep(0.01)}, rounds=3)
    assert 0.01 <= times["sleep"]["min_s"] <= times["sleep"]["median_s"]


def test_summary_of_known_times(harness):
    assert harness.summary([1.0, 2.0, 3.0, 4.0, 5.0]) == {"median_s": 3.0, "iqr_s": 2.0, "min_s": 1.0, "rounds": 5}


def test_interleaved_passes_a_failure_on(harness):
    with pytest.raises(ZeroDivisionError):
        harness.interleaved({"fails": lambda: 1 / 0}, rounds=1)


def test_write_result_is_strict_json_with_versions_and_without_host_names(harness, capsys):
    path = harness.write_result("example", {"median_s": 0.5})
    result = json.loads(path.read_text())
    assert json.loads(capsys.readouterr().out) == result
    assert result["measured"] == {"median_s": 0.5}
    assert {"cpu", "cores", "python", "torch", "torchvision", "dali", "numpy", "pillow"} <= set(result["machine"])
    assert not {"host", "hostname", "node", "user"} & set(result["machine"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_write_result_of_nan_raises_and_writes_nothing(harness, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        harness.write_result("example", {"median_s": value})
    assert not (harness.RESULTS / "example.json").exists()
