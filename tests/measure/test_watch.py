"""gpupipe.watch: what it measures, what it leaves alone, and what it costs."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

import gpupipe as gp
from gpupipe.errors import ConfigError, SourceError
from gpupipe.measure.gauges import Meter
from gpupipe.measure.watch_log import read_log

BATCHES = [torch.zeros(4, 3)] * 6


class Slow:
    """Batches that take their time."""

    batch_size = 4

    def __init__(self, wait_s, batches=6):
        self.wait_s, self.batches = wait_s, batches

    def __len__(self):
        return self.batches

    def __iter__(self):
        for _ in range(self.batches):
            time.sleep(self.wait_s)
            yield torch.zeros(4, 3)


def test_watch_passes_every_batch_on_and_tells_waits_from_steps(tmp_path):
    log = tmp_path / "run.jsonl"
    with gp.watch(Slow(0.03), every=0, log=log, resources_s=0.01) as watched:
        assert len(watched) == 6
        for _ in range(2):
            for batch in watched:
                assert batch.shape == (4, 3)
                time.sleep(0.01)
        report = watched.report()
    assert (report.steps, report.samples, report.epochs) == (12, 48, 2)
    steps = read_log(log).steps
    assert (steps["wait_s"] >= 0.03).all()
    assert (steps["step_s"] >= 0.01).all()
    assert (steps["step_s"] < steps["wait_s"]).mean() > 0.5  # a busy machine may delay some
    assert steps["epoch"].tolist() == [0] * 6 + [1] * 6
    assert steps["step"].tolist() == [*range(6), *range(6)]
    assert 0.5 < report.waited < 1
    assert "waited for data" in str(report)


def test_watch_log_holds_who_and_how(tmp_path):
    log = tmp_path / "rank-{rank}.jsonl"
    loader = DataLoader(torch.zeros(8, 3), batch_size=4, pin_memory=False, drop_last=True)
    with gp.watch(loader, every=0, log=log) as watched:
        list(watched)
    found = read_log(tmp_path / "rank-0.jsonl")
    assert found.finished
    assert found.loader["kind"] == "DataLoader"
    assert found.loader["batch_size"] == 4
    assert found.loader["workers"] == 0
    assert found.loader["drop_last"] is True
    assert found.loader["sampler"] == "SequentialSampler"
    assert found.begin["world_size"] == 1
    assert len(found.resources["t"]) >= 1


def test_watch_log_of_a_killed_run_is_read_up_to_its_last_whole_line(tmp_path):
    log = tmp_path / "run.jsonl"
    with gp.watch(BATCHES, every=0, log=log) as watched:
        list(watched)
    text = log.read_text()
    lines = text.splitlines(keepends=True)
    assert json.loads(lines[-1])["event"] == "end"
    log.write_text("".join(lines[:-2]) + lines[-2][:20])
    found = read_log(log)
    assert not found.finished
    assert 4 <= len(found.steps["t"]) <= 6


@pytest.mark.parametrize(
    "text", ["", "{}\n", "nonsense\n", '{"event": "step"}\n', '{"event": "begin", "version": 99}\n', "[1]\n"]
)
def test_read_log_of_something_else_is_a_source_error(tmp_path, text):
    path = tmp_path / "x"
    path.write_text(text)
    with pytest.raises(SourceError, match=r"no log of gpupipe\.watch"):
        read_log(path)


def test_watch_ends_its_thread_and_may_be_closed_twice():
    watched = gp.watch(BATCHES, every=0, resources_s=0.01)
    list(watched)
    assert any(thread.name == "gpupipe-watch" for thread in threading.enumerate())
    watched.close()
    watched.close()
    assert not any(thread.name == "gpupipe-watch" for thread in threading.enumerate())
    with pytest.raises(ConfigError, match="closed"):
        next(iter(watched))


def test_watch_says_a_line_every_so_often():
    lines = []
    with gp.watch(BATCHES, every=3, say=lines.append) as watched:
        list(watched)
        list(watched)
    assert len(lines) == 4
    assert lines[0].startswith("step 3: ")


def test_watch_passes_errors_and_early_ends_on():
    def failing():
        yield torch.zeros(1)
        raise RuntimeError("from the loader")

    with gp.Watch(every=0) as watch, pytest.raises(RuntimeError, match="from the loader"):
        list(watch(failing()))
    with gp.watch(BATCHES, every=0) as watched:
        for number, _ in enumerate(watched):
            if number == 2:
                break
        assert watched.report().steps == 2  # the one that was left by break has no end


def test_watched_loader_is_asked_for_all_else():
    loader = Slow(0.0)
    watched = gp.watch(loader, every=0)
    assert watched.batch_size == 4
    with pytest.raises(AttributeError):
        _ = watched.no_such_thing
    with pytest.raises(ConfigError, match="no step was seen"):
        watched.report()
    watched.close()


def test_watch_takes_the_costs_that_it_is_told():
    with gp.watch(BATCHES, every=0, cost=lambda batch: (100 * len(batch), 7)) as watched:
        list(watched)
        steps = watched.report().log.steps
    assert steps["bytes"].tolist() == [400.0] * 6
    assert steps["pixels"].tolist() == [7.0] * 6


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("every", -1),
        ("every", 1.5),
        ("resources_s", 0),
        ("resources_s", "1"),
        ("resources_s", float("inf")),
        ("global_batch_size", "64"),
    ],
)
def test_watch_wrong_arguments_are_config_errors(name, value):
    with pytest.raises(ConfigError) as caught:
        gp.watch(BATCHES, **{name: value})
    assert caught.value.field == name


def test_watch_log_that_cannot_be_written_is_a_source_error(tmp_path):
    with pytest.raises(SourceError, match="cannot write the log"):
        gp.watch(BATCHES, log=tmp_path / "nowhere" / "x.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_watch_goes_on_when_the_disk_of_the_log_is_full():
    lines = []
    with gp.watch(BATCHES, every=0, log="/dev/full", say=lines.append, resources_s=0.01) as watched:
        assert len(list(watched)) == len(BATCHES)
    assert watched.report().steps == len(BATCHES)
    assert [line for line in lines if "ends here" in line] == lines
    assert len(lines) == 1


@pytest.mark.parametrize("told", [3, ("many", 1), (1, 2, 3), None])
def test_watch_costs_that_are_none_are_a_config_error(told):
    with gp.watch(BATCHES, every=0, cost=lambda _: told) as watched, pytest.raises(ConfigError, match="cost"):
        list(watched)


def test_watch_costs_may_be_numbers_of_numpy(tmp_path):
    with gp.watch(BATCHES, every=0, log=tmp_path / "x", cost=lambda _: (np.int64(3), None)) as watched:
        list(watched)
    assert read_log(tmp_path / "x").steps["bytes"].tolist() == [3.0] * len(BATCHES)


@pytest.mark.parametrize(
    ("event", "name", "value"),
    [
        ("begin", "rank", []),
        ("begin", "cores", "x"),
        ("begin", "loader", 3),
        ("step", "wait_s", {}),
        ("step", "epoch", float("nan")),
        ("resources", "t", "x"),
        ("types", "bytes", None),
    ],
)
def test_log_with_a_wrong_value_is_a_source_error(tmp_path, event, name, value):
    path = tmp_path / "x"
    with gp.watch(BATCHES, every=0, log=path, trace_memory=True) as watched:
        list(watched)
    found = [json.loads(line) for line in path.read_text().splitlines()]
    next(one for one in found if one["event"] == event)[name] = value
    path.write_text("".join(json.dumps(one) + "\n" for one in found))
    with pytest.raises(SourceError, match=r"no log of gpupipe\.watch"):
        gp.diagnose(path)


def test_meter_sees_memory_files_and_threads_grow(tmp_path):
    pytest.importorskip("psutil")
    meter = Meter()
    before = meter.look()
    ballast = torch.ones(400_000_000 // 4)  # more than what others free meanwhile
    files = [(tmp_path / str(number)).open("w") for number in range(5)]
    stop = threading.Event()
    threads = [threading.Thread(target=stop.wait) for _ in range(3)]
    for thread in threads:
        thread.start()
    after = meter.look()
    stop.set()
    for file in files:
        file.close()
    assert after.host_bytes - before.host_bytes > 0.8 * ballast.nbytes
    assert after.files - before.files >= 5
    assert after.threads - before.threads >= 3
