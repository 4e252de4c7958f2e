"""Maps of files."""

import gc
import mmap
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gpupipe.sources.maps import FileMap

PAGE = mmap.PAGESIZE
linux = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's /proc, or its MADV_POPULATE_READ")


def mapped(name):
    return Path("/proc/self/maps").read_text().count(str(name))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(np.random.default_rng(0).bytes(10 * PAGE + 77))
    return path


def test_file_map_has_the_bytes_of_the_file(path):
    whole = path.read_bytes()
    found = FileMap(path)
    assert found.data == whole
    assert found.status.st_size == len(whole)
    for offset, size in (
        (0, 1),
        (5, PAGE),
        (PAGE - 1, 2),
        (len(whole) - 1, 1),
        (3, 0),
        (len(whole), 0),
        (0, len(whole)),
    ):
        assert found.view(offset, size) == whole[offset : offset + size]


def test_file_map_cannot_be_written(path):
    data = FileMap(path).data
    assert data.readonly
    with pytest.raises(TypeError, match="read-only"):
        data[0] = 1
    assert not np.frombuffer(data, np.uint8).flags.writeable


def test_file_map_of_an_empty_file_is_empty(tmp_path):
    (tmp_path / "empty").touch()
    assert FileMap(tmp_path / "empty").view(0, 0) == b""


def test_file_map_of_nothing_or_a_folder_raises(tmp_path):
    for name in ("nothing", "."):
        with pytest.raises(OSError, match=r"No such file|device|directory"):
            FileMap(tmp_path / name)


@linux
def test_file_map_lives_as_long_as_its_views(path):
    found = FileMap(path)
    view = np.frombuffer(found.view(PAGE, 10), np.uint8)[2:]
    expected = path.read_bytes()[PAGE + 2 : PAGE + 10]
    del found
    path.unlink()
    gc.collect()
    assert mapped(path) == 1
    assert view.tobytes() == expected
    del view
    gc.collect()
    assert mapped(path) == 0


@linux
def test_file_maps_use_no_descriptors_and_leave_nothing(path):
    descriptors = len(os.listdir("/proc/self/fd"))
    held = [FileMap(path) for _ in range(300)]
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert mapped(path) == 300
    del held
    gc.collect()
    assert mapped(path) == 0
    for _ in range(2000):
        FileMap(path).view(0, 1)
    assert mapped(path) == 0


@linux
def test_file_map_of_a_file_that_became_shorter_raises_instead_of_ending_the_process(path):
    code = (
        "import os, sys; from gpupipe.sources.maps import FileMap\n"
        "path, keep = sys.argv[1], int(sys.argv[2])\n"
        "found = FileMap(path); os.truncate(path, keep)\n"
        "assert len(bytes(found.view(0, keep))) == keep\n"
        "for offset in (keep + os.sysconf('SC_PAGESIZE'), 0):\n"
        "    try: found.view(offset, found.status.st_size - offset)\n"
        "    except OSError as error: print(error.errno, error.strerror)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(path), str(3 * PAGE)], capture_output=True, text=True, check=False
    )
    if done.returncode == 0 and not done.stdout:
        pytest.skip("this Linux is older than 5.14")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "5 the file has become shorter, or its disk fails\n" * 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_file_map_is_read_in_a_forked_child_and_after_it(path):
    found = FileMap(path)
    child = os.fork()
    if child == 0:
        right = found.view(0, PAGE) == path.read_bytes()[:PAGE]
        del found  # unmaps in the child alone
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert found.view(0, PAGE) == path.read_bytes()[:PAGE]
