"""gpupipe tune: the search finds what is planted, within its time; the real loaders run."""

import json
import time

import numpy as np
import pytest
import torch

import gpupipe as gp
from gpupipe.cli import main
from gpupipe.errors import ConfigError, SourceError
from gpupipe.measure import tuning
from gpupipe.measure.batches import rows_of
from gpupipe.measure.tuning import _Search, load_options, rule_of_thumb
from gpupipe.measure.usage import Tree
from gpupipe.parallel import usable_cores

RECIPE = gp.Recipe.train(size=16)


class Planted:
    """A machine on which each of the settings has its speed, a little noise, and its memory; its clock is its own."""

    def __init__(self, monkeypatch, images_per_s, *, noise=0.02, memory_mb=100.0):
        self.images_per_s, self.noise, self.memory_mb = images_per_s, noise, memory_mb
        self.now, self.rng = 0.0, np.random.default_rng(0)
        monkeypatch.setattr(tuning, "_clock", lambda: self.now)
        monkeypatch.setattr(tuning, "_rate", self.rate)

    def rate(self, _make, settings, seconds, deadline, _tree):
        self.now = min(self.now + 0.1 + seconds, max(deadline, self.now + 0.1))
        memory = self.memory_mb(settings) if callable(self.memory_mb) else self.memory_mb
        return self.images_per_s(settings) * self.rng.normal(1, self.noise), memory

    def run(self, candidates, *, seconds=60.0, target=None, memory_mb=None):
        return _Search(None, seconds, target, memory_mb, lambda _: None).run(candidates)


def threads(*counts):
    return [{"threads": count} for count in counts]


@pytest.mark.parametrize("seconds", [5, 60, 180])
def test_tune_finds_the_fastest_within_its_time(monkeypatch, seconds):
    planted = Planted(monkeypatch, lambda settings: {1: 300, 2: 600, 4: 1500, 8: 700}[settings["threads"]])
    report = planted.run(threads(2, 1, 4, 8, 2), seconds=seconds)
    assert planted.now <= seconds
    assert report.settings == {"threads": 4}
    assert report.default == {"threads": 2}
    assert report.gain == pytest.approx(2.5, rel=0.2)
    assert report.spread[0] <= report.gain <= report.spread[1]
    assert report.trials[0].why_out == ""
    assert [trial.settings["threads"] for trial in report.trials] == [4, 8, 2, 1]


def test_tune_stops_early_where_there_is_no_time(monkeypatch):
    planted = Planted(monkeypatch, lambda settings: 100 * settings["threads"])
    report = planted.run(threads(*range(1, 40)), seconds=4)
    assert planted.now <= 5
    assert len(report.trials) < 10


def test_tune_measures_the_better_half_longer(monkeypatch):
    planted = Planted(monkeypatch, lambda settings: 100 * settings["threads"])
    report = planted.run(threads(*range(1, 9)))
    measured = {trial.settings["threads"]: len(trial.images_per_s) for trial in report.trials}
    assert measured[8] > measured[4] >= measured[1] == 1


def test_tune_to_a_target_takes_the_cheapest_that_covers_it(monkeypatch):
    planted = Planted(monkeypatch, lambda settings: 250 * settings["threads"])
    assert planted.run(threads(4, 1, 2, 8), target=400).settings == {"threads": 2}
    assert planted.run(threads(4, 1, 2, 8), target=490).settings == {"threads": 4}  # 500 leaves no reserve


def test_tune_to_a_target_that_is_out_of_reach_takes_the_fastest(monkeypatch):
    planted = Planted(monkeypatch, lambda settings: 250 * settings["threads"])
    assert planted.run(threads(2, 1, 4), target=1e6).settings == {"threads": 4}


def test_tune_takes_the_cheaper_of_two_that_are_alike(monkeypatch):
    speeds = {1: 200, 2: 1000, 8: 1005}
    planted = Planted(monkeypatch, lambda settings: speeds[settings["threads"]], noise=0.05)
    report = planted.run(threads(8, 2, 1))
    assert report.settings == {"threads": 2}
    assert report.gain == pytest.approx(1, rel=0.15)


def test_tune_keeps_to_the_memory_it_may_have(monkeypatch):
    planted = Planted(
        monkeypatch, lambda settings: 250 * settings["threads"], memory_mb=lambda settings: 100.0 * settings["threads"]
    )
    report = planted.run(threads(2, 1, 4, 8), memory_mb=450)
    assert report.settings == {"threads": 4}
    assert next(trial for trial in report.trials if trial.settings == {"threads": 8}).why_out.startswith("took 800 MB")
    with pytest.raises(ConfigError, match="no settings are left"):
        planted.run(threads(2, 1), memory_mb=50)


def test_rate_counts_the_images_behind_the_start_and_closes():
    closed = []

    def make(settings):
        def batches():
            time.sleep(0.3)  # the start
            for _ in range(200):
                time.sleep(0.01)
                yield [torch.zeros(10, 1)]

        return _Epochs(batches), lambda: closed.append(settings)

    rate, _ = tuning._rate(make, {"a": 1}, 0.3, time.perf_counter() + 60, Tree())
    assert 0 < rate <= 1000
    assert closed == [{"a": 1}]


class _Epochs:
    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        return self._batches()


def test_tune_of_a_loader_without_batches_is_a_config_error():
    with pytest.raises(ConfigError, match="gives no batches"):
        tuning._rate(lambda _: ([], lambda: None), {}, 0.1, time.perf_counter() + 60, Tree())


def test_tune_of_a_data_set_gives_options_that_a_loader_takes(image_folder, tmp_path):
    report = gp.tune(image_folder, RECIPE, batch_size=4, seconds=4)
    assert report.backend in ("numba", "torchvision")
    saved = report.save(tmp_path / "options.json")
    options = gp.load_options(saved)
    assert options == report.options
    with gp.Loader(image_folder, RECIPE, batch_size=4, backend=report.backend, options=options) as loader:
        assert len(list(loader)) == len(loader)
    assert f"{report.gain:.2f} times the default" in report.table()


def test_tune_of_a_data_loader_passes_its_settings_on():
    seen = []

    def make(**settings):
        seen.append(settings)
        settings = settings | {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False}
        return torch.utils.data.DataLoader(torch.zeros(64, 3), batch_size=8, **settings)

    report = gp.tune(make, seconds=3)
    assert set(report.settings) == {"num_workers", "prefetch_factor", "pin_memory", "persistent_workers"}
    assert seen[0] == rule_of_thumb(usable_cores())
    assert report.backend is None
    with pytest.raises(ConfigError, match="a DataLoader's"):
        _ = report.options


@pytest.mark.parametrize(("cores", "workers"), [(1, 1), (2, 1), (8, 4), (16, 8), (32, 8), (64, 16)])
def test_rule_of_thumb_by_cores(cores, workers):
    assert rule_of_thumb(cores)["num_workers"] == workers


@pytest.mark.parametrize(
    "text", ["", "{}", '{"version": 2, "settings": {}}', '{"version": 1, "settings": {"num_workers": 1}}',
             '{"version": 1, "settings": {"backend": "numba", "threads": -1}}', "[]"],
)  # fmt: skip
def test_load_options_of_something_else_is_a_source_error(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(SourceError, match="no options"):
        load_options(path)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [({"seconds": 0.5}, "seconds"), ({"images_per_s": -1}, "images_per_s"), ({"memory_mb": 0}, "memory_mb")],
)
def test_tune_wrong_arguments_are_config_errors(image_folder, arguments, field):
    with pytest.raises(ConfigError) as caught:
        gp.tune(image_folder, RECIPE, **arguments)
    assert caught.value.field == field


def test_tune_command_saves_what_it_found(image_folder, tmp_path, capsys):
    saved = tmp_path / "options.json"
    arguments = ["tune", str(image_folder), "--seconds", "3", "--batch-size", "4", "--size", "16"]
    picture = tmp_path / "tune.png"
    assert main([*arguments, "--save", str(saved), "--plot", str(picture), "--json"]) == 0
    assert picture.stat().st_size > 1000
    report = json.loads(capsys.readouterr().out)
    assert load_options(saved).threads == report["settings"]["threads"]


def test_rows_of_views_are_images_and_not_views():
    assert rows_of((tuple(torch.zeros(8, 3) for _ in range(3)), torch.zeros(8))) == 8
