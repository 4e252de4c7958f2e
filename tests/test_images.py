"""The images that the tests generate are good: libjpeg has nothing to say about them."""

from PIL import Image

from gpupipe.decode import rgb
from gpupipe.headers import scan
from tests import images


def test_jpegs_are_decoded_without_a_word(capfd):
    for data in images.jpegs().values():
        rgb(data, scan(data))
    assert capfd.readouterr().err == ""


def test_folder_is_decoded_without_a_word(tmp_path, capfd):
    paths = sorted(path for path in images.folder(tmp_path).rglob("*.*") if path.is_file())
    progressive = 0
    for path in paths:
        with Image.open(path) as image:
            image.load()
            progressive += "progressive" in image.info
    assert len(paths) == 18
    assert progressive == 2
    assert capfd.readouterr().err == ""
