import errno
import os
import pickle
import subprocess
import sys
import threading
import time

import pytest

from gpupipe.cache import Cache
from gpupipe.cache.folder import Busy, CacheTrouble, NoRoom, key_of
from gpupipe.errors import ConfigError, SourceError


def put(cache, name, data, **options):
    return cache.fetch(key_of(name), name, len(data), lambda sink: sink.write(data), **options)


def content(cache, name):
    with open(cache.path(key_of(name)), "rb") as file:
        return file.read()


def there(cache, *names):
    return [name for name in names if cache.rows_of([key_of(name)])]


def test_fetch_keeps_an_object_and_fetches_it_once(tmp_path):
    cache = Cache(tmp_path / "cache")
    row, removed = put(cache, "a", b"bytes of a")
    assert (row.size, removed) == (10, [])
    assert content(cache, "a") == b"bytes of a"
    again, removed = put(cache, "a", b"others")
    assert (again, removed) == (row, None)
    assert Cache(tmp_path / "cache").status().entries == 1


def test_fetch_that_fails_leaves_nothing(tmp_path):
    cache = Cache(tmp_path / "cache", 100)

    def write(sink):
        sink.write(b"half")
        raise SourceError("gone")

    with pytest.raises(SourceError, match="gone"):
        cache.fetch(key_of("a"), "a", 8, write)
    assert os.listdir(tmp_path / "cache" / "partial") == []
    status = cache.status()
    assert (status.entries, status.reserved_bytes) == (0, 0)


def test_fetch_makes_room_by_removing_what_was_used_longest_ago(tmp_path):
    cache = Cache(tmp_path / "cache", 30)
    for name in "abc":
        put(cache, name, b"0123456789")
    cache.touch([key_of("a")])
    _, removed = put(cache, "d", b"0123456789")
    assert removed == [10]
    assert there(cache, "a", "b", "c", "d") == ["a", "c", "d"]
    assert not os.path.exists(cache.path(key_of("b")))


def test_fetch_never_removes_what_is_pinned(tmp_path):
    cache, other = Cache(tmp_path / "cache", 20), Cache(tmp_path / "cache", 20)
    put(cache, "a", b"0123456789", pinned=True)
    put(cache, "b", b"0123456789")
    put(other, "c", b"0123456789")
    assert there(cache, "a", "b", "c") == ["a", "c"]
    assert other.pin(key_of("c"))
    with pytest.raises(NoRoom, match=r"10 bytes do not fit .*cache_bytes=20"):
        put(cache, "d", b"0123456789")
    other.unpin([key_of("c")])
    put(cache, "d", b"0123456789")
    assert there(cache, "a", "c", "d") == ["a", "d"]


def test_fetch_of_an_object_that_grows_reserves_more(tmp_path):
    cache = Cache(tmp_path / "cache", 100)

    def write(sink):
        for _ in range(3):
            sink.write(b"x" * 30)

    row, _ = cache.fetch(key_of("a"), "a", 90, write)
    assert row.size == 90
    with pytest.raises(NoRoom):
        cache.fetch(key_of("b"), "b", 90, lambda sink: [sink.write(b"x" * 60) for _ in range(2)])
    assert cache.status().reserved_bytes == 0


def test_fetch_by_two_is_done_by_one(tmp_path):
    cache, other = Cache(tmp_path / "cache"), Cache(tmp_path / "cache")
    begun, go = threading.Event(), threading.Event()

    def slow(sink):
        begun.set()
        assert go.wait(10)
        sink.write(b"slow")

    thread = threading.Thread(target=lambda: cache.fetch(key_of("a"), "a", 4, slow))
    thread.start()
    assert begun.wait(10)
    with pytest.raises(Busy):
        put(other, "a", b"fast")
    threading.Timer(0.1, go.set).start()
    _, removed = put(other, "a", b"fast", wait_s=10)
    thread.join()
    assert removed is None
    assert content(other, "a") == b"slow"


KILLED = """
import sys, time
from gpupipe.cache import Cache
from gpupipe.cache.folder import key_of
cache = Cache(sys.argv[1], 100)
cache.fetch(key_of("pinned"), "pinned", 10, lambda sink: sink.write(b"0123456789"), pinned=True)
def write(sink):
    sink.write(b"half of it")
    print("begun", flush=True)
    time.sleep(60)
cache.fetch(key_of("a"), "a", 20, write)
"""


def test_fetch_after_the_fetching_process_was_killed_begins_anew(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path / "cache")], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline() == "begun\n"
        cache = Cache(tmp_path / "cache", 100)
        status = cache.status()
        assert (status.in_use, status.reserved_bytes) == (1, 20)
        with pytest.raises(Busy):
            put(cache, "a", b"0123456789")
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
    put(cache, "a", b"0123456789")
    assert content(cache, "a") == b"0123456789"
    status = cache.status()
    assert (status.entries, status.in_use, status.reserved_bytes) == (2, 0, 0)


def test_entry_that_was_shortened_is_fetched_again(tmp_path):
    cache = Cache(tmp_path / "cache")
    put(cache, "a", b"0123456789")
    os.truncate(cache.path(key_of("a")), 5)
    _, removed = put(cache, "a", b"0123456789")
    assert removed == []
    assert content(cache, "a") == b"0123456789"


def test_verify_removes_damage_and_strays_and_nothing_else(tmp_path):
    cache = Cache(tmp_path / "cache")
    for name in "abc":
        put(cache, name, b"0123456789")
    with open(cache.path(key_of("b")), "r+b") as file:
        file.write(b"X")
    stray = tmp_path / "cache" / "objects" / "00"
    stray.mkdir(exist_ok=True)
    (stray / ("0" * 40)).write_bytes(b"stray")
    check = cache.verify()
    assert (check.entries, check.damaged, check.strays, check.ok) == (3, ("b",), 1, False)
    assert there(cache, "a", "b", "c") == ["a", "c"]
    assert cache.verify().ok


def test_clear_leaves_what_is_in_use(tmp_path):
    cache = Cache(tmp_path / "cache")
    put(cache, "a", b"0123456789", pinned=True)
    put(cache, "b", b"0123456789")
    assert cache.clear().entries == 1
    cache.unpin([key_of("a")])
    assert cache.clear().entries == 0


def test_close_unpins(tmp_path):
    cache = Cache(tmp_path / "cache")
    put(cache, "a", b"0123456789", pinned=True)
    assert cache.status().in_use == 1
    cache.close()
    assert cache.status().in_use == 0


def test_index_that_is_damaged_is_made_anew(tmp_path):
    cache = Cache(tmp_path / "cache")
    put(cache, "a", b"0123456789")
    cache.close()
    for name in os.listdir(tmp_path / "cache"):
        if name.startswith("index.sqlite3"):
            (tmp_path / "cache" / name).write_bytes(b"no database" * 1000)
    again = Cache(tmp_path / "cache")
    assert again.status().entries == 0
    assert not os.path.exists(again.path(key_of("a")))
    put(again, "a", b"0123456789")


def test_folder_with_other_things_is_refused(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="is no cache, and not empty") as error:
        Cache(tmp_path)
    assert error.value.field == "cache_dir"
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_folder_of_another_version_is_refused(tmp_path):
    Cache(tmp_path / "cache").close()
    (tmp_path / "cache" / "gpupipe-cache.json").write_text('{"gpupipe_cache": 99}')
    with pytest.raises(ConfigError, match="version 99"):
        Cache(tmp_path / "cache")


def test_full_disk_is_the_caches_trouble(tmp_path, monkeypatch):
    cache = Cache(tmp_path / "cache")

    def write(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("gpupipe.cache.folder.os.write", write)
    with pytest.raises(CacheTrouble, match=r"disk is full.*on_cache_error='bypass'"):
        put(cache, "a", b"0123456789")


def test_cache_survives_pickling_and_a_fork(tmp_path):
    cache = Cache(tmp_path / "cache", 1000)
    put(cache, "a", b"0123456789", pinned=True)
    assert pickle.loads(pickle.dumps(cache)).limit_bytes == 1000
    child = os.fork()
    if not child:
        try:
            put(cache, "b", b"of the child", pinned=True)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    deadline = time.monotonic() + 5
    while cache.status().in_use != 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert cache.status().in_use == 1, "the child's pins end with it, and the parent's do not"
    assert content(cache, "b") == b"of the child"
