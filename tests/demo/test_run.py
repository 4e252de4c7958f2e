"""The demo from beginning to end, small."""

import pytest
from PIL import Image

from gpupipe import backends, cli
from gpupipe.demo import demo, pictures, run
from gpupipe.errors import BackendUnavailable, ConfigError, GpupipeError
from tests import images

needs_pictures = pytest.mark.skipif(len(pictures.shipped()) < 3, reason="needs scikit-image or scikit-learn")


@pytest.fixture
def torchvision_only(monkeypatch):
    """A machine without DALI, and no worker processes, so that the demo is quick."""
    choose = backends.choose

    def choose_torchvision(name, device=None):
        if name == "dali":
            raise BackendUnavailable("DALI is not installed: pip install nvidia-dali-cuda120", backend="dali")
        return choose("torchvision", device)

    monkeypatch.setattr(backends, "choose", choose_torchvision)
    monkeypatch.setattr(run.speed, "PLAIN_WORKERS", 0)


@needs_pictures
@pytest.mark.usefixtures("torchvision_only")
def test_demo_makes_loads_compares_and_shows(tmp_path):
    said = []
    done = demo(out=tmp_path / "out", images=17, say=said.append)
    assert done.ok
    assert [path.name for path in done.written] == ["parity-torchvision.html", "train.png", "eval.png"]
    assert all(rate > 0 for rate in done.images_per_second.values())
    assert any("DataLoader" in name for name in done.images_per_second)
    text = "\n".join(said)
    assert "DALI is not installed" in text
    assert "PASS" in text
    assert "17 JPEGs" in text
    with Image.open(tmp_path / "out" / "train.png") as train, Image.open(tmp_path / "out" / "eval.png") as evaluation:
        assert train.width == evaluation.width > 1000
        assert train.height > evaluation.height > 500


@pytest.mark.usefixtures("torchvision_only")
def test_demo_folder_leaves_out_what_cannot_be_decoded(tmp_path):
    folder = images.folder(tmp_path / "set", classes=2, per_class=3)
    (folder / "class_0" / "bad.jpg").write_bytes(b"nothing")
    said = []
    done = demo(folder=folder, out=tmp_path / "out", say=said.append)
    assert done.ok
    assert "6 of the 7 images" in said[0]
    assert "1 more cannot be decoded" in said[0]
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "eval.png",
        "parity-torchvision.html",
        "train.png",
    ]


@pytest.mark.usefixtures("torchvision_only")
def test_demo_folder_of_bad_files_is_an_error(tmp_path):
    (tmp_path / "set" / "class").mkdir(parents=True)
    (tmp_path / "set" / "class" / "bad.jpg").write_bytes(b"nothing")
    with pytest.raises(GpupipeError, match="none of the 1 images"):
        demo(folder=tmp_path / "set", out=tmp_path / "out", say=lambda _: None)


def test_demo_no_images_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="images=0"):
        demo(out=tmp_path / "out", images=0, say=lambda _: None)


def test_demo_out_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "out").write_text("")
    with pytest.raises(GpupipeError, match="cannot write"):
        demo(out=tmp_path / "out", say=lambda _: None)


@pytest.mark.usefixtures("torchvision_only")
def test_demo_command_prints_what_the_demo_says(tmp_path, capsys):
    folder = images.folder(tmp_path / "set", classes=1, per_class=2)
    assert cli.main(["demo", "--folder", str(folder), "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "images/s" in out
    assert str(tmp_path / "out" / "train.png") in out
