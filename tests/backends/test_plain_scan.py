"""The rule for region decode, in Python and compiled."""

import importlib.util

import numpy as np
import pytest

from gpupipe.backends.plain_scan import is_one_plain_scan
from tests import images


def compiled(data):
    from gpupipe.backends.numba_cpu.scan import is_one_plain_scan

    return bool(is_one_plain_scan(np.frombuffer(bytes(data), np.uint8)))


needs_numba = pytest.mark.skipif(
    importlib.util.find_spec("numba") is None, reason="needs numba: pip install 'gpupipe[fast]'"
)
RULES = {"Python": lambda data: is_one_plain_scan(memoryview(bytes(data))), "numba": compiled}


@pytest.fixture(params=["Python", pytest.param("numba", marks=needs_numba)])
def plain(request):
    return RULES[request.param]


def test_plain_scan_takes_what_is_sequential_and_whole(plain):
    for name, data in images.jpegs().items():
        assert plain(data) == (not name.startswith("progressive")), name


def test_plain_scan_refuses_stray_markers_wherever_they_are(plain):
    data = images.jpeg(images.photo(200, 300))
    first, last = data.rfind(b"\xff\xda") + 14, len(data) - 3
    for place in (first, first + 1023, first + 1024, first + 1025, (first + last) // 2, last - 1):
        for marker in (0x01, 0xC4, 0xD0, 0xD8, 0xDA, 0xFE, 0xFF):
            changed = bytearray(data)
            changed[place : place + 2] = bytes([0xFF, marker])
            if changed[place + 2 : place + 4] != b"\xff\xd9":
                assert not plain(changed), (place, marker)


def test_plain_scan_wants_restart_markers_in_their_order(plain):
    data = images.jpeg(images.photo(64, 80), restart_marker_blocks=2)
    assert plain(data)
    second = data.index(b"\xff\xd1", data.rfind(b"\xff\xda"))
    assert not plain(data[: second + 1] + b"\xd4" + data[second + 2 :])
    assert not plain(data.replace(b"\xff\xdd\0\4\0\2", b"\xff\xdd\0\4\0\0"))


@pytest.mark.parametrize("size", range(0, 700, 7))
def test_plain_scan_refuses_files_that_are_cut(plain, size):
    assert not plain(images.jpeg(images.photo(40, 60))[:size])


@needs_numba
def test_plain_scan_in_python_and_compiled_agree_on_damaged_files():
    rng = np.random.default_rng(5)
    kinds = ("4:2:0", "4:4:4", "grey")
    whole = [images.jpeg(images.photo(48, 64, seed), subsampling=kinds[seed % 3]) for seed in range(6)]
    whole += [images.jpeg(images.photo(48, 64), restart_marker_blocks=2, optimize=True)]
    found = []
    for number in range(4000):
        data = bytearray(whole[number % len(whole)])
        for place in rng.integers(0, len(data), rng.integers(0, 4)):
            data[place] = rng.choice([0xFF, 0x00, 0xD0, 0xD9, int(rng.integers(256))])
        if number % 5 == 0:
            del data[int(rng.integers(len(data))) :]
        found.append(is_one_plain_scan(bytes(data)))
        assert found[-1] == compiled(data)
    assert 0.2 < np.mean(found) < 0.8
