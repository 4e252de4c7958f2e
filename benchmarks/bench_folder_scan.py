"""Listing 100,000 images in 1,000 class folders: gpupipe's ImageFolder against torchvision's.

    python benchmarks/bench_folder_scan.py [--files 100000] [--classes 1000] [--rounds 11]

The files are empty, and lie in a temporary folder: what is timed is the listing alone, with the directory entries in
the operating system's cache. Memory is what the listing leaves allocated, by tracemalloc.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path

from harness import interleaved, write_result
from torchvision.datasets import ImageFolder as TorchvisionFolder

from gpupipe.sources.folder import ImageFolder


def make_tree(root: Path, files: int, classes: int) -> None:
    for number in range(classes):
        folder = root / f"n{number:08}"
        folder.mkdir()
        for image in range(number, files, classes):
            (folder / f"n{number:08}_{image}.JPEG").touch()


def left_bytes(build: Callable[[], object]) -> int:
    gc.collect()
    tracemalloc.start()
    kept = build()
    gc.collect()
    current, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    del kept
    return current


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=100_000)
    parser.add_argument("--classes", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        make_tree(root, options.files, options.classes)
        builds = {"gpupipe": lambda: ImageFolder(root), "torchvision": lambda: TorchvisionFolder(str(root))}
        times = interleaved(builds, options.rounds)
        ours = ImageFolder(root)
        theirs = [Path(path).relative_to(root).as_posix() for path, _ in TorchvisionFolder(str(root)).samples]
        if [ours.key(index) for index in range(len(ours))] != theirs:
            raise SystemExit("the two list different images: these times mean nothing")
        measured = {
            "files": options.files,
            "classes": options.classes,
            "times": times,
            "torchvision_over_gpupipe": times["torchvision"]["median_s"] / times["gpupipe"]["median_s"],
            "left_bytes_per_file": {name: left_bytes(build) / options.files for name, build in builds.items()},
        }
        write_result("folder_scan", measured)


if __name__ == "__main__":
    main()
