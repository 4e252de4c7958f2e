"""What goes to DALI: files as they are, pixels of what DALI does not decode, regions, orientations."""

import dataclasses

import numpy as np
import pytest
import torch

from gpupipe import Recipe
from gpupipe.backends.dali.feed import Feed
from gpupipe.headers import scan, upright_size
from tests import images
from tests.backends.dali.common import assert_within, plan_of, planned, records_of, references, run

RECIPE = Recipe.train(size=32)


def feed_of(recipe, records):
    headers, plan = planned(recipe, records)
    return Feed(recipe, records, headers, plan, in_part=True)


@pytest.mark.parametrize("kind", ["jpegs", "others"])
def test_backend_every_kind_of_file_has_the_pixels_that_pillow_reads(kind):
    records = records_of([*getattr(images, kind)().values()])
    for recipe in (Recipe.eval(size=48, resize=48), RECIPE):
        found, expected = run(recipe, records), references(records, planned(recipe, records)[1], recipe)
        assert_within(found, expected, recipe, 0.02)


def test_backend_decoded_pixels_of_native_jpegs_are_exact():
    """A window larger than the picture: nothing is resized, so that every pixel can be compared bit for bit."""
    records = records_of([*images.jpegs().values()])
    assert all(scan(record.data).native for record in records)
    recipe = Recipe.eval(size=(130, 130), resize=1, mean=0.0, std=1.0)
    _, plan = planned(recipe, records)
    plan = dataclasses.replace(
        plan, resized=plan.box[:, 2:], window=np.rint((plan.box[:, 2:] - 130) / 2).astype(np.int32)
    )
    found = (run(recipe, records, plan) * 255).round().byte()
    expected = (references(records, plan, recipe) * 255).round().byte()
    assert torch.equal(found, expected)


@pytest.mark.parametrize("file_format", ["JPEG", "PNG"])
def test_backend_exif_applied_equals_pillows_upright_image(file_format):
    pixels = images.photo(60, 90)
    files = [images.jpeg(pixels, orientation=orientation) for orientation in range(1, 9)]
    if file_format == "PNG":
        tags = [images.exif(orientation)[6:] for orientation in range(1, 9)]
        files = [images.encode(pixels, "PNG", exif=tag) for tag in tags]
    records = records_of(files * 4)
    assert [scan(file).orientation for file in files] == list(range(1, 9))
    for recipe in (
        Recipe.train(size=(24, 40), exif="apply"),  # flips, margins on all sides
        Recipe.train(size=(96, 130), interpolation="bicubic", exif="apply"),  # scaled up
        Recipe.eval(size=(70, 50), resize=64, exif="apply"),  # a window over the edge
        Recipe.eval(size=20, resize=30, exif="apply"),  # a window inside
    ):
        found, expected = run(recipe, records), references(records, planned(recipe, records)[1], recipe)
        assert_within(found, expected, recipe, 0.02 if recipe.interpolation == "bilinear" else 0.3)


def test_backend_exif_applied_where_only_one_side_has_a_margin_equals_the_upright_image():
    recipe = Recipe.eval(size=20, resize=30, exif="apply")
    corners = [(0, 0), (0, 25), (10, 0), (10, 25)]
    files = [images.jpeg(images.photo(60, 90), orientation=orientation) for orientation in range(1, 9)]
    records = records_of([file for file in files for _ in corners])
    sizes = np.array([upright_size(scan(record.data), "apply") for record in records])
    resized = sizes // 2
    window = np.minimum(np.tile(corners, (8, 1)), resized - 20)
    plan = plan_of((20, 20), np.concatenate([np.zeros_like(sizes), sizes], axis=1), resized, window)
    assert_within(run(recipe, records, plan), references(records, plan, recipe), recipe, 0.02)


def test_backend_exif_ignored_uses_the_pixels_as_stored():
    records = records_of([images.jpeg(images.photo(60, 90), orientation=n) for n in range(1, 9)])
    assert_within(run(RECIPE, records), references(records, planned(RECIPE, records)[1], RECIPE), RECIPE, 0.02)


def test_feed_files_are_views_of_the_records_bytes():
    data = images.jpeg(images.photo(50, 60))
    packed = memoryview(b"__" + data)[2:]
    records = records_of([data, packed])
    files = feed_of(RECIPE, records).arrays({}, {})["encoded"]
    for record, file in zip(records, files, strict=True):
        assert np.shares_memory(file, np.frombuffer(record.data, np.uint8))


def test_feed_only_the_needed_region_of_decoded_pixels_is_fed():
    recipe = Recipe.eval(size=100, resize=400)
    records = records_of([images.encode(images.photo(800, 1000), "PNG")])
    feed = feed_of(recipe, records)
    region = feed.region(0)
    assert max(region.shape) < 100 * 2 + 10  # the window, laid back into a picture twice the size, and the filter
    assert region.flags.c_contiguous
    assert region.base is None, "keeps the whole picture alive"


def test_feed_unused_inputs_are_tiny():
    records = records_of([images.jpeg(images.photo(300, 400)), images.encode(images.photo(300, 400), "PNG")])
    feed = feed_of(RECIPE, records)
    assert (feed.native_rows, feed.other_rows) == ([0], [1])
    arrays = feed.arrays({1: feed.region(1)}, {})
    assert (arrays["raw"][0].size, arrays["encoded"][1].size) == (3, 1)
    assert arrays["native"].tolist() == [True, False]


def test_feed_bad_file_costs_one_pixel_however_large_it_says_it_is():
    records = records_of([images.jpeg(images.photo(40, 50))])
    header = dataclasses.replace(scan(records[0].data), height=12_000, width=14_000)
    plan = plan_of((32, 32), [(0, 0, 12_000, 14_000)])
    arrays = Feed(RECIPE, records, [header], plan, in_part=True).arrays({}, {0: "cannot be decoded"})
    assert (arrays["encoded"][0].size, arrays["raw"][0].shape) == (1, (1, 1, 3))
    assert not arrays["margin"][0], "would be made as large as the region"
    assert not arrays["native"][0]
    assert (arrays["roi_start"][0].tolist(), arrays["roi_end"][0].tolist()) == ([0, 0], [1, 1])


def test_feed_arrays_have_a_row_for_each_sample_and_types_that_dali_takes():
    records = records_of([images.jpeg(images.photo(40, 50)), images.encode(images.photo(40, 50), "PNG")])
    recipe = Recipe.train(size=32, jitter=(0.4, 0.4, 0.4, 0.1), exif="apply")
    feed = feed_of(recipe, records)
    for name, values in feed.arrays({1: feed.region(1)}, {}).items():
        assert len(values) == 2, name
        if isinstance(values, np.ndarray):
            assert values.flags.c_contiguous, name
            assert values.dtype in (np.bool_, np.int32, np.float32), name


def test_backend_tricky_files_have_the_pixels_that_pillow_reads_or_an_error(tricky_dir):
    from gpupipe import decode
    from gpupipe.errors import DecodeError
    from tests.backends.dali.common import backend

    records, headers, readable = [], [], []
    for path in sorted(tricky_dir.iterdir()):
        record = records_of([path.read_bytes()])[0]
        try:
            headers.append(scan(record.data))
        except DecodeError:
            continue
        records.append(dataclasses.replace(record, index=len(records), key=path.name))
        try:
            decode.pillow_rgb(record.data)
            readable.append(True)
        except DecodeError:
            readable.append(False)
    _, plan = planned(RECIPE, records)
    with backend(RECIPE) as dali:
        applied = dali.submit(records, headers, plan).result()
    rows = np.flatnonzero(readable)
    assert sorted(applied.errors) == np.flatnonzero(~np.array(readable)).tolist()
    expected = references([records[row] for row in rows], plan.take(rows), RECIPE)
    assert_within(applied.images[rows], expected, RECIPE, 0.02)
