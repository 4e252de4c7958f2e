"""The data set that the demo makes."""

import io
import socket
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from gpupipe.demo import pictures
from gpupipe.errors import GpupipeError
from gpupipe.headers import scan_record
from gpupipe.parity import stages
from gpupipe.sources.folder import ImageFolder

pytestmark = pytest.mark.skipif(len(pictures.shipped()) < 3, reason="needs scikit-image or scikit-learn")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("made")
    assert len(list(pictures.make(root, 48))) == 48
    return ImageFolder(root)


def test_make_gives_mixed_real_looking_jpegs(made):
    records = [made[index] for index in range(len(made))]
    headers = [scan_record(record) for record in records]
    assert len(made) == 48
    assert {header.format for header in headers} == {"JPEG"}
    kinds = {stages.kind(record, header) for record, header in zip(records, headers, strict=True)}
    assert {"JPEG 4:2:0", "JPEG 4:4:4", "JPEG 4:2:2", "JPEG grey"} <= kinds
    sides = [max(header.height, header.width) for header in headers]
    assert 380 < np.mean(sides) < 650
    assert min(sides) < 240
    assert max(sides) >= 900
    assert len({(header.height, header.width) for header in headers}) > 10


def test_make_labels_are_the_pictures(made):
    assert made.classes == sorted(label.replace(" ", "_") for label in pictures.shipped())


def test_make_views_have_no_black_corners(made):
    """A turned picture leaves black corners, which must be cut off: brick has no black of its own."""
    for index in range(len(made)):
        if "brick" in made.key(index):
            with Image.open(io.BytesIO(made[index].data)) as image:
                pixels = np.asarray(image.convert("L"))
            assert min(pixels[0, 0], pixels[0, -1], pixels[-1, 0], pixels[-1, -1]) > 20


def test_make_again_gives_the_same_files(made, tmp_path):
    for path in pictures.make(tmp_path, 5):
        assert path.read_bytes() == (Path(made.root) / path.relative_to(tmp_path)).read_bytes()


def test_make_touches_no_network(monkeypatch, tmp_path):
    def refuse(*_, **__):
        raise AssertionError("the demo must not use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert len(list(pictures.make(tmp_path, 3))) == 3


def test_make_without_pictures_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setattr(pictures, "_SHIPPED", {"no_such_package": ("data", ("a.png",))})
    with pytest.raises(GpupipeError, match=r"pip install 'gpupipe\[demo\]'"):
        list(pictures.make(tmp_path, 3))
