"""Whether memory, threads and descriptors stay flat: 20,000 batches of small images, and 2,000 bad files.

    python benchmarks/bench_memory.py

Each backend runs in a process of its own. "good": batches of two small JPEGs, epoch after epoch; "bad": every fourth
file is cut off, and on_error="substitute" replaces it. The first tenth warms up; growth is what the resident memory
gains from there on, in percent.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
from harness import write_result
from PIL import Image

import gpupipe as gp

BACKENDS = ("torchvision", "numba", "dali")
BATCH = 2


def write_images(folder: Path, *, bad: bool) -> None:
    rng = np.random.default_rng(0)
    (folder / "a").mkdir(parents=True)
    for number in range(40):
        path = folder / "a" / f"{number:02}.jpg"
        Image.fromarray(rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)).save(path)
        if bad and number % 4 == 0:
            path.write_bytes(path.read_bytes()[:-200])


def resident_kb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def held() -> dict[str, int]:
    gc.collect()
    return {
        "resident_kb": resident_kb(),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
    }


def run(backend: str, folder: Path, batches: int) -> dict[str, Any]:
    loader = gp.Loader(
        folder,
        gp.Recipe.train(size=16),
        batch_size=BATCH,
        shuffle=True,
        backend=backend,
        device="cpu",
        on_error="substitute",
        options=gp.Options(threads=2),
    )
    endless = itertools.chain.from_iterable(itertools.repeat(loader))
    met, before, warm = 0, 0, {}
    for number, _ in enumerate(itertools.islice(endless, batches)):
        if number == batches // 10:
            warm = held()
        if len(loader.errors) != before:
            met += max(0, len(loader.errors) - before)
            before = len(loader.errors)
    end = held()
    growth = 100 * (end["resident_kb"] / warm["resident_kb"] - 1)
    return {"batches": batches, "bad_files_met": met, "warm": warm, "end": end, "growth_percent": round(growth, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--bad-batches", type=int, default=4_000, help="a quarter of their files is bad")
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        backend, folder, batches = options.child
        print(json.dumps(run(backend, Path(folder), int(batches))))
        return
    measured: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for kind, batches in (("good", options.batches), ("bad", options.bad_batches)):
            folder = Path(scratch) / kind
            write_images(folder, bad=kind == "bad")
            for backend in BACKENDS:
                print(f"{kind}, {backend}: {batches} batches ...", file=sys.stderr)
                done = subprocess.run(
                    [sys.executable, __file__, "--child", backend, str(folder), str(batches)],
                    capture_output=True,
                    text=True,
                    check=True,
                )
                measured.setdefault(kind, {})[backend] = json.loads(done.stdout)
    write_result("memory", measured)


if __name__ == "__main__":
    main()
