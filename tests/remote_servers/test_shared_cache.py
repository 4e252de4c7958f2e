"""The cache under what happens to it: several processes, kill -9, full disks, missing rights, rotten bits, no room."""

import errno
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

import numpy as np
import pytest

import gpupipe as gp
from gpupipe.cache import Cache
from gpupipe.cli import main
from tests.conftest import REPO
from tests.remote_servers.child import digest
from tests.remote_servers.data_sets import KINDS, RETRIES, contents, of_objects, published
from tests.remote_servers.proxy import LOUD, Fault, always, seeded


def start(remote, target, *, before=(), seed=0, **specification):
    """A child that reads; `before` stands in front of the interpreter."""
    specification["options"] = {
        "storage_options": remote.storage_options,
        "retries": RETRIES,
        **{name: str(value) if name == "cache_dir" else value for name, value in specification["options"].items()},
    }
    specification |= {"url": remote.url(target), "seed": seed}
    return subprocess.Popen(
        [*before, sys.executable, "-W", "error", "-m", "tests.remote_servers.child", json.dumps(specification)],
        cwd=REPO,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(child):
    out, err = child.communicate(timeout=50)
    assert child.returncode == 0, err
    assert "Traceback" not in err, err
    return json.loads(out)


def read(child):
    """The result of one that is to read everything."""
    found = result(child)
    assert "error" not in found, found
    return found


def entries(cache):
    return sorted(path for path in (cache / "objects").rglob("*") if path.is_file())


def size_of(cache):
    """Bytes of entries and of what is being fetched, while nothing is added or removed; 0 before there is a cache."""
    if not (cache / "index.sqlite3").exists():
        return 0
    total = 0
    with closing(sqlite3.connect(cache / "index.sqlite3", timeout=10, isolation_level=None)) as index:
        index.execute("BEGIN IMMEDIATE")
        for folder in ("objects", "partial"):
            for path in (cache / folder).rglob("*"):
                with suppress(FileNotFoundError):  # given up just now
                    total += path.stat().st_size if path.is_file() else 0
    return total


def largest(root):
    return max(path.stat().st_size for path in root.rglob("*") if path.is_file())


def expected_of(local):
    return digest(local, range(len(local)))


@pytest.mark.parametrize(("remote", "kind"), [("http", "folder"), ("s3", "tar without index")], indirect=["remote"])
def test_two_processes_on_one_cache_fetch_each_object_once(remote, tmp_path, kind):
    local, target = published(remote, kind)
    remote.proxy.plan = lambda _: Fault(delay_s=0.02)
    children = [start(remote, target, seed=seed, options={"cache_dir": tmp_path / "cache"}) for seed in (1, 2)]
    found = [read(child) for child in children]
    assert [each["digests"] for each in found] == [[expected_of(local)]] * 2
    assert all(each["stats"]["evictions"] == each["stats"]["corrupt"] == 0 for each in found)
    sizes = {
        path.relative_to(remote.root).as_posix(): path.stat().st_size
        for path in remote.root.rglob("*.*")
        if path.suffix in (".tar", ".JPEG", ".png")
    }
    came = remote.proxy.passed_bytes
    assert {name: sum(came[path] for path in came if path.endswith(f"/{name}")) for name in sizes} == sizes


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_kill_9_in_the_middle_leaves_a_cache_that_is_sound(http_remote, tmp_path, kind):
    remote = http_remote
    local, target = published(remote, kind)
    cache = tmp_path / "cache"
    killed_while_fetching = 0
    for attempt in range(2):
        remote.proxy.plan = of_objects(lambda _: Fault(pause_s=0.15))
        remote.proxy.forget()
        child = start(remote, target, seed=attempt, options={"cache_dir": cache})
        wait_for(lambda: list(cache.glob("partial/*")) or child.poll() is not None)  # noqa: B023
        time.sleep(0.1 * attempt)
        killed_while_fetching += child.poll() is None
        child.kill()
        child.communicate()
        assert_sound(cache, remote)
    assert killed_while_fetching
    remote.proxy.plan = None
    source = remote.open(target, cache_dir=cache)
    assert contents(source) == contents(local)
    assert source.cache_stats.corrupt == 0
    assert not list((cache / "partial").iterdir()), "what the dead ones had begun is gone"
    assert Cache(cache).verify().ok


def test_process_that_waits_for_one_that_is_killed_fetches_itself(http_remote, tmp_path):
    remote = http_remote
    local, target = published(remote, "tar without index")
    cache = tmp_path / "cache"
    stuck = threading.Event()

    def plan(request):
        if stuck.is_set() or request.method != "GET" or not request.path.endswith(".tar"):
            return None
        stuck.set()
        return Fault(pause_s=30)

    remote.proxy.plan = plan
    child = start(remote, target, options={"cache_dir": cache})
    assert stuck.wait(20)
    threading.Timer(0.5, child.kill).start()
    source = remote.open(target, cache_dir=cache)
    assert contents(source) == contents(local)
    child.communicate()
    assert child.returncode == -signal.SIGKILL


def assert_sound(cache, remote):
    """Every complete entry is a whole object."""
    whole = {path.read_bytes() for path in remote.root.rglob("*") if path.is_file()}
    assert all(path.read_bytes() in whole for path in entries(cache))


def wait_for(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# --- no room ---


@pytest.fixture
def tiny_disk(tmp_path):
    """A command that runs another one with a folder of 400 KB, a tmpfs that only that process sees; and the folder."""
    place = tmp_path / "tiny"
    place.mkdir()
    script = f'mount -t tmpfs -o size=400k,mode=777 tmpfs "{place}" && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", script, "sh"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs in a namespace of its own")
    return command, place


def large_folder(remote):
    """1.2 MB in 24 images of about 50 KB."""
    random = np.random.default_rng(0)
    for number in range(24):
        folder = remote.root / "large" / f"class_{number % 2}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:02}.jpg").write_bytes(b"\xff\xd8" + random.bytes(50_000) + b"\xff\xd9")
    remote.publish()
    return gp.open_source(remote.root / "large"), "large"


@pytest.mark.parametrize("stage", [False, True])
def test_full_disk_is_a_clear_error(http_remote, tiny_disk, stage):
    _, target = large_folder(http_remote)
    command, place = tiny_disk
    found = result(start(http_remote, target, before=command, options={"cache_dir": place / "cache"}, stage=stage))
    error = found["error"]
    assert error["errno"] == errno.ENOSPC
    assert error["type"] in ("SourceError", "RecordError")
    assert str(place) in error["message"]
    assert "on_cache_error" in error["message"] or "cache_bytes" in error["message"], "what to do"


def test_full_disk_is_read_past_when_told_to(http_remote, tiny_disk):
    local, target = large_folder(http_remote)
    command, place = tiny_disk
    options = {"cache_dir": place / "cache", "on_cache_error": "bypass"}
    found = result(start(http_remote, target, before=command, options=options, epochs=2))
    assert found["digests"] == [expected_of(local)] * 2
    assert found["stats"]["bypassed"] > 0
    assert found["stats"]["fetched_bytes"] > 1_200_000


def test_limit_on_a_disk_with_less_room_than_that(http_remote, tiny_disk):
    """The limit is the user's word, the disk another matter."""
    local, target = large_folder(http_remote)
    command, place = tiny_disk
    options = {"cache_dir": place / "cache", "cache_bytes": 10_000_000, "on_cache_error": "bypass"}
    found = result(start(http_remote, target, before=command, options=options))
    assert found["digests"] == [expected_of(local)]


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_eviction_under_pressure_keeps_the_limit_and_the_bytes(http_remote, tmp_path, kind):
    local, target = large_folder(http_remote) if kind == "folder" else published(http_remote, kind)
    cache, limit = tmp_path / "cache", 3 * largest(http_remote.root / target.partition("/")[0])
    http_remote.proxy.plan = of_objects(seeded(2, share=0.2, kinds=LOUD))
    most, done = [0], threading.Event()

    def watch():
        while not done.wait(0.005):
            most[0] = max(most[0], size_of(cache))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        options = {"cache_dir": cache, "cache_bytes": limit}
        children = [
            start(http_remote, target, seed=seed, options=options, epochs=2, in_turn=kind == "tar") for seed in (1, 2)
        ]
        found = [read(child) for child in children]
    finally:
        done.set()
        watcher.join()
    assert [each["digests"] for each in found] == [[expected_of(local)] * 2] * 2
    assert sum(each["stats"]["evictions"] for each in found) > 0
    assert 0 < most[0] <= limit
    assert_sound(cache, http_remote)


def test_cache_that_is_too_small_is_refused_with_the_arithmetic(s3_remote, tmp_path):
    _, target = large_folder(s3_remote)
    size = largest(s3_remote.root / target)
    with pytest.raises(gp.ConfigError, match="cache_bytes") as caught:
        s3_remote.open(target, cache_dir=tmp_path / "cache", cache_bytes=2 * size - 1)[0]
    assert caught.value.field == "cache_bytes"
    assert f"{size:,}" in str(caught.value) or str(size) in str(caught.value)


# --- no rights ---

NOBODY = 65534


@pytest.fixture
def forbidden(tmp_path):
    """A command that runs another one which obeys permissions, and a folder that it may not write to."""
    place = tmp_path / "forbidden"
    place.mkdir(mode=0o555)
    if os.getuid():
        return [], place
    command = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
    if shutil.which("setpriv") is None or subprocess.run([*command, "true"], capture_output=True).returncode:
        pytest.skip("root may write everywhere, and cannot give that right away here")
    return command, place


def test_missing_rights_are_a_clear_error(http_remote, forbidden):
    _, target = published(http_remote, "folder")
    command, place = forbidden
    error = result(start(http_remote, target, before=command, options={"cache_dir": place / "cache"}))["error"]
    assert error["type"] == "SourceError"
    assert error["errno"] == errno.EACCES
    assert str(place) in error["message"]
    assert "on_cache_error" in error["message"]


def test_missing_rights_are_read_past_when_told_to(http_remote, forbidden):
    local, target = published(http_remote, "folder")
    command, place = forbidden
    options = {"cache_dir": place / "cache", "on_cache_error": "bypass"}
    found = result(start(http_remote, target, before=command, options=options))
    assert found["digests"] == [expected_of(local)]
    assert not list(place.iterdir())


def test_cache_that_may_only_be_read_is_not_harmed(http_remote, forbidden, tmp_path):
    local, target = published(http_remote, "folder")
    command, _ = forbidden
    cache = tmp_path / "cache"
    contents(http_remote.open(target, cache_dir=cache))
    for path in (*cache.rglob("*"), cache):
        if os.getuid() == 0:
            os.chown(path, NOBODY, NOBODY)
        path.chmod(0o555 if path.is_dir() else 0o444)
    before = entries(cache)
    options = {"cache_dir": cache, "on_cache_error": "bypass"}
    found = result(start(http_remote, target, before=command, options=options))
    for path in (cache, *cache.rglob("*")):
        path.chmod(0o755)
    assert found["digests"] == [expected_of(local)]
    assert entries(cache) == before


# --- rotten bits ---


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("kind", ["folder", "tar"])
def test_rotten_bit_is_found_by_verify(http_remote, tmp_path, kind, capsys):
    local, target = published(http_remote, kind)
    cache = tmp_path / "cache"
    contents(http_remote.open(target, cache_dir=cache))
    assert main(["cache", "verify", str(cache)]) == 0
    rotten = entries(cache)[1]
    flip(rotten)
    assert main(["cache", "verify", str(cache)]) == 1
    said = capsys.readouterr()
    assert rotten.name in said.out + said.err or http_remote.url("") in said.out + said.err
    assert not rotten.exists()
    assert main(["cache", "verify", str(cache)]) == 0
    assert contents(http_remote.open(target, cache_dir=cache)) == contents(local)


def test_rotten_bit_of_a_small_object_is_found_when_it_is_read(http_remote, tmp_path):
    local, target = published(http_remote, "folder")
    cache = tmp_path / "cache"
    contents(http_remote.open(target, cache_dir=cache))
    for path in entries(cache):
        flip(path)
    source = http_remote.open(target, cache_dir=cache)
    assert contents(source) == contents(local)
    assert source.cache_stats.corrupt == len(local)


@pytest.mark.parametrize("kind", ["folder", "tar"])
@pytest.mark.parametrize("damage", ["shortened", "emptied", "removed"])
def test_entry_of_another_size_is_fetched_again(http_remote, tmp_path, kind, damage):
    local, target = published(http_remote, kind)
    cache = tmp_path / "cache"
    contents(http_remote.open(target, cache_dir=cache))
    for path in entries(cache):
        if damage == "removed":
            path.unlink()
        else:
            os.truncate(path, 0 if damage == "emptied" else path.stat().st_size // 2)
    source = http_remote.open(target, cache_dir=cache)
    assert contents(source) == contents(local)


@pytest.mark.parametrize("damage", [b"", b"no database", None])
def test_lost_or_damaged_index_of_the_cache_costs_no_data(http_remote, tmp_path, damage):
    local, target = published(http_remote, "folder")
    cache = tmp_path / "cache"
    source = http_remote.open(target, cache_dir=cache)
    contents(source)
    source.close()
    for path in cache.glob("index.sqlite3*"):
        path.unlink()
    if damage is not None:
        (cache / "index.sqlite3").write_bytes(damage)
    assert contents(http_remote.open(target, cache_dir=cache)) == contents(local)


def test_clear_removes_entries_and_leaves_what_is_not_the_caches(http_remote, tmp_path, capsys):
    _, target = published(http_remote, "folder")
    cache = tmp_path / "cache"
    source = http_remote.open(target, cache_dir=cache)
    contents(source)
    source.close()
    (cache / "mine.txt").write_text("mine")
    assert main(["cache", "status", str(cache), "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert status["entries"] == len(source)
    assert main(["cache", "clear", str(cache)]) == 0
    assert entries(cache) == []
    assert (cache / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("kind", ["folder", "tar", "list"])
def test_stage_fetches_everything_before_and_nothing_after(http_remote, tmp_path, kind):
    local, target = published(http_remote, kind)
    source = http_remote.open(target, **KINDS[kind].options, cache_dir=tmp_path / "cache")
    source.stage(progress=False)
    http_remote.proxy.plan = always(Fault(kind="refuse"))
    assert contents(source) == contents(local)
