"""A process of its own whose memory is watched: what test_memory.py starts.

python memory.py <folder> <backend>

The folder has the files of `huge` by their formats; what was found is written beside them.
"""

from __future__ import annotations

import faulthandler
import gc
import io
import json
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))  # for `tests`

import numpy as np
from PIL import Image

import gpupipe as gp
from gpupipe.headers import scan
from tests import images
from tests.zoo import bombs

SIDE = 10_000  # of the image of 100 megapixels
BATCHES = 300  # that have bad files


class Many:
    """The same few files over and over, but for some."""

    columns = ()
    uri = fingerprint = "memory"

    def __init__(self, count, files, special):
        self.count, self.files, self.special = count, files, special

    @property
    def labels(self):
        return np.zeros(self.count, np.int64)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return gp.Record(self.special.get(index) or self.files[index % len(self.files)], 0, index, str(index))

    def close(self):
        pass


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def peak_bytes():
    """The most this process had since `forget_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


def huge(kind):
    """100 megapixels that take a megabyte or two."""
    row = np.arange(SIDE, dtype=np.uint32)
    pixels = np.broadcast_to(((row // 8) % 251).astype(np.uint8)[None, :, None], (SIDE, SIDE, 3))
    out = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(out, kind, **({"quality": 50} if kind == "JPEG" else {}))
    return out.getvalue()


def small_files():
    return [images.jpeg(images.photo(60 + 3 * n, 90, n)) for n in range(7)] + [
        images.encode(images.photo(50, 70), "PNG")
    ]


def in_flight(backend, huge_file):
    """One image of 100 megapixels among small ones."""
    source = Many(80, small_files(), {})
    options = gp.Options(threads=2, prefetch=2)
    recipe = gp.Recipe.eval(size=64, resize=64)
    with gp.Loader(source, recipe, batch_size=4, backend=backend, device="cpu", options=options) as loader:
        for _ in range(2):
            list(loader)
        source.special = {41: huge_file}
        gc.collect()
        forget_peak()
        before = resident_bytes()
        after = [resident_bytes() - before for _ in loader]
        return {"peak": peak_bytes() - before, "after": after}


def claims(backend):
    """Headers of billions of pixels."""
    small = small_files()
    files = [each.data for each in bombs().values()]
    policy = gp.OnError("ignore", max_bad=1.0)
    source = Many(10 * len(files), small, {})
    recipe = gp.Recipe.eval(size=64, resize=64)
    with gp.Loader(source, recipe, batch_size=9, backend=backend, device="cpu", on_error=policy) as loader:
        for _ in range(2):
            list(loader)
        source.special = {10 * number + 3: data for number, data in enumerate(files)}
        forget_peak()
        before = resident_bytes()
        list(loader)
        return {"peak": peak_bytes() - before, "bad": len(loader.errors), "claimed": len(files)}


def failures(backend):
    """Hundreds of batches, each with bad files of every sort."""
    whole = images.jpeg(images.photo(90, 120, 1))
    broken = bytearray(whole)
    at = broken.index(b"\xff\xc4") + 5
    broken[at : at + 8] = b"\xff" * 8  # looks native, and no decoder reads it
    assert scan(bytes(broken)).native
    small = [images.jpeg(images.photo(60 + 3 * n, 90, n)) for n in range(7)] + [
        images.encode(images.photo(50, 70), "PNG")
    ]
    bad = [bytes(broken), whole[: len(whole) // 2], b"text", images.truncated(small[-1], 0.5), bytes(broken)]
    count, rows = 8 * BATCHES, 8
    special = {index: bad[index % len(bad)] for index in range(0, count, rows // 2)}
    on_error = gp.OnError("substitute", max_bad=1.0)
    resident, threads, descriptors = [], [], []
    recipe = gp.Recipe.train(size=96)
    with gp.Loader(
        Many(count, small, special),
        recipe,
        batch_size=rows,
        backend=backend,
        device="cpu",
        on_error=on_error,
        options=gp.Options(threads=2),
    ) as loader:
        for _ in loader:
            resident.append(resident_bytes())
            threads.append(threading.active_count())
            descriptors.append(len(list(Path("/proc/self/fd").iterdir())))
        met = len(loader.errors)
    return {"resident": resident, "threads": threads, "descriptors": descriptors, "bad": met, "expected": len(special)}


def main():
    faulthandler.dump_traceback_later(250, exit=True)
    folder, backend = Path(sys.argv[1]), sys.argv[2]
    found = {"failures": failures(backend), "claims": claims(backend)}
    found |= {kind: in_flight(backend, (folder / kind).read_bytes()) for kind in ("JPEG", "PNG")}
    (folder / f"found by {backend}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
