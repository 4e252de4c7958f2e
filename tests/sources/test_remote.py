"""Data sets by URL, on fsspec's own stores: what the records are, what the cache does, what is refused."""

import gzip
import os
import pickle
import threading
import uuid

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

import gpupipe as gp
from tests.sources.stores import records_of, write_csv, write_lmdb, write_memmap

FAST = gp.Retries(tries=3, first_s=0.001, longest_s=0.01, attempt_s=5, limit_s=10)


class FlakyFileSystem(MemoryFileSystem):
    """Memory, with what goes wrong on the way; another store for each name."""

    protocol = "flaky"
    store = {}  # noqa: RUF012 - as the class above has it
    pseudo_dirs = [""]  # noqa: RUF012
    lock = threading.Lock()
    fail_next = 0
    shorten_next = 0
    requests = []  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("flaky://", "memory://"))

    def cat_file(self, path, start=None, end=None, **kwargs):
        with self.lock:
            FlakyFileSystem.requests.append((path, start, end))
            if FlakyFileSystem.fail_next:
                FlakyFileSystem.fail_next -= 1
                raise ConnectionResetError("the connection was reset")
            data = super().cat_file(path, start, end, **kwargs)
            if FlakyFileSystem.shorten_next:
                FlakyFileSystem.shorten_next -= 1
                return data[:-1]
            return data


fsspec.register_implementation("flaky", FlakyFileSystem, clobber=True)


@pytest.fixture
def flaky():
    FlakyFileSystem.fail_next = FlakyFileSystem.shorten_next = 0
    FlakyFileSystem.requests.clear()
    return FlakyFileSystem


def upload(folder, protocol="memory"):
    """The URL of a copy of a local folder."""
    root = f"/bucket-{uuid.uuid4().hex[:8]}"
    fs = fsspec.filesystem(protocol)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            fs.pipe(f"{root}/{path.relative_to(folder).as_posix()}", path.read_bytes())
    return f"{protocol}:/{root}"


def assert_same(source, local):
    assert len(source) == len(local)
    assert source.fingerprint == local.fingerprint
    assert np.array_equal(source.labels, local.labels)
    for index in range(len(local)):
        found, expected = source[index], local[index]
        assert bytes(found.data) == bytes(expected.data)
        assert np.array_equal(found.label, expected.label)
        assert (found.key, found.index, dict(found.columns)) == (expected.key, index, dict(expected.columns))


@pytest.fixture(scope="module")
def pack(image_folder, tmp_path_factory):
    """Five tar shards, with their indexes."""
    folder = tmp_path_factory.mktemp("pack") / "packed"
    gp.pack(image_folder, folder, options=gp.PackOptions(shard_samples=3))
    return folder


@pytest.fixture(params=[False, True], ids=["direct", "cached"])
def options(request, tmp_path):
    return {"cache_dir": tmp_path / "cache"} if request.param else {}


def test_folder_equals_its_copy(image_folder, options):
    with_url = gp.open_source(upload(image_folder), **options)
    assert_same(with_url, gp.open_source(image_folder))
    assert with_url.classes == gp.open_source(image_folder).classes


def test_pack_equals_its_copy(pack, options):
    assert_same(gp.open_source(upload(pack), **options), gp.open_source(pack))


@pytest.mark.parametrize("pattern", ["/*.tar", "/shard-00000{0..4}.tar"])
def test_shards_equal_their_copies(pack, options, pattern):
    assert_same(gp.open_source(upload(pack) + pattern, **options), gp.open_source(f"{pack}{pattern}"))


def test_shards_without_an_index_are_gone_through_once(pack, tmp_path, flaky):
    url = upload(pack, "flaky")
    fs = fsspec.filesystem("flaky")
    for path in fs.find(url):
        if not path.endswith(".tar"):
            fs.rm(path)
    for expected in (5, 0):
        flaky.requests.clear()
        source = gp.open_source(f"{url}/*.tar", cache_dir=tmp_path / "cache")
        assert_same(source, gp.open_source(f"{pack}/*.tar"))
        assert sum(path.endswith(".tar") for path, _, _ in flaky.requests) == expected
        source.close()


def test_opening_with_an_index_reads_no_shard_whole(pack, flaky):
    url = upload(pack, "flaky")
    gp.open_source(f"{url}/*.tar")
    ends = sum(end - start for path, start, end in flaky.requests if path.endswith(".tar"))
    assert ends <= 2 * 5 * (64 << 10)


def test_index_of_another_state_of_a_shard_is_not_believed(pack, tmp_path):
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in pack.glob("*.tar"):
        data = path.read_bytes()
        first = data.index(b"\xff\xd8\xff") if b"\xff\xd8\xff" in data else 600
        (changed / path.name).write_bytes(data[:first] + b"\xfe" + data[first + 1 :])
    for path in pack.glob("*.npz"):
        (changed / path.name).write_bytes(path.read_bytes())
    url = upload(changed)
    (changed / "index.npz").unlink()
    assert_same(gp.open_source(f"{url}/*.tar"), gp.open_source(f"{changed}/*.tar"))


def test_list_equals_its_copy(image_folder, tmp_path, options):
    local = gp.open_source(image_folder)
    root = tmp_path / "listed"
    rows = [["path", "label", "note"]]
    for index in range(len(local)):
        path = root / "images" / local.key(index)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(local[index].data)
        rows.append([f"images/{local.key(index)}", str(local[index].label), f"n{index}"])
    write_csv(root / "list.csv", rows)
    source = gp.open_source(f"{upload(root)}/list.csv", columns=["note"], **options)
    assert_same(source, gp.open_source(root / "list.csv", columns=["note"]))


@pytest.mark.parametrize("kind", ["lmdb", "memmap"])
def test_store_is_fetched_whole(image_folder, tmp_path, kind):
    if kind == "lmdb":
        pytest.importorskip("lmdb")
    write = {"lmdb": write_lmdb, "memmap": write_memmap}[kind]
    folder = tmp_path / "data" / "store"
    folder.parent.mkdir()
    write(folder, records_of(gp.open_source(image_folder)))
    url = upload(folder)
    with pytest.raises(gp.ConfigError, match="pass cache_dir=") as error:
        gp.open_source(url)
    assert error.value.field == "cache_dir"
    source = gp.open_source(url, cache_dir=tmp_path / "cache")
    assert_same(source, gp.open_source(folder))
    again = gp.open_source(url, cache_dir=tmp_path / "cache")
    assert again.cache_stats.misses == 0
    assert_same(pickle.loads(pickle.dumps(again)), gp.open_source(folder))


@pytest.mark.parametrize("ending", [".tar.gz", ".tgz", ".tar.zst"])
@pytest.mark.parametrize("remote", [False, True])
def test_compressed_shards_are_decompressed_once(pack, tmp_path, ending, remote):
    folder = tmp_path / "compressed"
    folder.mkdir()
    for path in pack.glob("*.tar"):
        data = path.read_bytes()
        if ending == ".tar.zst":
            packed = pytest.importorskip("zstandard").ZstdCompressor().compress(data)
        else:
            packed = gzip.compress(data[:5000]) + gzip.compress(data[5000:])  # as parallel gzips write it
        (folder / path.name.replace(".tar", ending)).write_bytes(packed)
    target = f"{upload(folder) if remote else folder}/*{ending}"
    for misses in (5, 0):
        source = gp.open_source(target, cache_dir=tmp_path / "cache")
        assert_same(source, gp.open_source(f"{pack}/*.tar"))
        assert source.cache_stats.misses == misses
        assert "5 shards are compressed" in source.notes[0]
        source.close()


def test_compressed_shards_need_a_cache_and_an_end(pack, tmp_path):
    folder = tmp_path / "compressed"
    folder.mkdir()
    data = gzip.compress((pack / "shard-000000.tar").read_bytes())
    (folder / "a.tar.gz").write_bytes(data)
    url = upload(folder)
    with pytest.raises(gp.ConfigError, match="is compressed"):
        gp.open_source(f"{url}/a.tar.gz")
    fsspec.filesystem("memory").pipe(f"{url}/a.tar.gz", data[:-20])
    with pytest.raises(gp.SourceError, match=r"a\.tar\.gz.* is cut off"):
        gp.open_source(f"{url}/a.tar.gz", cache_dir=tmp_path / "cache")


# --- what goes wrong ---


def test_resets_and_short_bodies_are_tried_again(image_folder, options, flaky):
    source = gp.open_source(upload(image_folder, "flaky"), retries=FAST, **options)
    flaky.fail_next, flaky.shorten_next = 1, 1
    assert source[0].data == gp.open_source(image_folder)[0].data
    flaky.shorten_next = 2
    assert source[1].data == gp.open_source(image_folder)[1].data
    assert source.cache_stats.retries == 4


def test_record_that_cannot_be_had_names_object_and_cause(image_folder, options, flaky):
    source = gp.open_source(upload(image_folder, "flaky"), retries=FAST, **options)
    flaky.fail_next = 1000
    with pytest.raises(gp.RecordError, match=r"class_0/000.*3 tries in .*ConnectionResetError") as error:
        source[0]
    assert error.value.index == 0
    assert error.value.path.startswith("flaky://")
    assert isinstance(error.value.__cause__.__cause__, ConnectionResetError)
    assert type(pickle.loads(pickle.dumps(error.value))) is gp.RecordError
    flaky.fail_next = 0
    assert source[0].data == gp.open_source(image_folder)[0].data


def test_object_that_changes_is_refused_until_it_is_opened_anew(image_folder, tmp_path):
    url = upload(image_folder)
    fs = fsspec.filesystem("memory")
    source = gp.open_source(url, cache_dir=tmp_path / "cache")
    kept = source[1].data
    for index in (0, 1):
        fs.pipe(f"{url}/{source.key(index)}", b"other bytes")
    assert source[1].data == kept
    with pytest.raises(gp.RecordError, match="has changed since this data set was opened"):
        source[0]
    assert gp.open_source(url, cache_dir=tmp_path / "cache")[1].data == b"other bytes"


def test_shard_that_changes_is_refused(pack, options):
    url = upload(pack)
    source = gp.open_source(url, **options)
    fs = fsspec.filesystem("memory")
    fs.pipe(f"{url}/shard-000001.tar", fs.cat_file(f"{url}/shard-000001.tar"))
    assert source[0].key
    with pytest.raises(gp.RecordError, match="has changed since this data set was opened"):
        source[4]


def test_secrets_appear_nowhere(image_folder, flaky):
    url = upload(image_folder, "flaky")
    source = gp.open_source(url, storage_options={"secret": "hunter2"}, retries=FAST)
    flaky.fail_next = 1000
    with pytest.raises(gp.RecordError) as error:
        source[0]
    said = [repr(source), source.uri, source.fingerprint, str(error.value), repr(error.value.facts)]
    assert not any("hunter2" in text for text in said)


# --- the cache ---


def test_cache_in_the_data_set_is_refused(image_folder):
    with pytest.raises(gp.ConfigError, match="lie in one another"):
        gp.open_source(f"file://{image_folder}", cache_dir=image_folder / "cache")
    assert not (image_folder / "cache").exists()


def test_cache_that_is_too_small_is_refused_with_the_arithmetic(pack, image_folder, tmp_path):
    largest = max(path.stat().st_size for path in pack.glob("*.tar"))
    with pytest.raises(gp.ConfigError, match=f"2 x {largest:,}") as error:
        gp.open_source(upload(pack), cache_dir=tmp_path / "cache", cache_bytes=2 * largest - 1)
    assert error.value.field == "cache_bytes"
    with pytest.raises(gp.ConfigError, match="2 x "):
        gp.open_source(upload(image_folder), cache_dir=tmp_path / "other", cache_bytes=1000)


def test_damaged_image_in_the_cache_is_fetched_again(image_folder, tmp_path):
    url, cache = upload(image_folder), tmp_path / "cache"
    gp.stage(gp.open_source(url, cache_dir=cache), progress=False)
    for path in (cache / "objects").rglob("*"):
        if path.is_file():
            path.write_bytes(b"X" + path.read_bytes()[1:])
    source = gp.open_source(url, cache_dir=cache)
    assert_same(source, gp.open_source(image_folder))
    assert source.cache_stats.corrupt == len(source)


@pytest.mark.parametrize("kind", ["folder", "pack"])
def test_stage_fetches_all_and_a_second_time_nothing(image_folder, pack, tmp_path, kind, flaky):
    folder = image_folder if kind == "folder" else pack
    source = gp.open_source(upload(folder, "flaky"), cache_dir=tmp_path / "cache")
    gp.stage(source, progress=False)
    flaky.fail_next = 10**9
    gp.stage(source, progress=False)
    assert_same(source, gp.open_source(folder))


def test_stage_that_does_not_fit_is_refused_with_the_arithmetic(pack, tmp_path):
    total = sum(path.stat().st_size for path in pack.glob("*.tar"))
    source = gp.open_source(upload(pack), cache_dir=tmp_path / "cache", cache_bytes=total - 1)
    with pytest.raises(gp.SourceError, match=f"{total:,} bytes in all do not fit"):
        gp.stage(source, progress=False)


def test_stage_without_a_cache_raises_and_of_a_local_source_does_nothing(image_folder):
    with pytest.raises(gp.SourceError, match="pass cache_dir="):
        gp.stage(gp.open_source(upload(image_folder)), progress=False)
    gp.stage(gp.open_source(image_folder), progress=False)


# --- in a Loader ---


def epoch(source, **options):
    with gp.Loader(source, gp.Recipe.train(size=32), batch_size=4, backend="torchvision", **options) as loader:
        rows = [(image.numpy(), index.tolist()) for image, index in loader]
        return np.concatenate([images for images, _ in rows]), [i for _, some in rows for i in some], loader.stats


@pytest.mark.parametrize("kind", ["folder", "pack"])
def test_epoch_equals_that_of_a_copy(image_folder, pack, options, kind):
    folder = image_folder if kind == "folder" else pack
    same = {"shuffle": True, "seed": 3, "fields": ("image", "index")}
    images, indices, _ = epoch(gp.open_source(folder), **same)
    found, order, stats = epoch(gp.open_source(upload(folder), **options), **same)
    assert order == indices
    assert np.array_equal(found, images)
    assert stats.batches == 4
    assert stats.cache.fetched_bytes > 0
    assert stats.longest_wait_s <= stats.wait_s


def test_epoch_in_shard_order_through_a_small_cache_equals_that_of_a_copy(pack, tmp_path):
    limit = 2 * max(path.stat().st_size for path in pack.glob("*.tar"))
    sharding = gp.Sharding(order=gp.ShardOrder(lanes=1, window=4))
    same = {"shuffle": True, "seed": 1, "fields": ("image", "index"), "sharding": sharding}
    images, indices, _ = epoch(gp.open_source(pack), **same)
    source = gp.open_source(upload(pack), cache_dir=tmp_path / "cache", cache_bytes=limit)
    for _ in range(2):
        found, order, stats = epoch(source, **same)
        assert order == indices
        assert np.array_equal(found, images)
    kept = sum(path.stat().st_size for path in (tmp_path / "cache" / "objects").rglob("*") if path.is_file())
    assert kept <= limit
    assert stats.cache.evictions > 0


def test_source_works_in_a_forked_child(image_folder, pack, options):
    for folder in (image_folder, pack):
        source = gp.open_source(upload(folder), **options)
        expected = bytes(gp.open_source(folder)[2].data)
        assert bytes(source[2].data) == expected
        child = os.fork()
        if not child:
            try:
                os._exit(0 if bytes(source[2].data) == expected and source[1].key else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
