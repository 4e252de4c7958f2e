"""gpupipe profile: it finds what was made slow."""

import json
import time

import pytest
import torch
from torch.utils.data import DataLoader

import gpupipe as gp
from gpupipe.cli import main
from gpupipe.errors import ConfigError
from gpupipe.measure.profiling.three_steps import _verdict
from gpupipe.sources import open_source

RECIPE = gp.Recipe.train(size=16, jitter=(0.2, 0.2, 0.2, 0.1))
SHORT = {"seconds": 0.1, "batch_size": 4, "backend": "torchvision"}


class SlowSource:
    """A folder whose reads take their time."""

    def __init__(self, source, read_s):
        self._source, self._read_s = source, read_s

    def __getattr__(self, name):
        return getattr(self._source, name)

    def __len__(self):
        return len(self._source)

    def __getitem__(self, index):
        time.sleep(self._read_s)
        return self._source[index]

    uri = property(lambda self: self._source.uri)
    fingerprint = property(lambda self: self._source.fingerprint)
    columns = property(lambda self: self._source.columns)
    labels = property(lambda self: self._source.labels)

    def close(self):
        self._source.close()


def test_profile_without_a_step_measures_pipeline_and_stages(image_folder):
    report = gp.profile(image_folder, RECIPE, **SHORT)
    assert report.bound == "unknown"
    assert (report.step_ms, report.both_ms, report.at_best) == (None, None, None)
    assert [stage.name for stage in report.stages] == ["read", "header", "plan", "decode", "resize", "augment"]
    assert sum(stage.share for stage in report.stages) == pytest.approx(1)
    assert all(speed > 0 for stage in report.stages for speed in stage.images_per_s.values())
    assert report.limiting in {stage.name for stage in report.stages}
    assert "stage alone" in report.table()


def test_profile_of_a_recipe_without_colour_has_no_such_stage(image_folder):
    report = gp.profile(image_folder, gp.Recipe.eval(size=16, resize=18), **SHORT)
    assert [stage.name for stage in report.stages] == ["read", "header", "plan", "decode", "resize"]


def test_profile_names_reading_where_reads_are_slow(image_folder):
    report = gp.profile(SlowSource(open_source(image_folder), 0.05), RECIPE, **SHORT)
    assert report.limiting == "read"
    read = report.stages[0]
    assert read.images_per_s["1"] < 1.2 / 0.05  # one that ends as the clock starts may be counted


def test_profile_of_a_slow_step_is_bound_by_it(image_folder):
    batches = []

    def step(batch):
        batches.append(batch)
        time.sleep(0.3)

    report = gp.profile(image_folder, RECIPE, step=step, **SHORT)
    assert report.bound in ("step", "contention")  # the latter on a machine that is busy otherwise
    assert report.step_ms["50"] >= 300
    assert report.both_ms["50"] >= 300
    assert 1 <= report.at_best < 2
    assert batches[0][0].shape == (4, 3, 16, 16)


def test_profile_of_slow_data_is_bound_by_them(image_folder):
    source = SlowSource(open_source(image_folder), 0.1)
    report = gp.profile(source, RECIPE, step=lambda _: time.sleep(0.001), **SHORT | {"seconds": 0.5})
    assert report.bound in ("data", "contention")
    assert report.at_best > 5


def test_profile_takes_any_loader():
    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 12

        def __getitem__(self, index):
            time.sleep(0.02)
            return torch.zeros(3, 4, 4), index

    report = gp.profile(DataLoader(Slow(), batch_size=4), step=lambda _: None, seconds=0.2)
    assert report.stages == ()
    assert report.bound in ("data", "contention")
    assert report.pipeline_ms["50"] >= 80
    assert report.batch_size == 4


def test_profile_of_views_counts_images_and_not_views(image_folder):
    with gp.Loader(image_folder, gp.Views(RECIPE, RECIPE), batch_size=4, backend="torchvision") as each:
        assert gp.profile(each, seconds=0.1).batch_size == 4


def test_profile_leaves_a_loader_open(image_folder):
    with gp.Loader(image_folder, RECIPE, batch_size=4, backend="torchvision") as loader:
        gp.profile(loader, seconds=0.1)
        assert len(list(loader)) == len(loader)


@pytest.mark.parametrize(
    ("pipeline", "alone", "both", "bound"),
    [(50, 100, 104, "step"), (100, 50, 105, "data"), (100, 90, 180, "contention"), (50, 100, 160, "contention")],
)
def test_profile_verdict_follows_from_the_three_times(pipeline, alone, both, bound):
    found, at_best, text = _verdict({"mean": pipeline}, {"mean": alone}, {"mean": both}, "decode")
    assert found == bound
    assert at_best == pytest.approx(both / alone)
    assert f"{at_best:.2f} times" in text


def test_profile_command_prints_and_draws(image_folder, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "profile.png"
    arguments = ["profile", str(image_folder), "--seconds", "0.1", "--batch-size", "4", "--size", "16"]
    assert main([*arguments, "--backend", "torchvision", "--plot", str(picture), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bound"] == "unknown"
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"seconds": 0}, "seconds"),
        ({"batch_size": 0}, "batch_size"),
        ({"step": "vgg"}, "step"),
        ({"images": 0}, "images"),
    ],
)
def test_profile_wrong_arguments_are_config_errors(image_folder, arguments, field):
    with pytest.raises(ConfigError) as caught:
        gp.profile(image_folder, RECIPE, **SHORT | arguments)
    assert caught.value.field == field


def test_profile_of_a_loader_with_a_recipe_is_a_config_error(image_folder):
    with gp.Loader(image_folder, RECIPE, batch_size=4, backend="torchvision") as loader:
        with pytest.raises(ConfigError, match="has its own"):
            gp.profile(loader, RECIPE)
