"""What `inspect_source` says, against Pillow and counts made by hand."""

import io
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import gpupipe as gp
from gpupipe.errors import ConfigError, RecordError
from gpupipe.inspection import Spread, inspect_source
from tests import images
from tests.packing.common import ListSource, some


def of(files, labels=None):
    """Inspect these files."""
    labels = range(len(files)) if labels is None else labels
    records = [(f"{number}.jpg", data, label) for number, (data, label) in enumerate(zip(files, labels, strict=True))]
    return inspect_source(ListSource(records))


def test_inspection_of_a_folder_agrees_with_pillow(image_folder):
    source = gp.open_source(image_folder)
    found = gp.inspect_source(image_folder, decode=True)
    opened = [Image.open(io.BytesIO(source[index].data)) for index in range(len(source))]
    assert found.records == len(source)
    assert found.formats == Counter(image.format for image in opened)
    assert (found.heights.least, found.heights.most) == (min(i.height for i in opened), max(i.height for i in opened))
    assert found.widths.mean == pytest.approx(np.mean([image.width for image in opened]))
    assert found.total_bytes == sum(len(source[index].data) for index in range(len(source)))
    assert found.progressive == sum("progressive" in image.info for image in opened)
    assert [(each.name, each.records) for each in found.classes] == [("class_0", 5), ("class_1", 5), ("class_2", 5)]
    assert found.labels == "integer"
    assert found.ok
    assert found.decoded


@pytest.mark.parametrize("threads", [1, 3])
def test_inspection_is_the_same_whatever_the_threads(image_folder, threads):
    assert inspect_source(image_folder, threads=threads) == inspect_source(image_folder)


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0", "4:4:0", "4:1:1", "grey"])
def test_inspection_tells_subsampling(subsampling):
    found = of([images.jpeg(images.photo(40, 60), subsampling=subsampling)])
    assert found.subsampling == {subsampling: 1}
    assert found.native == 1


def test_inspection_tells_what_pillow_decodes():
    found = of([*images.others().values(), images.photo(9, 9)])
    assert found.native == 0
    assert found.formats["PIXELS"] == 1
    assert found.formats["PNG"] == sum(name.startswith("PNG") for name in images.others())
    assert found.subsampling["CMYK"] == 1
    assert f"by Pillow: {len(images.others())}" in found.table()


def test_inspection_tells_orientation_and_progressive():
    pixels = images.photo(20, 30)
    found = of(
        [images.jpeg(pixels, orientation=6), images.jpeg(pixels), images.jpeg(pixels, progressive=True)],
    )
    assert found.orientations == {1: 2, 6: 1}
    assert found.progressive == 1
    assert (found.heights.most, found.widths.most) == (20, 30)


def test_inspection_lists_what_is_bad():
    good = images.jpeg(images.photo(200, 300))
    source = some(["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
    source.records[1] = ("b.jpg", b"", 1)
    source.records[2] = ("c.jpg", good[: len(good) // 2], 2)
    source.records[3] = RecordError("record 3 is gone", index=3, key="bad/3.jpg", path="/x", offset=7)
    by_header = inspect_source(source)
    assert [each.index for each in by_header.bad] == [1, 3]
    found = inspect_source(source, decode=True)
    assert [each.index for each in found.bad] == [1, 2, 3]
    assert "0 bytes" in found.bad[0].reason
    assert (found.bad[2].key, found.bad[2].path, found.bad[2].offset) == ("bad/3.jpg", "/x", 7)
    assert found.bad[2].reason == "record 3 is gone"
    assert found.formats == {"JPEG": 2}
    assert not found.ok
    assert "unreadable: 3" in found.table()


def test_inspection_with_decode_finds_every_broken_file():
    files = images.broken()
    source = ListSource([(name, data, 0) for name, data in files.items()])
    assert [each.key for each in inspect_source(source, decode=True).bad] == list(files)


def test_inspection_counts_images_of_too_many_pixels_as_bad():
    assert len(inspect_source(some(["a.jpg"]), max_pixels=100).bad) == 1


def test_inspection_finds_repeated_keys():
    found = inspect_source(some(["a.jpg", "b.jpg", "a.jpg", "a.jpg"]))
    assert found.repeated_keys == {"a.jpg": 3}
    assert not found.ok
    assert "'a.jpg' 3 times" in found.table()


@pytest.mark.parametrize(
    ("labels", "kind", "counts"),
    [
        ([5, -1, 5], "integer", [(-1, 1), (5, 2)]),
        ([0.5, 1.0, 2.0], "float", []),
        ([[0, 1], [1, 1], [0, 0]], "integer (2,)", []),
        ([None] * 3, "none", []),
        ([[1], [1, 2], [3]], "none", []),
    ],
)
def test_inspection_counts_labels(labels, kind, counts):
    found = of([images.jpeg(images.photo(9, 9))] * 3, labels)
    assert found.labels == kind
    assert [(each.label, each.records) for each in found.classes] == counts


def test_inspection_counts_classes_without_records():
    source = some(["a.jpg", "b.jpg"], [0, 2])
    source.classes = ["cat", "dog", "cow"]
    assert [(each.name, each.records) for each in inspect_source(source).classes] == [
        ("cat", 1),
        ("dog", 0),
        ("cow", 1),
    ]


def test_inspection_as_json_is_strict_and_complete(image_folder):
    found = inspect_source(image_folder)
    read = json.loads(found.to_json(), parse_constant=pytest.fail)
    assert read["records"] == found.records
    assert read["bytes"]["median"] == found.bytes.median
    assert read["ok"] is True


def test_inspection_of_no_image_at_all():
    found = of([b"text", b""])
    assert (found.heights, found.formats, len(found.bad)) == (None, {}, 2)
    assert "unreadable: 2" in found.table()
    json.loads(found.to_json())


def test_inspection_of_threads_that_cannot_work_raises(image_folder):
    with pytest.raises(ConfigError, match="threads=0"):
        inspect_source(image_folder, threads=0)
    for wrong in (0, None, "x"):
        with pytest.raises(ConfigError, match="max_pixels="):
            inspect_source(image_folder, max_pixels=wrong)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=50))
def test_spread_counts_every_number_once(numbers):
    found = Spread.of(np.array(numbers))
    assert sum(count for *_, count in found.bins) == len(numbers)
    for low, below, count in found.bins:
        assert count == sum(low <= number < below for number in numbers)
    assert (found.least, found.most) == (min(numbers), max(numbers))


@pytest.mark.filterwarnings("ignore::UserWarning:PIL")  # what Pillow thinks of a palette
def test_inspection_of_tricky_files_agrees_with_the_decoder(tmp_path, tricky_dir):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "all").symlink_to(tricky_dir)
    source = gp.open_source(tmp_path / "data")
    bad = {each.index for each in inspect_source(source, decode=True).bad}
    for index in range(len(source)):
        try:
            with Image.open(io.BytesIO(source[index].data)) as image:
                image.convert("RGB")
        except Exception:
            assert index in bad, source.key(index)
        else:
            assert index not in bad, source.key(index)
