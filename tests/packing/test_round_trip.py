"""What goes into a pack comes out of it: in every format, for every kind of data set."""

import hashlib
import io
import json
import os
import pickle
import subprocess
import sys
import tarfile
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

import gpupipe as gp
from gpupipe.errors import ConfigError, RecordError, SourceError
from gpupipe.packing import Manifest, PackOptions, pack, verify_pack
from gpupipe.packing.names import sample_name
from gpupipe.sources.packed import columns_from_json
from tests import images
from tests.packing.common import FORMATS, SMALL, ListSource, contents, some

each_format = pytest.mark.parametrize("format", FORMATS)


def expected(source, format):
    return [
        (sample_name(key) if format == "tar" else key, data, label, columns)
        for key, data, label, columns in contents(source)
    ]


def packed(source, tmp_path, format, options=SMALL, **arguments):
    manifest = pack(source, tmp_path / "packed", format=format, options=options, verify=True, **arguments)
    return manifest, gp.open_source(tmp_path / "packed")


@each_format
def test_pack_of_a_folder_holds_the_same(tmp_path, image_folder, format):
    source = gp.open_source(image_folder)
    manifest, found = packed(image_folder, tmp_path, format)
    assert contents(found) == expected(source, format)
    assert list(found.classes) == source.classes
    np.testing.assert_array_equal(found.labels, source.labels)
    assert found.labels.dtype == source.labels.dtype
    assert found.fingerprint == manifest.fingerprint
    assert manifest.records == len(source) == len(found)
    assert manifest.changed == 0
    assert manifest.source == {"fingerprint": source.fingerprint, "records": len(source)}
    assert sum(file.records for file in manifest.files) == len(source)
    assert Manifest.load(str(tmp_path / "packed")) == manifest


@each_format
def test_pack_knows_sizes_and_shapes_without_reading(tmp_path, image_folder, format):
    _, found = packed(image_folder, tmp_path, format)
    for index in range(len(found)):
        data = bytes(found[index].data)
        assert found.sizes_bytes[index] == len(data)
        with Image.open(io.BytesIO(data)) as image:
            assert tuple(found.shapes_px[index]) == image.size[::-1]


@each_format
def test_pack_shuffled_has_the_order_of_randperm(tmp_path, image_folder, format):
    torch = pytest.importorskip("torch")
    source = gp.open_source(image_folder)
    _, found = packed(image_folder, tmp_path, format, PackOptions(shuffle=7, shard_samples=4))
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(7)).tolist()
    there = expected(source, format)
    assert contents(found) == [there[index] for index in order]


@each_format
def test_pack_with_odd_names_keeps_every_record(tmp_path, format):
    keys = [
        "ü/日本.jpg",
        "a/x.jpg",
        "a/x.png",
        "a/x.v2.jpg",
        "a/x_v2.jpg",
        "a b/c d.jpg",
        "deep/" * 40 + "x.jpg",
        "😀.jpg",
    ]
    keys += ["long" * 60 + ".jpg", "../up.jpg", "x", "-rf.jpg", "v1.0/x.jpg", "\udcff.jpg"]
    source = some(keys)
    manifest, found = packed(source, tmp_path, format)
    assert [record[1:] for record in contents(found)] == [record[1:] for record in contents(source)]
    names = [found.key(index) for index in range(len(found))]
    assert len(set(names)) == len(names)
    if format == "tar":
        assert [(each.key, each.name) for each in manifest.renamed] == [
            ("a/x.png", "a/x_2"),
            ("a/x_v2.jpg", "a/x_v2_2"),
        ]
    else:
        assert names == keys
        assert manifest.renamed == ()


@each_format
def test_pack_with_repeated_keys_merges_nothing(tmp_path, format):
    source = some(["a.jpg", "a.jpg", "b.jpg"])
    manifest, found = packed(source, tmp_path, format)
    assert [record[1] for record in contents(found)] == [record[1] for record in contents(source)]
    assert [each.index for each in manifest.renamed] == [1]


@each_format
def test_pack_copies_what_is_no_image(tmp_path, format):
    data = [b"", b"no image", *images.broken().values(), *images.others().values()]
    source = ListSource([(f"x/{number}.jpg", each, number) for number, each in enumerate(data)])
    manifest, found = packed(source, tmp_path, format)
    assert [record[1] for record in contents(found)] == data
    assert manifest.changed == 0
    assert tuple(found.shapes_px[0]) == (0, 0)


@each_format
def test_pack_of_one_sample(tmp_path, format):
    source = some(["only.jpg"], labels=[12])
    _, found = packed(source, tmp_path, format)
    assert contents(found) == expected(source, format)


LABELS = {
    "not contiguous": [7, 1000, -3],
    "float": [0.5, 1e-30, 3.0],
    "multi-label": [[0, 1, 1], [1, 0, 0], [0, 0, 0]],
    "vector": [np.array([0.1, 2], np.float32), np.array([1, 1], np.float32), np.array([-1, 1e10], np.float32)],
    "boolean": [True, False, True],
    "matrix": [[[1, 2], [3, 4]]] * 3,
    "none": [None] * 3,
}


@each_format
@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS.keys())
def test_pack_keeps_labels(tmp_path, format, labels):
    source = some(["a.jpg", "b.jpg", "c.jpg"], labels)
    manifest, found = packed(source, tmp_path, format, PackOptions(shard_samples=2))
    if labels[0] is None:
        assert found.labels is None
        assert found[1].label is None
    else:
        wanted = np.asarray(labels)
        assert found.labels.dtype == wanted.dtype == np.dtype(manifest.labels["dtype"])
        np.testing.assert_array_equal(found.labels, wanted)
        np.testing.assert_array_equal(found[1].label, labels[1])


@each_format
def test_pack_keeps_the_type_of_labels_that_are_known(tmp_path, format):
    source = some(["a.jpg", "b.jpg"], [0.1, 0.7])
    source.labels = np.array([0.1, 0.7], np.float32)
    _, found = packed(source, tmp_path, format)
    assert found.labels.dtype == np.float32
    np.testing.assert_array_equal(found.labels, source.labels)


@each_format
def test_pack_keeps_columns(tmp_path, format):
    columns = [
        {
            "text": "ein Würfel",
            "n": 1,
            "x": 0.1,
            "list": [1, [2]],
            "raw": b"\0\xff",
            "box": np.eye(2, dtype=np.float32),
        },
        {"text": None, "n": 2, "x": 1e300, "list": None, "raw": b"", "box": np.zeros((0, 4), np.float32)},
        {"text": "", "n": None, "x": -0.0, "list": [], "raw": None, "box": None},
    ]
    source = ListSource([(f"{n}.jpg", images.jpeg(images.photo(9, 9, n)), n) for n in range(3)], columns)
    manifest, found = packed(source, tmp_path, format, PackOptions(shard_samples=2))
    assert found.columns == tuple(manifest.columns) == tuple(columns[0])
    assert manifest.columns["box"] == "array"
    for index, wanted in enumerate(columns):
        there = dict(found[index].columns)
        box, wanted_box = there.pop("box"), wanted["box"]
        assert there == {name: value for name, value in wanted.items() if name != "box"}
        if wanted_box is None:
            assert box is None
        else:
            assert box.dtype == wanted_box.dtype
            np.testing.assert_array_equal(box, wanted_box)


@each_format
def test_pack_is_the_same_whatever_the_threads(tmp_path, image_folder, format):
    one = pack(image_folder, tmp_path / "1", format=format, options=SMALL, threads=1)
    five = pack(image_folder, tmp_path / "5", format=format, options=SMALL, threads=5)
    assert one == five


@each_format
def test_pack_of_a_pack_is_equal(tmp_path, image_folder, format):
    pack(image_folder, tmp_path / "tar", format="tar", options=SMALL)
    pack(tmp_path / "tar", tmp_path / "again", format=format, verify=True)
    first, second = gp.open_source(tmp_path / "tar"), gp.open_source(tmp_path / "again")
    assert contents(first) == contents(second)
    assert list(first.classes) == list(second.classes)


def test_pack_shards_hold_as_many_samples_and_bytes_as_allowed(tmp_path):
    sizes = [10, 10, 50, 10, 10, 10, 30, 5, 5]
    source = ListSource([(f"{n}.jpg", bytes(size), n) for n, size in enumerate(sizes)])
    options = PackOptions(shard_samples=3, shard_bytes=30, prefix="train")
    manifest = pack(source, tmp_path / "packed", options=options)
    assert [(file.name, file.records) for file in manifest.files] == [
        ("train-000000.tar", 2),
        ("train-000001.tar", 1),
        ("train-000002.tar", 3),
        ("train-000003.tar", 1),
        ("train-000004.tar", 2),
    ]
    assert gp.open_source(tmp_path / "packed").shard_starts.tolist() == [0, 2, 3, 6, 7, 9]


# In a process of its own: webdataset leaves files open, and warnings are errors here.
_READ_BY_WEBDATASET = """
import hashlib, json, sys, webdataset
samples = []
for each in webdataset.WebDataset(sys.argv[1:], shardshuffle=False):
    image = each.get("jpg") or each.get("png")
    beside = {name: each[name].decode() for name in ("cls", "json") if name in each}
    samples.append([each["__key__"], hashlib.sha256(image).hexdigest(), beside])
print(json.dumps(samples))
"""


def read_by_webdataset(folder, manifest):
    pytest.importorskip("webdataset")
    shards = [str(folder / file.name) for file in manifest.files]
    done = subprocess.run(
        [sys.executable, "-c", _READ_BY_WEBDATASET, *shards], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_pack_shards_are_read_by_webdataset(tmp_path, image_folder):
    manifest = pack(image_folder, tmp_path / "packed", options=SMALL)
    source = gp.open_source(image_folder)
    assert read_by_webdataset(tmp_path / "packed", manifest) == [
        [sample_name(record.key), hashlib.sha256(record.data).hexdigest(), {"cls": str(record.label)}]
        for record in (source[index] for index in range(len(source)))
    ]


def test_pack_shards_with_columns_are_read_by_webdataset(tmp_path):
    data = images.jpeg(images.photo(9, 9))
    manifest = pack(ListSource([("ü.jpg", data, 0.5)], [{"text": "Würfel"}]), tmp_path / "packed")
    ((key, digest, beside),) = read_by_webdataset(tmp_path / "packed", manifest)
    assert (key, digest) == ("ü", hashlib.sha256(data).hexdigest())
    assert json.loads(beside["json"]) == {"label": 0.5, "text": "Würfel"}


def test_pack_shards_are_read_by_tarfile_and_tell_nothing_of_the_machine(tmp_path):
    keys = ["long" * 60 + ".jpg", "ü/" * 80 + "x.jpg", "a.jpg"]
    manifest = pack(some(keys), tmp_path / "packed")
    with tarfile.open(tmp_path / "packed" / manifest.files[0].name) as file:
        members = file.getmembers()
    assert [member.name for member in members] == [
        f"{sample_name(key)}.{ending}" for key in keys for ending in ("jpg", "cls")
    ]
    assert {(member.mtime, member.uid, member.uname) for member in members} == {(0, 0, "")}


# --- changed on the way ---


def test_pack_resized_is_as_torchvision_resizes_pil_images(tmp_path):
    transforms = pytest.importorskip("torchvision.transforms")
    pixels = {f"{h}x{w}": images.photo(h, w) for h, w in ((100, 61), (61, 100), (64, 64), (40, 200), (30, 20))}
    source = ListSource([(f"{name}.png", images.encode(each, "PNG"), 0) for name, each in pixels.items()])
    manifest, found = packed(source, tmp_path, "tar", PackOptions(resize=40, quality=100))
    assert manifest.changed == 3
    assert "shorter side 40, JPEG of quality 100" in manifest.table()
    for index, (name, each) in enumerate(pixels.items()):
        data = bytes(found[index].data)
        if min(each.shape[:2]) <= 40:
            assert data == source[index].data, name
            continue
        wanted = np.asarray(transforms.Resize(40)(Image.fromarray(each)))
        assert data == images.encode(wanted, "JPEG", quality=100)
        assert tuple(found.shapes_px[index]) == wanted.shape[:2]


def test_pack_resized_keeps_the_orientation(tmp_path):
    data = images.jpeg(images.photo(60, 80), orientation=6)
    _, found = packed(ListSource([("a.jpg", data, 0)]), tmp_path, "lmdb", PackOptions(resize=30))
    with Image.open(io.BytesIO(found[0].data)) as image:
        assert image.size == (40, 30)
        assert image.getexif()[0x0112] == 6


@pytest.mark.parametrize("resize", [None, 30])
def test_pack_raw_holds_the_pixels_that_pillow_decodes(tmp_path, image_folder, resize):
    transforms = pytest.importorskip("torchvision.transforms")
    source = gp.open_source(image_folder)
    manifest, found = packed(image_folder, tmp_path, "memmap", PackOptions(raw=True, resize=resize, shard_samples=4))
    assert manifest.changed == len(source)
    assert "RGB pixels" in manifest.table()
    for index in range(len(source)):
        with Image.open(io.BytesIO(source[index].data)) as image:
            wanted = image.convert("RGB")
        if resize is not None:
            wanted = transforms.Resize(resize)(wanted)
        np.testing.assert_array_equal(found[index].data, np.asarray(wanted))
        assert found[index].label == source[index].label


@each_format
def test_pack_of_pixels_keeps_them_as_png(tmp_path, format):
    pixels = [images.photo(20, 30), images.photo(9, 9)[..., 0]]
    source = ListSource([("a", pixels[0], 0), ("b", pixels[1], 1)])
    manifest, found = packed(source, tmp_path, format)
    assert manifest.changed == 2
    for index, wanted in enumerate(pixels):
        with Image.open(io.BytesIO(bytes(found[index].data))) as image:
            assert image.format == "PNG"
            np.testing.assert_array_equal(np.asarray(image), wanted)


# --- what cannot be read ---


def _with_a_bad_one():
    source = some(["a.jpg", "b.jpg", "c.jpg", "d.jpg"])
    source.records[1] = RecordError("record 1 is gone", key="bad/1.jpg", path="/bad/1.jpg", index=1)
    return source


@each_format
def test_pack_with_an_unreadable_record_raises(tmp_path, format):
    with pytest.raises(RecordError, match="record 1 is gone"):
        pack(_with_a_bad_one(), tmp_path / "packed", format=format)
    with pytest.raises(SourceError):
        gp.open_source(tmp_path / "packed")


@each_format
@pytest.mark.parametrize("samples", [1, 2, 10])
def test_pack_that_skips_lists_what_it_skipped(tmp_path, format, samples):
    source = _with_a_bad_one()
    source.records[3] = RecordError("record 3 is gone", key="bad/3.jpg", index=3)
    options = PackOptions(shard_samples=samples)
    manifest, found = packed(source, tmp_path, format, options, on_error="skip")
    assert [(each.index, each.key, each.path, each.reason) for each in manifest.skipped] == [
        (1, "bad/1.jpg", "/bad/1.jpg", "record 1 is gone"),
        (3, "bad/3.jpg", None, "record 3 is gone"),
    ]
    assert [record[2] for record in contents(found)] == [0, 2]
    assert "skipped: 2 ('bad/1.jpg', 'bad/3.jpg')" in manifest.table()


def test_pack_that_fails_goes_on_with_skip(tmp_path):
    source = _with_a_bad_one()
    with pytest.raises(RecordError):
        pack(source, tmp_path / "packed", options=PackOptions(shard_samples=1))
    assert pack(source, tmp_path / "packed", options=PackOptions(shard_samples=1), on_error="skip").records == 3


def test_pack_with_nothing_readable_says_so(tmp_path):
    source = ListSource([RecordError("gone", index=0)])
    with pytest.raises(RecordError, match="gone"):
        pack(source, tmp_path / "packed", on_error="skip")


def test_pack_resized_counts_broken_images_as_unreadable(tmp_path):
    source = some(["a.jpg", "b.jpg"])
    source.records[1] = ("b.jpg", images.broken()["JPEG cut in half"], 1)
    with pytest.raises(gp.DecodeError, match=r"record 1 \('b.jpg'\)"):
        pack(source, tmp_path / "packed", options=PackOptions(resize=10))
    manifest = pack(source, tmp_path / "packed", options=PackOptions(resize=10), on_error="skip")
    assert [each.index for each in manifest.skipped] == [1]


# --- wrong use ---


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"shard_samples": 0}, "shard_samples=0"),
        ({"shard_bytes": 1.5}, "shard_bytes=1.5"),
        ({"shuffle": -1}, "shuffle=-1"),
        ({"shuffle": True}, "shuffle=True"),
        ({"resize": 0}, "resize=0"),
        ({"quality": 101}, "quality=101"),
        ({"prefix": "a/b"}, "prefix='a/b'"),
        ({"prefix": ""}, "prefix=''"),
        ({"prefix": "../x"}, "prefix='../x'"),
        ({"raw": 1}, "raw=1"),
    ],
)
def test_options_that_cannot_work_raise(options, says):
    with pytest.raises(ConfigError, match="is not valid: it must be") as caught:
        PackOptions(**options)
    assert says in str(caught.value)
    assert caught.value.field == next(iter(options))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"format": "zip"}, "one of tar, lmdb, memmap"),
        ({"options": PackOptions(raw=True)}, "only format='memmap'"),
        ({"on_error": "ignore"}, "'raise', 'skip'"),
        ({"threads": 0}, "threads=0"),
        ({"options": {}}, r"options=\{\} is not valid: it must be gpupipe.PackOptions"),
        ({"options": {"shuffle": 1}}, r"it must be gpupipe.PackOptions"),
    ],
)
def test_pack_with_wrong_arguments_writes_nothing(tmp_path, image_folder, arguments, says):
    with pytest.raises(ConfigError, match=says):
        pack(image_folder, tmp_path / "packed", **arguments)
    assert os.listdir(tmp_path) == []


@each_format
def test_pack_of_an_environment_whose_keys_are_numbers_holds_every_image(tmp_path, format):
    lmdb = pytest.importorskip("lmdb")
    files = [images.jpeg(images.photo(8, 8, number)) for number in range(3)]
    with lmdb.open(str(tmp_path / "numbers.lmdb")) as environment, environment.begin(write=True) as transaction:
        for number in range(300):
            transaction.put(number.to_bytes(4, "big"), files[number % 3])
    pack(tmp_path / "numbers.lmdb", tmp_path / "packed", format=format, verify=True)
    packed = gp.open_source(tmp_path / "packed")
    assert [bytes(packed[number].data) for number in range(len(packed))] == files * 100


def test_pack_to_lmdb_without_the_package_writes_nothing(tmp_path, image_folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "lmdb", None)
    with pytest.raises(ConfigError, match=r"format='lmdb' .*pip install 'gpupipe\[lmdb\]'"):
        pack(image_folder, tmp_path / "packed", format="lmdb")
    assert os.listdir(tmp_path) == []


def test_pack_into_its_source_raises(tmp_path):
    images.folder(tmp_path / "data")
    with pytest.raises(ConfigError, match="lies in the source"):
        pack(tmp_path / "data", tmp_path / "data" / "packed")


def test_pack_into_a_folder_with_something_else_raises(tmp_path, image_folder):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match=r"'mine.txt'.*new or empty folder"):
        pack(image_folder, tmp_path)
    assert os.listdir(tmp_path) == ["mine.txt"]
    with pytest.raises(ConfigError, match="is no pack"):
        pack(image_folder, tmp_path / "mine.txt")


@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (["cat", "dog", "cat"], "cannot be packed"),
        ([1, 2.5, 3], "labels of one kind"),
        ([[1], [1, 2], [3]], "labels of one kind"),
        ([1, None, 2], "labels of one kind"),
        ([None, 1, 2], "labels of one kind"),
    ],
)
def test_pack_with_labels_of_several_kinds_raises(tmp_path, labels, says):
    with pytest.raises(ConfigError, match=says):
        pack(some(["a.jpg", "b.jpg", "c.jpg"], labels), tmp_path / "packed")


@each_format
@pytest.mark.parametrize(
    "value", [object(), np.array([1j]), np.array([b"x"]), np.zeros(2, "M8[D]"), np.zeros(2, "i4,f4")]
)
def test_pack_with_a_column_that_cannot_be_stored_raises(tmp_path, format, value):
    source = ListSource([("a.jpg", b"x", 0)], [{"thing": value}])
    with pytest.raises(SourceError, match="cannot be stored"):
        pack(source, tmp_path / "packed", format=format)


def test_pack_to_tar_with_two_meanings_of_label_raises(tmp_path):
    source = ListSource([("a.jpg", b"x", 0.5)], [{"label": "cat"}])
    with pytest.raises(ConfigError, match="column 'label'"):
        pack(source, tmp_path / "packed")


# --- verification ---


@each_format
def test_verify_finds_a_changed_byte(tmp_path, image_folder, format):
    manifest = pack(image_folder, tmp_path / "packed", format=format, options=SMALL)
    assert verify_pack(tmp_path / "packed") == manifest.records
    path = tmp_path / "packed" / manifest.files[0].name
    data = bytearray(path.read_bytes())
    source = gp.open_source(image_folder)
    data[data.index(source[2].data[-500:-400]) + 50] ^= 1
    path.write_bytes(data)
    with pytest.raises(SourceError, match="not as it was written") as caught:
        verify_pack(tmp_path / "packed")
    assert "SHA-256" in str(caught.value)


@each_format
def test_verify_finds_labels_that_are_not_the_sources(tmp_path, image_folder, format):
    pack(image_folder, tmp_path / "packed", format=format, options=SMALL)
    source = gp.open_source(image_folder)
    other = some([source.key(index) for index in range(len(source))])
    other.labels = source.labels[::-1].copy()
    with pytest.raises(SourceError, match="labels are not those of the source"):
        verify_pack(tmp_path / "packed", source=other)


def test_verify_with_another_source_raises(tmp_path):
    source = some([f"{number}.jpg" for number in range(3)])
    pack(source, tmp_path / "packed")
    with pytest.raises(SourceError, match="memory has 1 records, and 3 were packed"):
        verify_pack(tmp_path / "packed", source=some(["0.jpg"]))


@pytest.mark.parametrize("index", [[0, 3], [-1, 0], [0.0, 1.0], [0]])
def test_verify_with_damaged_checks_raises(tmp_path, index):
    pack(some(["a.jpg", "b.jpg"]), tmp_path / "packed")
    path = tmp_path / "packed" / "checks.npz"
    np.savez(path, index=np.array(index), digest=np.load(path)["digest"])
    with pytest.raises(SourceError, match="is damaged"):
        verify_pack(tmp_path / "packed")


# --- sources of packs ---


def test_packed_shards_with_columns_work_in_threads_and_after_pickling(tmp_path):
    columns = [{"text": str(n)} for n in range(6)]
    source = ListSource([(f"{n}.jpg", images.jpeg(images.photo(9, 9, n)), n) for n in range(6)], columns)
    pack(source, tmp_path / "packed", options=SMALL)
    found = pickle.loads(pickle.dumps(gp.open_source(tmp_path / "packed")))
    with ThreadPoolExecutor(4) as pool:
        there = list(pool.map(lambda index: found[index].columns["text"], [*range(6)] * 20))
    assert there == [str(n) for n in range(6)] * 20
    assert found.shard_starts.tolist() == [0, 4, 6]
    found.close()
    assert found[5].columns == {"text": "5"}
    assert "PackedShards" in repr(found)


def test_packed_shards_with_a_json_of_somebody_else_raise(tmp_path):
    source = ListSource([("a.jpg", b"x", 0)], [{"text": "abc"}])
    pack(source, tmp_path / "packed")
    manifest = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    manifest["columns"]["other"] = "str"
    (tmp_path / "packed" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RecordError, match="without its columns"):
        gp.open_source(tmp_path / "packed")[0]


@pytest.mark.parametrize(
    "stored",
    [
        {"dtype": "u1", "shape": [1], "values": [300]},
        {"dtype": "(1000,1000)u1", "shape": [1000, 1000], "values": 1},
        {"dtype": "O", "shape": [1], "values": [1]},
        {"dtype": "V9", "shape": [1], "values": ["x"]},
        {"dtype": "f4", "shape": [2], "values": [1]},
    ],
)
def test_packed_array_that_is_damaged_raises(stored):
    with pytest.raises((ValueError, OverflowError)):
        columns_from_json({"box": stored}, {"box": "array"})


@each_format
def test_pack_gives_the_batches_of_its_folder(tmp_path, image_folder, format):
    pack(image_folder, tmp_path / "packed", format=format, options=SMALL)
    recipe = gp.Recipe.train(size=32)
    arguments = {"batch_size": 8, "shuffle": True, "seed": 1, "backend": "torchvision", "device": "cpu"}
    with (
        gp.Loader(image_folder, recipe, **arguments) as one,
        gp.Loader(tmp_path / "packed", recipe, **arguments) as two,
    ):
        for (pixels, labels), (wanted, wanted_labels) in zip(two, one, strict=True):
            np.testing.assert_array_equal(pixels, wanted)
            np.testing.assert_array_equal(labels, wanted_labels)


def test_pack_of_a_torch_dataset_keeps_its_pixels(tmp_path):
    class Dataset:
        """What torchvision's data sets of PIL images are like."""

        def __len__(self):
            return 3

        def __getitem__(self, index):
            return Image.fromarray(images.photo(20, 30, seed=index)), index % 2

    manifest = pack(Dataset(), tmp_path / "packed", verify=True)
    found = gp.open_source(tmp_path / "packed")
    assert "pixels, stored as PNG" in manifest.table()
    for index in range(3):
        with Image.open(io.BytesIO(found[index].data)) as image:
            np.testing.assert_array_equal(np.asarray(image), images.photo(20, 30, seed=index))
        assert found[index].label == index % 2


@each_format
def test_pack_whose_first_record_is_unreadable_skips_it(tmp_path, format):
    source = some(["a.jpg", "b.jpg"], [0.5, 1.5])
    source.records[0] = RecordError("gone", key="a.jpg", index=0)
    manifest, found = packed(source, tmp_path, format, on_error="skip")
    assert [each.index for each in manifest.skipped] == [0]
    assert found.labels.tolist() == [1.5]


def test_packed_takes_the_options_of_its_source(tmp_path):
    source = ListSource([("a.jpg", b"image", 0), ("b.jpg", b"other", 1)], [{"text": "x"}, {"text": "y"}])
    pack(source, tmp_path / "packed")
    found = gp.open_source(tmp_path / "packed", access="read")
    assert isinstance(found[0].data, bytes)
    assert found[1].columns == {"text": "y"}
    assert gp.open_source(tmp_path / "packed", columns="json")[1].columns == {"json": {"text": "y"}}
    pack(source, tmp_path / "lmdb", format="lmdb")
    assert gp.open_source(tmp_path / "lmdb", labels=[7, 8])[1].label == 8
