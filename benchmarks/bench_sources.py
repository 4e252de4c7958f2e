"""Images a second from each kind of source, against what people use for it, and what they ask of the system.

    python benchmarks/bench_sources.py             # about 10 minutes, 400 MB in the temporary folder
    python benchmarks/bench_sources.py --images 2000 --rounds 2

20,000 small JPEGs (about 4 KB, so that opening files matters), batches of 128, `Recipe.train(size=64)`, two workers:
gpupipe's numba backend from each of its sources, and torchvision's transforms on Pillow images in a DataLoader from a
folder, from the same tar shards through webdataset, and from LMDB. "warm": everything in the page cache. "cold": the
kernel is asked to drop the files' pages before every epoch (posix_fadvise), which it does for clean pages.

"opens" and "system calls" an image: counted by strace, if it is installed, over an epoch of its own in a fresh process,
less what the start costs (an epoch of a tenth of the images).
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import interleaved, write_result
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

import gpupipe as gp
from gpupipe.steps.colour import IMAGENET_MEAN, IMAGENET_STD

BATCH, WORKERS, SIZE, CLASSES, DISTINCT = 128, 2, 64, 100, 200
Epoch = Callable[[], object]


def write_images(folder: Path, count: int) -> None:
    """JPEGs of 96 x 112 pixels and about 4 KB, in 100 classes."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:96, 0:112] / 112
    files = []
    for _ in range(DISTINCT):
        waves = [np.sin(rng.uniform(2, 40) * x + rng.uniform(2, 40) * y + rng.uniform(0, 6)) for _ in range(3)]
        pixels = 128 + 80 * np.stack(waves, axis=-1) + rng.normal(0, 14, (96, 112, 3))
        out = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=80)
        files.append(out.getvalue())
    for number in range(count):
        place = folder / f"{number % CLASSES:03}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06}.jpg").write_bytes(files[number % DISTINCT])


def stored(scratch: Path, count: int) -> dict[str, Path]:
    """The same images in every form; one that is there already is left alone."""
    forms = {name: scratch / name for name in ("folder", "tar", "lmdb", "memmap", "memmap-raw")}
    if not forms["folder"].exists():
        write_images(forms["folder"], count)
    for name, path in forms.items():
        if name != "folder":
            options = gp.PackOptions(raw=name == "memmap-raw", shard_samples=max(1, count // 20), shuffle=0)
            gp.pack(forms["folder"], path, format=name.partition("-")[0], options=options)
    # py-lmdb refuses to open an environment again in a process that was forked from one which has it open.
    forms["lmdb-peer"] = scratch / "lmdb-peer"
    if not forms["lmdb-peer"].exists():
        shutil.copytree(forms["lmdb"], forms["lmdb-peer"])
    return forms


# --- gpupipe ---


def ours(target: Path, stack: ExitStack, **sharding: Any) -> Epoch:
    loader = gp.Loader(
        target,
        gp.Recipe.train(size=SIZE),
        batch_size=BATCH,
        shuffle=True,
        backend="numba",
        device="cpu",
        sharding=gp.Sharding(**sharding),
        options=gp.Options(threads=WORKERS),
    )
    stack.callback(loader.close)
    return lambda: count_all(loader)


# --- what people use ---

TRANSFORM = transforms.Compose(
    [
        transforms.RandomResizedCrop(SIZE),
        transforms.RandomHorizontalFlip(),
        transforms.ToTensor(),
        transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD),
    ]
)


def dataloader(dataset: Any, stack: ExitStack, **arguments: Any) -> Epoch:
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=BATCH, num_workers=WORKERS, persistent_workers=True, **arguments
    )
    stack.callback(lambda: setattr(loader, "_iterator", None))
    return lambda: count_all(loader)


def torchvision_folder(forms: dict[str, Path], stack: ExitStack) -> Epoch:
    from torchvision.datasets import ImageFolder

    return dataloader(ImageFolder(str(forms["folder"]), TRANSFORM), stack, shuffle=True)


def webdataset(forms: dict[str, Path], stack: ExitStack) -> Epoch:
    import webdataset as wds

    shards = sorted(str(path) for path in forms["tar"].glob("*.tar"))
    dataset = (
        wds.WebDataset(shards, shardshuffle=len(shards), workersplitter=wds.split_by_worker, empty_check=False)
        .shuffle(1000)
        .decode("pil")
        .to_tuple("jpg", "cls")
        .map_tuple(TRANSFORM, int)
    )
    return dataloader(dataset, stack)


class LmdbDataset(Dataset[tuple[torch.Tensor, int]]):
    """As most projects write it: keys in a list, one environment for each worker."""

    def __init__(self, path: Path) -> None:
        source = gp.open_source(path)
        self.path = str(next(path.rglob("data.mdb")).parent)
        self.keys = [source.key(index).encode() for index in range(len(source))]
        self.labels = source.labels.tolist()
        self.environment: Any = None

    def __len__(self) -> int:
        return len(self.keys)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        import lmdb

        if self.environment is None:
            self.environment = lmdb.open(self.path, readonly=True, lock=False, readahead=False)
        with self.environment.begin() as transaction:
            data = transaction.get(self.keys[index])
        return TRANSFORM(Image.open(io.BytesIO(data)).convert("RGB")), self.labels[index]


def lmdb_dataloader(forms: dict[str, Path], stack: ExitStack) -> Epoch:
    return dataloader(LmdbDataset(forms["lmdb-peer"]), stack, shuffle=True)


CONTESTANTS: dict[str, Callable[[dict[str, Path], ExitStack], Epoch]] = {
    "torchvision ImageFolder, DataLoader": torchvision_folder,
    "webdataset, DataLoader": webdataset,
    "LMDB, DataLoader": lmdb_dataloader,
    "gpupipe folder": lambda forms, stack: ours(forms["folder"], stack),
    "gpupipe tar, random": lambda forms, stack: ours(forms["tar"], stack),
    "gpupipe tar, shard order": lambda forms, stack: ours(forms["tar"], stack, order="shards"),
    "gpupipe LMDB": lambda forms, stack: ours(forms["lmdb"], stack),
    "gpupipe memmap": lambda forms, stack: ours(forms["memmap"], stack),
    "gpupipe memmap of pixels": lambda forms, stack: ours(forms["memmap-raw"], stack),
}


def count_all(batches: Any) -> int:
    return sum(len(images) for images, _ in batches)


def files_below(forms: dict[str, Path]) -> Iterator[Path]:
    for form in forms.values():
        yield from (path for path in form.rglob("*") if path.is_file())


def drop_pages(forms: dict[str, Path]) -> None:
    for path in files_below(forms):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


# --- what they ask of the system ---


def traced(name: str, scratch: Path, images: int) -> dict[str, int]:
    """System calls of one epoch in a fresh process: all of them, and those that open files."""
    summary = scratch / "calls.txt"
    strace = ["strace", "-f", "-c", "-U", "name,calls", "-o", str(summary)]
    epoch = [sys.executable, __file__, "--one", name, "--scratch", str(scratch), "--images", str(images)]
    subprocess.run([*strace, *epoch], check=True, capture_output=True)
    calls = {}
    for line in summary.read_text().splitlines():
        parts = line.split()
        if len(parts) == 2 and parts[1].isdecimal():
            calls[parts[0]] = int(parts[1])
    total = calls.pop("total", sum(calls.values()))
    return {"calls": total, "opens": sum(count for call, count in calls.items() if call.startswith("open"))}


def calls_per_image(scratch: Path, images: int) -> dict[str, Any] | str:
    if shutil.which("strace") is None:
        return "missing: strace is not installed"
    large, small = scratch / "many", scratch / "few"
    stored(large, images)
    stored(small, images // 10)
    found: dict[str, Any] = {}
    for name in CONTESTANTS:
        print(f"system calls: {name}", file=sys.stderr)
        many, start = traced(name, large, images), traced(name, small, images // 10)
        found[name] = {what: round((many[what] - start[what]) / (images - images // 10), 2) for what in many}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scratch", type=Path, help="keep the data sets there")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        with ExitStack() as stack:
            CONTESTANTS[options.one](stored(options.scratch, options.images), stack)()
        return
    with ExitStack() as stack:
        scratch = options.scratch or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        forms = stored(scratch, options.images)
        functions, missing = {}, {}
        for name, make in CONTESTANTS.items():
            try:
                functions[name] = make(forms, stack)
            except (ImportError, gp.GpupipeError) as error:
                missing[name] = str(error)
        measured: dict[str, Any] = {"images": options.images, "batch_size": BATCH, "workers": WORKERS}
        for state, before in (("warm", None), ("cold", lambda: drop_pages(forms))):
            print(f"{state}: {options.rounds} rounds", file=sys.stderr)
            timed = interleaved(functions, options.rounds, before=before)
            yardstick = timed["torchvision ImageFolder, DataLoader"]["median_s"]
            measured[state] = {
                name: {
                    "images_per_s": round(options.images / times["median_s"], 1),
                    "ratio": round(yardstick / times["median_s"], 3),
                    **times,
                }
                for name, times in timed.items()
            }
        measured["bytes"] = {
            name: sum(path.stat().st_size for path in files_below({name: form})) for name, form in forms.items()
        }
        measured["per_image"] = calls_per_image(scratch, min(options.images, 2000))
        measured["missing"] = missing
        measured["load_average_at_end"] = round(os.getloadavg()[0], 2)
        write_result("sources", measured)


if __name__ == "__main__":
    main()
