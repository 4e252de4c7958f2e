"""One battery over every source. A new source is one more entry in SOURCES."""

import csv
import json
import multiprocessing
import os
import pickle
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision
from PIL import Image

import gpupipe as gp
from gpupipe.errors import RecordError
from gpupipe.headers import scan
from gpupipe.packing import PackOptions, pack
from gpupipe.records import Record
from gpupipe.sources import open_source
from gpupipe.sources.base import is_source
from gpupipe.sources.file_list import FileList
from gpupipe.sources.folder import ImageFolder
from tests import images
from tests.available import each_backend, loader
from tests.conformance.reading import INHERITED, facts, read_all, read_here, read_inherited


@dataclass(frozen=True)
class Case:
    """How the battery makes one kind of source.

    Attributes:
        make: Writes a data set under a folder, from the images in another one.
        target: What open_source takes for it.
        raw: Whether it holds pixels instead of files.
        path: Whether the target is a path.
    """

    make: Callable[[Path, Path], object]
    target: Callable[[Path], object]
    raw: bool = False
    path: bool = True


def _packed(format, **options):
    def make(root, folder):
        pack(folder, root / "data", format=format, options=PackOptions(**options))

    return make


def _make_folder(root, folder):
    shutil.copytree(folder, root / "data", symlinks=True)


def _make_list(root, folder):
    """Beside the images that it names, with two columns more."""
    _make_folder(root, folder)
    source = ImageFolder(root / "data")
    with (root / "list.csv").open("w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        writer = csv.writer(file)
        writer.writerow(["path", "label", "weight", "caption"])
        for index, label in enumerate(source.labels.tolist()):
            writer.writerow([f"data/{source.key(index)}", label, index / 4, f'the {index}th, "quoted"'])


def _make_arrays(root, folder):
    """All images as squares of one size."""
    source = ImageFolder(folder)
    squares = [np.array(Image.open(source[index].path).convert("RGB").resize((48, 40))) for index in range(len(source))]
    np.save(root / "images.npy", np.stack(squares))
    np.save(root / "labels.npy", source.labels)


def _torchvision_dataset(root):
    return torchvision.datasets.ImageFolder(root / "data")


def _in(name):
    return lambda root: root / name


SOURCES = {
    "folder": Case(_make_folder, _in("data")),
    "tar": Case(_packed("tar", shard_samples=7), lambda root: root / "data" / "*.tar"),
    "one tar": Case(_packed("tar"), lambda root: root / "data" / "shard-000000.tar"),
    "packed tar": Case(_packed("tar", shard_samples=7), _in("data")),
    "packed lmdb": Case(_packed("lmdb"), _in("data")),
    "packed memmap": Case(_packed("memmap"), _in("data")),
    "packed pixels": Case(_packed("memmap", raw=True), _in("data"), raw=True),
    "list": Case(_make_list, lambda root: FileList(root / "list.csv", columns=("weight", "caption"))),
    "npy": Case(_make_arrays, _in("images.npy"), raw=True),
    "dataset": Case(_make_folder, _torchvision_dataset, path=False),
}


@dataclass(frozen=True)
class Stored:
    """A data set that was made."""

    root: Path
    case: Case

    def open(self):
        return open_source(self.case.target(self.root))


@pytest.fixture(scope="module")
def images_folder(tmp_path_factory):
    return images.folder(tmp_path_factory.mktemp("images") / "data", classes=3, per_class=6)


@pytest.fixture(params=SOURCES.values(), ids=SOURCES.keys(), scope="module")
def stored(request, tmp_path_factory, images_folder):
    root = tmp_path_factory.mktemp("stored")
    request.param.make(root, images_folder)
    return Stored(root, request.param)


@pytest.fixture
def source(stored):
    source = stored.open()
    yield source
    source.close()


def test_source_has_the_protocol(source):
    assert is_source(source)
    assert isinstance(source.uri, str)
    assert isinstance(source.fingerprint, str)
    assert source.fingerprint
    assert isinstance(source.columns, tuple)


def test_source_records_are_whole(source, stored):
    assert len(source) > 10
    for index in range(len(source)):
        record = source[index]
        assert isinstance(record, Record)
        assert record.index == index
        assert isinstance(record.data, np.ndarray if stored.case.raw else bytes | memoryview)
        if isinstance(record.data, memoryview):
            assert record.data.format == "B"
            assert record.data.ndim == 1
            assert record.data.contiguous
        assert set(record.columns) == set(source.columns)
        scan(record.data)


def test_source_indices_of_numpy_are_taken(source):
    assert facts(source[np.int64(3)]) == facts(source[3])


def test_source_out_of_range_raises_index_error(source):
    for index in (len(source), len(source) + 1000, -1, -len(source), 2**70):
        with pytest.raises(IndexError, match=str(len(source))):
            source[index]


def test_source_index_that_is_no_integer_raises_type_error(source):
    for index in ("0", 1.0, None, slice(0, 2)):
        with pytest.raises(TypeError):
            source[index]


def test_source_keys_are_unique_and_hold_no_absolute_path(source, stored):
    keys = [source[index].key for index in range(len(source))]
    assert len(set(keys)) == len(keys)
    assert not any(key.startswith("/") or str(stored.root) in key for key in keys)


def test_source_labels_equal_those_of_the_records(source):
    labels = source.labels
    if labels is None:
        pytest.skip("this source knows labels from records only")
    assert isinstance(labels, np.ndarray)
    assert len(labels) == len(source)
    for index in range(len(source)):
        np.testing.assert_array_equal(labels[index], source[index].label)


def test_source_opened_again_is_equal(source, stored):
    again = stored.open()
    assert again.fingerprint == source.fingerprint
    assert read_all(again) == read_all(source)
    again.close()


def test_source_moved_elsewhere_has_the_same_fingerprint(source, stored, tmp_path):
    shutil.copytree(stored.root, tmp_path / "moved")
    there = Stored(tmp_path / "moved", stored.case).open()
    assert there.fingerprint == source.fingerprint
    if stored.case.path:
        assert there.uri != source.uri
    assert [row[:5] for row in read_all(there)] == [row[:5] for row in read_all(source)]
    there.close()


def test_source_read_by_threads_at_once_is_the_same(stored):
    alone = stored.open()
    expected = read_all(alone)
    alone.close()
    shared = stored.open()  # fresh: its handles are opened by the threads
    start = threading.Barrier(8)

    def read(seed):
        start.wait()
        order = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(shared)), 10))
        return all(facts(shared[int(index)]) == expected[index] for index in order)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(8)))
    shared.close()


def test_source_pickled_is_the_same(source):
    expected = read_all(source)  # its handles are open now
    again = pickle.loads(pickle.dumps(source))
    assert again.fingerprint == source.fingerprint
    assert len(again) == len(source)
    assert read_all(again) == expected
    again.close()


def test_source_read_by_spawned_processes_is_the_same(source):
    expected = read_all(source)
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for process, rows in pool.map(read_here, [source, source]):
            assert process != os.getpid()
            assert rows == expected


# Python 3.12 warns of every fork in a process that has threads, which is what DataLoader's users do all the time.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork on this system")
def test_source_read_by_forked_processes_is_the_same(source, monkeypatch):
    expected = read_all(source)  # the children inherit handles that are open
    monkeypatch.setitem(INHERITED, "source", source)
    with multiprocessing.get_context("fork").Pool(3) as pool:
        running = [pool.apply_async(read_inherited) for _ in range(6)]
        assert read_all(source) == expected  # while they read
        for result in running:
            process, rows = result.get(timeout=120)
            assert process != os.getpid()
            assert rows == expected


def test_source_close_twice_and_use_again_works(stored):
    source = stored.open()
    before = read_all(source)
    source.close()
    source.close()
    assert read_all(source) == before
    source.close()


def test_source_never_read_closes(stored):
    stored.open().close()


def test_source_knows_sizes_and_shapes_as_the_records_have_them(source):
    sizes, shapes = getattr(source, "sizes_bytes", None), getattr(source, "shapes_px", None)
    for index in range(len(source)):
        data = source[index].data
        header = scan(data)
        if sizes is not None:
            assert sizes[index] == (data.nbytes if isinstance(data, np.ndarray) else len(data))
        if shapes is not None:
            assert tuple(shapes[index]) in ((header.height, header.width), (0, 0))


def test_source_knows_keys_without_reading(source):
    if not hasattr(source, "key"):
        pytest.skip("this source has no key()")
    assert [source.key(index) for index in range(len(source))] == [source[index].key for index in range(len(source))]


def test_source_shards_lie_one_behind_another(source):
    starts = getattr(source, "shard_starts", None)
    if starts is None:
        pytest.skip("this source has no shards")
    assert starts[0] == 0
    assert starts[-1] == len(source)
    for first, last in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        paths = [source[index].path for index in range(first, last)]
        assert len(set(paths)) <= 1


# What the Loader makes of it

RECIPE = gp.Recipe.train(size=16, jitter=(0.4, 0.4, 0.4, 0.1))


def epoch(source, backend, **arguments):
    with loader(source, RECIPE, backend, batch_size=4, shuffle=True, seed=3, **arguments) as each:
        return [torch.cat(field) for field in zip(*each, strict=True)], each.errors


@each_backend
def test_source_gives_the_pixels_of_the_folder_it_was_made_from(source, stored, images_folder, backend):
    (found, labels), _ = epoch(source, backend)
    if stored.case.target(stored.root) == stored.root / "images.npy":
        assert len(found) == len(source)  # of another size than the files
        return
    (expected, expected_labels), _ = epoch(ImageFolder(images_folder), backend)
    assert torch.equal(labels, expected_labels)
    if stored.case.raw:
        # Other decoders, other regions: the same pixels up to the rounding of float sums.
        torch.testing.assert_close(found, expected, atol=0.05 / 255 / 0.22, rtol=0)
    else:
        assert torch.equal(found, expected)


def test_source_of_photos_gives_the_pixels_of_their_folder(photos_dir, tmp_path):
    expected, _ = epoch(ImageFolder(photos_dir), "numba")
    for name in ("tar", "packed lmdb", "packed memmap"):
        SOURCES[name].make(tmp_path / name, photos_dir)
        source = Stored(tmp_path / name, SOURCES[name]).open()
        found, _ = epoch(source, "numba")
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
        source.close()


# Odd data sets

FILES = ("folder", "tar", "packed tar", "packed lmdb", "packed memmap", "list", "dataset")
each_of_files = pytest.mark.parametrize("name", FILES)


def odd(tmp_path, name, files):
    """A source of that kind, made from files by their paths."""
    for path, data in files.items():
        place = tmp_path / "from" / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    SOURCES[name].make(tmp_path / "to", tmp_path / "from")
    return Stored(tmp_path / "to", SOURCES[name]).open()


@pytest.fixture
def to(tmp_path):
    (tmp_path / "to").mkdir()
    return tmp_path


@each_of_files
def test_source_of_one_sample_works(to, name):
    data = images.jpeg(images.photo(30, 40))
    source = odd(to, name, {"only/1.jpg": data})
    assert len(source) == 1
    assert bytes(source[0].data) == data
    with gp.Loader(source, RECIPE, batch_size=3, backend="torchvision") as each:
        ((batch, labels),) = each
    assert tuple(batch.shape) == (1, 3, 16, 16)
    assert labels.tolist() == [0]


@each_of_files
def test_source_with_unicode_names_keeps_them(to, name):
    data = images.jpeg(images.photo(30, 40))
    stems = ("Straße", "猫", "naïve café", "emoji 🐈", "x" * 180)
    source = odd(to, name, {f"классы/{stem}.jpg": data for stem in stems})
    keys = {source[index].key for index in range(len(source))}
    assert len(keys) == len(stems)
    assert all(any(stem in key for key in keys) for stem in stems)


@each_of_files
def test_source_with_empty_and_broken_files_has_all_others(to, name):
    """The same samples are bad in every kind of source, and the same ones take their place."""
    good = {f"{number % 3}/{number:02}.jpg": images.jpeg(images.photo(30, 40, number)) for number in range(12)}
    bad = {"0/50.jpg": b"", "1/51.jpg": b"no image", "2/02.jpg": images.truncated(good["2/02.jpg"], 0.6)}
    source = odd(to, name, good | bad)
    with pytest.raises(RecordError, match="cannot be decoded"):
        epoch(source, "torchvision")
    fields = ("image", "label", "index")
    found, errors = epoch(source, "torchvision", on_error="substitute", fields=fields)
    expected, expected_errors = epoch(ImageFolder(to / "from"), "torchvision", on_error="substitute", fields=fields)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert [(bad.index, bad.substitute) for bad in errors] == [(bad.index, bad.substitute) for bad in expected_errors]
    assert len(errors) == 3


@pytest.mark.parametrize("name", ["tar", "packed tar", "packed lmdb", "packed memmap"])
@pytest.mark.parametrize(
    "labels", [[7, 1000, -3], [0.5, 2.25, -1.0], [[0, 1, 1], [1, 0, 0], [1, 1, 1]]], ids=["apart", "float", "vector"]
)
def test_source_keeps_labels_of_every_kind(to, name, labels):
    (to / "from").mkdir()
    lines = []
    for number, label in enumerate(labels):
        (to / "from" / f"{number}.jpg").write_bytes(images.jpeg(images.photo(30, 40, number)))
        lines.append(json.dumps({"path": f"from/{number}.jpg", "label": label}))
    (to / "list.jsonl").write_text("\n".join(lines))
    listed = open_source(to / "list.jsonl")
    SOURCES[name].make(to / "to", listed)
    options = {"label": "json:label"} if name == "tar" and not isinstance(labels[0], int) else {}
    source = open_source(SOURCES[name].target(to / "to"), **options)
    assert [np.asarray(source[index].label).tolist() for index in range(3)] == labels
    assert source.labels.dtype == listed.labels.dtype
    assert source.labels.tolist() == labels
