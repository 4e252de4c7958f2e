"""Pillow's warnings and exceptions stay behind the door."""

import io
import struct
import threading
import time
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from gpupipe.decode import pillow_rgb
from gpupipe.errors import DecodeError
from gpupipe.pillow import FORMATS, _PillowWarning, silenced, use_image
from tests import images

# Pillow warns when it makes RGB of this one: that its transparency is lost.
WARNS = images.others()["PNG P transparent"]


def test_the_image_of_these_tests_makes_pillow_warn():
    with pytest.warns(UserWarning, match="Transparency"):
        Image.open(io.BytesIO(WARNS)).convert("RGB")


@pytest.mark.parametrize("action", ["error", "always", "default"])
def test_use_image_with_filters_set_before_and_after_does_not_warn(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        pillow_rgb(WARNS)
        warnings.simplefilter(action)  # now ahead of the filter that the first call added
        pillow_rgb(WARNS)
    assert not caught


def test_silenced_block_leaves_other_threads_and_later_warnings_alone():
    inside, done = threading.Event(), threading.Event()

    def hold():
        with silenced():
            warnings.warn("not heard", stacklevel=1)
            inside.set()
            done.wait(10)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        thread = threading.Thread(target=hold)
        thread.start()
        assert inside.wait(10)
        warnings.warn("heard, beside a silenced thread", stacklevel=1)
        done.set()
        thread.join()
        with silenced(), silenced():
            pass
        warnings.warn("heard, after a block in this thread", stacklevel=1)
    assert [str(each.message).split(",")[0] for each in caught] == ["heard", "heard"]


def test_silenced_many_times_adds_one_filter():
    for _ in range(100):
        with silenced():
            pass
    assert sum(entry[2] is _PillowWarning for entry in warnings.filters) == 1


def test_use_image_while_other_threads_swap_filters_stays_good_and_silent():
    stop = threading.Event()

    def swap():
        while not stop.wait(0.0005):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                time.sleep(0.0005)

    with ThreadPoolExecutor(5) as pool:
        swapping = pool.submit(swap)
        try:
            for shape in pool.map(lambda _: pillow_rgb(WARNS).shape, range(400)):
                assert shape == (50, 70, 3)
        finally:
            stop.set()
        swapping.result()


@pytest.mark.parametrize(
    "failure",
    [
        OSError("truncated"),
        SyntaxError("broken PNG"),
        ValueError("bad"),
        EOFError("end"),
        struct.error("short"),
        IndexError("index"),
        KeyError("mode"),
        TypeError("type"),
        MemoryError("much"),
        OverflowError("more"),
        zlib.error("stream"),
        AttributeError("plugin"),
        RuntimeError("plugin"),
        AssertionError("plugin"),
        Image.DecompressionBombError("bomb"),
        NotImplementedError("format"),
    ],
    ids=lambda failure: type(failure).__name__,
)
def test_use_image_with_any_failure_raises_decode_error(failure):
    def fail(_image):
        raise failure

    with pytest.raises(DecodeError, match=type(failure).__name__) as error:
        use_image(WARNS, fail)
    assert error.value.__cause__ is failure


def test_use_image_when_interrupted_passes_it_on():
    def interrupt(_image):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        use_image(WARNS, interrupt)


def test_use_image_of_no_image_says_what_it_begins_with():
    with pytest.raises(DecodeError, match=r"no image format .*\(9 bytes that begin with b'<html>no"):
        use_image(b"<html>not", lambda image: image)
    with pytest.raises(DecodeError, match="empty"):
        use_image(memoryview(b""), lambda image: image)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 10\n%%EndComments\n/a 1 def\nshowpage\n%%EOF\n"


def test_use_image_of_eps_is_refused_and_starts_no_program(tmp_path, monkeypatch):
    """Pillow runs whatever is called `gs` on the path to draw these."""
    trace = tmp_path / "started"
    ghostscript = tmp_path / "gs"
    ghostscript.write_text(f"#!/bin/sh\ntouch {trace}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    Image.init()  # all plugins are there, that of EPS included
    assert "EPS" in Image.OPEN
    preview = struct.pack("<IIIIIIIH", 0xC6D3D0C5, 30, len(EPS), 0, 0, 0, 0, 0xFFFF) + EPS
    for data in (EPS, preview):
        with pytest.raises(DecodeError, match="no image format that is read here"):
            pillow_rgb(data)
    assert not trace.exists()


def test_use_image_knows_formats_of_pillow_only_and_those_registered_by_others(monkeypatch):
    own = {name for name, (factory, _) in Image.OPEN.items() if factory.__module__.startswith("PIL.")}
    assert set(FORMATS) <= own
    with pytest.raises(DecodeError):
        pillow_rgb(b"theirs, 8 x 4")

    def opened(_file, _name):
        return Image.new("RGB", (8, 4), "red")

    monkeypatch.setattr(Image, "ID", Image.ID[:])
    monkeypatch.setattr(Image, "OPEN", Image.OPEN.copy())
    Image.register_open("THEIRS", opened, lambda prefix: prefix.startswith(b"theirs"))
    assert pillow_rgb(b"theirs, 8 x 4").shape == (4, 8, 3)
