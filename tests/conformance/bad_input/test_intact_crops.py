"""Files damaged where the crop does not look: bad all the same, on every backend."""

import io

import numpy as np
import pytest
from PIL import Image, ImageFile

import gpupipe as gp
from gpupipe import make_plan
from tests import images
from tests.available import each_backend
from tests.conformance.bad_input import files

# Boxes of one to two percent of the image.
SMALL = gp.Recipe.train(size=24, scale=(0.01, 0.02))


def filled_up(data, monkeypatch):
    """What Pillow makes of a damaged file if it is told to be content with that."""
    with monkeypatch.context() as patch:
        patch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
        return np.array(Image.open(io.BytesIO(data)).convert("RGB"))


def crops_in_intact_parts(source, whole, monkeypatch):
    """Indices of the files whose crop has the same pixels with the damage as without it."""
    found = []
    for index, name in enumerate(source.names):
        damaged, intact = filled_up(source.files[name], monkeypatch), files.pil_loader(whole[name], "ignore")
        plan = make_plan(SMALL, seed=files.SEED, epoch=0, indices=[index], sizes=[intact.shape[:2]])
        top, left, height, width = plan.box[0].tolist()
        area = slice(top, top + height), slice(left, left + width)
        if np.array_equal(damaged[area], intact[area]):
            found.append(index)
    return found


def assert_all_are_bad(source, backend):
    with files.open_loader(source, SMALL, backend, "ignore", fields=("index", "valid")) as loader:
        valid = {source.names[int(index)]: bool(good) for index, good in files.rows_of(loader)}
    assert not any(valid.values()), [name for name, good in valid.items() if good]


def cut(whole, share):
    return {name: images.truncated(data, share) for name, data in whole.items()}


def generated():
    kinds = ("4:2:0", "4:4:4", "4:2:2", "4:4:0", "grey")
    return {
        f"{number}": images.jpeg(images.photo(200 + 7 * number, 300, number), subsampling=kinds[number % 5], quality=95)
        for number in range(30)
    }


@each_backend
@pytest.mark.parametrize("share", [0.95, 0.5])
def test_cut_files_are_bad_whatever_their_crop(backend, share, monkeypatch):
    whole = generated()
    source = files.Files(cut(whole, share))
    assert len(crops_in_intact_parts(source, whole, monkeypatch)) > (20 if share > 0.9 else 8)
    assert_all_are_bad(source, backend)


@each_backend
@pytest.mark.parametrize("share", [0.95, 0.5])
def test_cut_photos_are_bad_whatever_their_crop(photos_dir, backend, share, monkeypatch):
    paths = sorted(photos_dir.rglob("*.JPEG"))[::6]
    whole = {path.name: path.read_bytes() for path in paths}
    # A few are followed by so many bytes of padding that 5 % less of them is still the whole image.
    source = files.Files({name: data for name, data in cut(whole, share).items() if is_bad(data)})
    assert len(source) > len(paths) / 2
    assert len(crops_in_intact_parts(source, whole, monkeypatch)) > len(source) / 5
    assert_all_are_bad(source, backend)


def is_bad(data):
    try:
        files.pil_loader(data, "ignore")
    except Exception:
        return True
    return False


@each_backend
def test_files_with_another_header_in_the_middle_are_bad_whatever_their_crop(backend):
    """Their end marker is where it should be, and region decoders of the first half never see the damage."""
    whole = generated()
    damaged = {}
    for name, data in whole.items():
        middle = (data.rindex(b"\xff\xda") + len(data)) // 2
        damaged[name] = data[:middle] + b"\xff\xc0\0\x02" + data[middle:]
    source = files.Files({name: data for name, data in damaged.items() if is_bad(data)})
    assert len(source) > 20
    sizes = [files.pil_loader(whole[name], "ignore").shape[:2] for name in source.names]
    plan = make_plan(SMALL, seed=files.SEED, epoch=0, indices=range(len(source)), sizes=sizes)
    above = plan.box[:, 0] + plan.box[:, 2] < 0.4 * np.array(sizes)[:, 0]
    assert above.sum() > 5
    assert_all_are_bad(source, backend)
