"""gpupipe bench: who takes part, what comes out, and what is said of those who cannot."""

import gc
import json
import sys
from contextlib import ExitStack

import numpy as np
import pytest
import torch
from PIL import Image

import gpupipe as gp
from gpupipe.cli import main
from gpupipe.errors import BackendUnavailable, ConfigError, SourceError
from gpupipe.measure import usage
from gpupipe.measure.peers import PEERS, Work
from gpupipe.sources import open_source
from gpupipe.sources.folder import ImageFolder
from tests.available import need

RECIPE = gp.Recipe.train(size=16, jitter=(0.2, 0.2, 0.2, 0.1))


def short(target, **arguments):
    return gp.bench(target, RECIPE, **({"batch_size": 4, "rounds": 2, "workers": 1} | arguments))


@pytest.fixture(scope="module")
def report(image_folder):
    return short(image_folder, backends=("torchvision", "numba:cpu"), against=("torchvision", "torchvision-tensors"))


def test_bench_measures_every_contestant_in_every_round(report, image_folder):
    names = ["gpupipe torchvision", "gpupipe numba:cpu", "torchvision", "torchvision-tensors"]
    assert [each.name for each in report.figures] == names
    source = open_source(image_folder)
    for each in report.figures:
        assert len(each.times_s) == 2
        for times in each.times_s:
            assert len(times) == -(-len(source) // 4)
            assert times == sorted(times)
        median = np.median([times[-1] for times in each.times_s])
        assert each.images_per_s == pytest.approx(len(source) / median)
        stored = sum(len(source[index].data) for index in range(len(source)))
        assert each.mb_per_s == pytest.approx(stored / 1e6 / median)
        assert each.first_batch_s > 0
        assert list(each.batch_ms) == ["50", "90", "99"]


def test_bench_ratios_are_to_the_first_peer(report):
    speeds = {each.name: each.images_per_s for each in report.figures}
    for each in report.figures:
        assert each.ratio == pytest.approx(each.images_per_s / speeds["torchvision"])


def test_bench_as_json_is_strict_and_holds_the_machine(report):
    def refuse(name):
        raise AssertionError(name)

    found = json.loads(report.to_json(), parse_constant=refuse)
    assert found["machine"]["torch"]
    assert len(found["figures"]) == 4


def test_bench_table_has_a_line_for_each_and_warns_of_short_rounds(report):
    text = report.table()
    for each in report.figures:
        assert f"\n{each.name} " in text
    assert "take more images" in text


def test_bench_plot_is_a_picture(report, tmp_path):
    path = report.plot(tmp_path / "bench.png")
    with Image.open(path) as image:
        assert min(image.size) > 300
        assert len(np.unique(np.asarray(image.convert("RGB")).reshape(-1, 3), axis=0)) > 20


def test_bench_takes_no_more_images_than_asked_for_and_the_same_for_all(image_folder):
    report = short(image_folder, backends=("torchvision",), images=5, rounds=1)
    assert report.images == 5
    assert len(report.figures[0].times_s[0]) == 2
    assert report.figures[0].ratio == 1.0


# Pixels that are not torchvision's: sides are rounded otherwise, so that crops are off by a pixel, and FFCV encodes the
# images again and resizes without antialias.
OTHER_PIXELS = ("dali-native", "ffcv")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_peer_yields_images_like_the_loader(peer, workers, image_folder):
    if peer == "dali-native":
        need("dali")
    source = open_source(image_folder)
    work = Work(source, list(range(12)), gp.Recipe.eval(size=16, resize=20), 3, workers)
    with ExitStack() as stack, gp.Loader(source, work.recipe, batch_size=12, backend="torchvision") as loader:
        try:
            epochs = PEERS[peer](work, stack)
        except BackendUnavailable as error:
            pytest.skip(str(error))
        batches = [images.cpu().clone() for images, *_ in epochs]
        again = sum(len(images) for images, *_ in epochs)
        expected = next(iter(loader))[0]
    del epochs
    gc.collect()  # numba complains about the functions that FFCV compiled: here, and not in the next test
    assert again == 12
    assert {tuple(batch.shape) for batch in batches} == {(3, 3, 16, 16)}
    found = torch.cat(batches)
    if peer == "webdataset" and workers == 2:  # each process reads every second sample, and they take turns
        found = found.reshape(2, 2, 3, 3, 16, 16).permute(0, 2, 1, 3, 4, 5).reshape(12, 3, 16, 16)
    levels = (found - expected).abs() * 255 * 0.22
    assert levels.mean() < 15 if peer in OTHER_PIXELS else levels.max() < 1.1


@pytest.mark.parametrize(
    ("peer", "module"), [("spdl", "spdl.pipeline"), ("webdataset", "webdataset"), ("ffcv", "ffcv.fields")]
)
def test_peer_that_is_not_installed_is_listed_with_what_to_install(peer, module, image_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    report = short(image_folder, backends=("torchvision",), against=(peer,), rounds=1, images=4)
    assert f"{module} cannot be imported" in report.missing[peer]
    assert "pip install" in report.missing[peer]


def test_bench_lists_who_cannot_take_part_and_why(tmp_path):
    (tmp_path / "a").mkdir()
    Image.new("RGB", (20, 20)).save(tmp_path / "a" / "1.png")
    recipe = gp.Recipe.from_json(
        gp.Recipe.train(size=16).to_json().replace('"RandomHorizontalFlip"', '"RandomVerticalFlip"')
    )
    report = gp.bench(tmp_path, recipe, backends=("torchvision",), against=("dali-native",), rounds=1, workers=1)
    assert [each.name for each in report.figures] == ["gpupipe torchvision"]
    assert set(report.missing) == {"dali-native"}
    assert "dali-native did not take part" in report.table()


def test_bench_of_pixels_counts_their_bytes_and_says_who_decodes_files(tmp_path):
    np.save(tmp_path / "images.npy", np.zeros((8, 20, 30, 3), np.uint8))
    report = short(tmp_path / "images.npy", backends=("torchvision",), against=tuple(PEERS), rounds=1)
    (ours,) = report.figures
    assert ours.mb_per_s == pytest.approx(8 * 20 * 30 * 3 / 1e6 / ours.times_s[0][-1])
    assert set(report.missing) == set(PEERS)
    assert "holds pixels" in report.missing["torchvision"]


def test_bench_of_a_store_leaves_dali_out(image_folder, tmp_path):
    pytest.importorskip("lmdb", reason="lmdb is not installed")
    gp.pack(image_folder, tmp_path / "packed", format="lmdb")
    report = short(tmp_path / "packed", backends=("torchvision",), against=("dali-native",), rounds=1)
    assert "dali-native" in report.missing


def test_bench_closes_what_it_opened_alone(image_folder, monkeypatch):
    closed = []
    monkeypatch.setattr(ImageFolder, "close", lambda self: closed.append(self))
    given = open_source(image_folder)

    def broken(*_):
        raise ConfigError("broken")

    monkeypatch.setattr(sys.modules["gpupipe.measure.bench"], "_run", broken)
    with pytest.raises(ConfigError, match="broken"):
        short(given, backends=("torchvision",))
    assert closed == []
    with pytest.raises(ConfigError, match="broken"):
        short(image_folder, backends=("torchvision",))
    assert len(closed) == 1


def test_bench_without_psutil_says_so(image_folder, monkeypatch):
    monkeypatch.setattr(usage.Tree, "__init__", lambda self: setattr(self, "_psutil", None))
    report = short(image_folder, backends=("torchvision",), rounds=1, images=4)
    assert report.figures[0].cpu_cores is None
    assert "psutil is not installed" in report.table()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rounds": 0}, "rounds=0"),
        ({"images": -1}, "images=-1"),
        ({"batch_size": 1.5}, "batch_size=1.5"),
        ({"workers": 0}, "workers=0"),
        ({"against": ("litdata",)}, "against='litdata' is not known: there are torchvision"),
        ({"backends": ("cuda",)}, "cuda"),
        ({"backends": ()}, "nothing to measure"),
        ({"backends": ("torchvision", "numbah"), "against": ("torchvision",)}, "backend='numbah' is not valid"),
    ],
)
def test_bench_with_wrong_argument_raises(image_folder, wrong, said):
    with pytest.raises(ConfigError, match=said):
        short(image_folder, **({"backends": ("torchvision",)} | wrong))


def test_bench_of_a_bad_file_names_it(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(b"no image")
    with pytest.raises(SourceError, match=r"1\.jpg"):
        short(tmp_path, backends=("torchvision",))


def test_bench_command_prints_and_draws(image_folder, tmp_path, capsys):
    common = ["bench", str(image_folder), "--size", "16", "--backend", "torchvision", "--rounds", "1", "--images", "6"]
    picture = tmp_path / "out.png"
    assert main([*common, "--against", "", "--plot", str(picture)]) == 0
    shown = capsys.readouterr()
    assert "gpupipe torchvision" in shown.out
    assert "round 1 of 1" in shown.err
    assert picture.stat().st_size > 1000
    assert main([*common, "--against", "", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["images"] == 6
    assert main([*common, "--against", "nothing"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "folder.png").mkdir()
    for place in (tmp_path / "folder.png", tmp_path / "none" / "x.png", tmp_path / "x.foo"):
        assert main([*common, "--against", "", "--plot", str(place)]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith(f"gpupipe: cannot write the picture to {place}: ")
