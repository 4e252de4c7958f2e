"""From the start of a process to its first batch, and what the loader adds to a bare DALI pipeline.

    python benchmarks/bench_start.py ../shared/data/photos [--rounds 7]

"start": each contestant in a new process, in turn: time to its first batch of 64, and the proportional set size then.
"bare" imports torch and nothing else. Kernels are compiled, and files in the page cache, before anything is counted.
"loader over bare DALI": an epoch of the loader against the same batches, decoded, planned and fed ahead of time, run
through the same graph on DALI's CPU operators without a loader: what reading, planning and feeding cost on top.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_cpu import repeated
from harness import interleaved, summary, write_result

BATCH, WORKERS, IMAGES = 64, 2, 1000
_MEMORY = """
import pathlib, re
text = pathlib.Path("/proc/self/smaps_rollup").read_text()
print(re.search(r"Pss: +(\\d+)", text)[1])
"""
_FIRST_BATCH = """
import gpupipe as gp
loader = gp.Loader({photos!r}, gp.Recipe.train(), batch_size=64, shuffle=True, backend={backend!r}, device="cpu",
                   options=gp.Options(threads=2))
next(iter(loader))
"""
_DATALOADER = """
from torch.utils.data import DataLoader
from torchvision import transforms as t
from torchvision.datasets import ImageFolder
transform = t.Compose([t.RandomResizedCrop(224), t.RandomHorizontalFlip(), t.ToTensor(),
                       t.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])])
loader = DataLoader(ImageFolder({photos!r}, transform), batch_size=64, shuffle=True, num_workers=2)
next(iter(loader))
"""
BARE = "bare import torch"


def started(code: str) -> tuple[float, float]:
    """Seconds that a process takes for the code, and its memory in MB then (without its children's)."""
    begin = time.perf_counter()
    with subprocess.Popen(
        [sys.executable, "-c", f"{code}\nprint('there', flush=True)\n{_MEMORY}"], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        there = process.stdout.readline()
        taken_s = time.perf_counter() - begin
        memory = process.stdout.read()
    if there != "there\n" or process.returncode != 0:
        raise SystemExit(f"the process ended with status {process.returncode}:\n{code}")
    return taken_s, int(memory) / 1000


def starts(photos: Path, rounds: int) -> dict[str, Any]:
    codes = {BARE: "import torch", "DataLoader, 2 workers": _DATALOADER.format(photos=str(photos))}
    for backend in ("numba", "dali", "torchvision"):
        codes[backend] = _FIRST_BATCH.format(photos=str(photos), backend=backend)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in codes}
    for number in range(-1, rounds):
        for name in codes if number % 2 == 0 else reversed(codes):
            measured = started(codes[name])
            if number >= 0:
                found[name].append(measured)
    medians = {name: np.median(values, axis=0).tolist() for name, values in found.items()}
    return {
        name: {
            "time": summary([value[0] for value in found[name]]),
            "memory_mb": medians[name][1],
            "above_torch_s": medians[name][0] - medians[BARE][0],
            "above_torch_mb": medians[name][1] - medians[BARE][1],
        }
        for name in codes
    }


def over_bare_dali(photos: Path, rounds: int) -> dict[str, Any]:
    """Epochs of the loader, and of the backend alone on records, headers and plans that are there already."""
    import torch

    import gpupipe as gp
    from gpupipe import backends
    from gpupipe.headers import scan, upright_size

    recipe, options = gp.Recipe.train(), gp.Options(threads=WORKERS)
    source = gp.open_source(photos)
    records = [source[index] for index in range(len(source))]
    headers = [scan(record.data) for record in records]
    plan = gp.make_plan(
        recipe,
        seed=0,
        epoch=0,
        indices=np.arange(len(records)),
        sizes=[upright_size(header, "ignore") for header in headers],
    )
    parts = [slice(first, first + BATCH) for first in range(0, len(records), BATCH)]
    bare = backends.create("dali", recipe, device=torch.device("cpu"), batch_size=BATCH, options=options)
    with gp.Loader(source, recipe, batch_size=BATCH, backend="dali", device="cpu", options=options) as loader:

        def alone() -> None:
            futures = [bare.submit(records[part], headers[part], plan.take(part)) for part in parts]
            for future in futures:
                future.result()

        def whole() -> None:
            loader.set_epoch(0)  # the same plans
            for _ in loader:
                pass

        functions: dict[str, Callable[[], object]] = {"bare": alone, "loader": whole}
        times = interleaved(functions, rounds)
    bare.close()
    source.close()
    return {"times": times, "loader_over_bare_dali": times["loader"]["median_s"] / times["bare"]["median_s"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    photos = options.photos.resolve()
    with tempfile.TemporaryDirectory() as scratch:
        repeated(photos, Path(scratch), IMAGES)
        write_result("start", starts(photos, options.rounds) | over_bare_dali(Path(scratch), options.rounds))


if __name__ == "__main__":
    main()
