"""Where the numba backend's milliseconds go, how it scales over threads, and what its start costs.

    python benchmarks/bench_cpu_stages.py ../shared/data/photos

"stages" is CPU time of one thread, in microseconds an image, the median of several rounds over all photos: it hardly
depends on what else the machine does. "threads" is images a second of a whole Loader. "start" is, in a fresh process
and above a bare `import torch`: seconds to the first batch of 64, and the growth of its memory until then, with numba's
cache empty and full.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import interleaved, write_result

import gpupipe as gp
from gpupipe.backends import numba_cpu
from gpupipe.backends.numba_cpu.decode import widened
from gpupipe.backends.numba_cpu.scan import is_one_plain_scan
from gpupipe.headers import scan
from gpupipe.plan import make_plan
from gpupipe.records import Record

JITTER = (0.4, 0.4, 0.4, 0.1)
RECIPES = {
    f"{name} {precision}": recipe
    for precision in ("float32", "uint8")
    for name, recipe in (
        ("train", gp.Recipe.train(precision=precision)),
        ("train+jitter", gp.Recipe.train(jitter=JITTER, precision=precision)),
        ("eval", gp.Recipe.eval(precision=precision)),
    )
}


def stages(files: list[Path], recipe: gp.Recipe, rounds: int) -> dict[str, float]:
    """Microseconds of CPU time an image, by stage."""
    records = [Record(path.read_bytes(), 0, index, path.name) for index, path in enumerate(files)]
    headers = [scan(record.data) for record in records]
    sizes = [(header.height, header.width) for header in headers]
    every = range(len(files))
    plan = make_plan(recipe, seed=0, epoch=0, indices=every, sizes=sizes)
    numba_cpu._compile(recipe)
    workers = numba_cpu._Workers(recipe)
    renderer, decoder = workers.renderer, workers.decoder
    needed = [renderer.needed(plan, row) for row in every]
    regions = [widened(found, *size) for (found, _), size in zip(needed, sizes, strict=True)]
    images = torch.zeros(len(files), 3, *recipe.output_size)
    flat = [numba_cpu._flat(image) for image in images]
    views = [np.frombuffer(record.data, np.uint8) for record in records]

    def decode_all() -> None:
        for row in every:
            decoder.pixels(records[row].data, headers[row], regions[row])

    def apply_all() -> None:
        for row in every:
            workers.apply_row(records[row], headers[row], plan, row, images[row])

    def render_all() -> None:
        # The first image's pixels, again and again, would stay in the cache; so each is decoded before, unmeasured.
        for row in every:
            pixels, place = decoder.pixels(records[row].data, headers[row], regions[row])
            begin = time.thread_time()
            renderer.render(pixels, place, regions[row], needed[row][1], plan, row, flat[row])
            rendering.append(time.thread_time() - begin)

    rendering: list[float] = []
    measured: dict[str, Callable[[], object]] = {
        "read": lambda: [path.read_bytes() for path in files],
        "header": lambda: [scan(record.data) for record in records],
        "plan": lambda: make_plan(recipe, seed=0, epoch=0, indices=every, sizes=sizes),
        "region": lambda: [renderer.needed(plan, row) for row in every],
        "scan for markers": lambda: [is_one_plain_scan(view) for view in views],
        "decode": decode_all,
        "decode and render": apply_all,
    }
    found = {name: _cpu_us(function, rounds, len(files)) for name, function in measured.items()}
    for _ in range(rounds):
        render_all()
    found["decode"] -= found["scan for markers"]
    found["render"] = float(np.median(np.reshape(rendering, (rounds, -1)).mean(axis=1))) * 1e6
    return {name: round(value, 1) for name, value in found.items()}


def _cpu_us(function: Callable[[], object], rounds: int, count: int) -> float:
    function()
    taken = []
    for _ in range(rounds):
        begin = time.thread_time()
        function()
        taken.append((time.thread_time() - begin) / count)
    return float(np.median(taken)) * 1e6


def threads(photos: Path, counts: list[int], rounds: int) -> dict[str, Any]:
    """Images a second of a Loader, by number of threads."""
    source = gp.open_source(str(photos))
    loaders = {
        str(count): gp.Loader(
            source,
            RECIPES["train float32"],
            batch_size=23,
            backend="numba",
            device="cpu",
            options=gp.Options(threads=count, prefetch=4),
        )
        for count in counts
    }
    timed = interleaved(
        {name: lambda loader=loader: sum(1 for _ in loader) for name, loader in loaders.items()}, rounds
    )
    for loader in loaders.values():
        loader.close()
    return {name: round(len(source) / times["median_s"], 1) for name, times in timed.items()}


_START = """
import json, sys, time
import torch
def megabytes():
    for line in open("/proc/self/smaps_rollup"):
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
before, begin = megabytes(), time.perf_counter()
import gpupipe as gp
recipe = gp.Recipe.from_json(sys.argv[2])
loader = gp.Loader(sys.argv[1], recipe, batch_size=64, backend="numba", device="cpu", options=gp.Options(threads=2))
next(iter(loader))
print(json.dumps({"first_batch_s": time.perf_counter() - begin, "memory_mb": megabytes() - before,
                  "imports_torchvision": "torchvision" in sys.modules}))
loader.close()
"""


def start(photos: Path, recipe: gp.Recipe) -> dict[str, Any]:
    """The first batch of a fresh process, with an empty and with a full cache."""
    found = {}
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm", "warm again"):
            done = subprocess.run(
                [sys.executable, "-c", _START, str(photos), recipe.to_json()],
                env=os.environ | {"NUMBA_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            found[state] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    files = sorted(path for path in options.photos.glob("*/*") if path.is_file())
    write_result(
        "cpu_stages",
        {
            "photos": len(files),
            "stages_us": {name: stages(files, recipe, options.rounds) for name, recipe in RECIPES.items()},
            "threads_images_per_s": threads(options.photos, [1, 2, 3, 4], options.rounds),
            "start": {name: start(options.photos, RECIPES[name]) for name in ("train float32", "train+jitter uint8")},
            "load_average_at_end": round(os.getloadavg()[0], 2),
        },
    )


if __name__ == "__main__":
    main()
