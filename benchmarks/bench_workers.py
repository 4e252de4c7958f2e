"""Threads or processes for the torchvision backend, and both against torchvision's own DataLoader.

    python benchmarks/bench_workers.py [--photos FOLDER] [--images 1000] [--workers 2] [--rounds 7]

The photos of an image folder are copied until there are enough, so that all of them are in the page cache, and loaded
in batches of 64 float32 images by each of:

- "dataloader pillow": ImageFolder, v1 transforms on Pillow images, DataLoader with persistent workers: the yardstick;
- "dataloader v2": the same DataLoader with torchvision's decoder and v2 transforms on uint8 tensors;
- "threads": gpupipe.Loader with the torchvision backend, as it is;
- "processes": the same work in processes that write into batches in shared memory; this exists here only.

Their workers are started before the clock; then they are timed in turn, one epoch each. "train, busy main thread" is
"train" with a loop that computes in Python for 20 ms after each batch, and so holds the GIL.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from harness import interleaved, write_result
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder as TorchvisionFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

import gpupipe as gp
from gpupipe.backends.torchvision_cpu import decode_and_apply
from gpupipe.headers import scan
from gpupipe.sources.folder import ImageFolder

BATCH = 64
ROWS_A_TASK = 8
AHEAD = 2  # batches in work besides the one that is waited for, as gpupipe's and DataLoader's default
JITTER = (0.4, 0.4, 0.4, 0.1)
YARDSTICK = "dataloader pillow"
RECIPES = {
    "train": gp.Recipe.train(),
    "train, jitter": gp.Recipe.train(jitter=JITTER),
    "eval": gp.Recipe.eval(),
}
PHOTOS = Path(__file__).resolve().parents[2] / "shared" / "data" / "photos"


def repeat_photos(source: Path, target: Path, count: int) -> None:
    found = sorted(path for path in source.glob("*/*") if path.is_file())
    for number in range(count):
        path = found[number % len(found)]
        folder = target / path.parent.name
        folder.mkdir(exist_ok=True)
        shutil.copyfile(path, folder / f"{number // len(found):04}_{path.name}")


# --- torchvision's DataLoader ---


def transforms(module: Any, name: str) -> list[Any]:
    if name == "eval":
        return [module.Resize(256), module.CenterCrop(224)]
    jitter = [module.ColorJitter(*JITTER)] if "jitter" in name else []
    return [module.RandomResizedCrop(224), module.RandomHorizontalFlip(), *jitter]


def decoded(path: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision 0.29 calls its decoders deprecated
        return decode_image(path, mode=ImageReadMode.RGB)


def data_loader(root: Path, name: str, workers: int, *, pillow: bool) -> DataLoader[Any]:
    normalize = (gp.recipe.IMAGENET_MEAN, gp.recipe.IMAGENET_STD)
    if pillow:
        steps = [*transforms(v1, name), v1.ToTensor(), v1.Normalize(*normalize)]
        dataset = TorchvisionFolder(str(root), v1.Compose(steps))
    else:
        steps = [*transforms(v2, name), v2.ToDtype(torch.float32, scale=True), v2.Normalize(*normalize)]
        dataset = TorchvisionFolder(str(root), v2.Compose(steps), loader=decoded)
    shuffle = name != "eval"
    return DataLoader(dataset, BATCH, shuffle=shuffle, num_workers=workers, persistent_workers=True)


# --- processes that write into shared batches ---


def process(tasks: Any, done: Any, slots: list[torch.Tensor], root: Path, recipe: gp.Recipe) -> None:
    torch.set_num_threads(1)
    source = ImageFolder(root)
    while (task := tasks.get()) is not None:
        slot, epoch, first_row, indices = task
        records = [source[index] for index in indices]
        headers = [scan(record.data) for record in records]
        sizes = [(header.height, header.width) for header in headers]
        plan = gp.make_plan(recipe, seed=0, epoch=epoch, indices=indices, sizes=sizes)
        for row, (record, header) in enumerate(zip(records, headers, strict=True)):
            decode_and_apply(recipe, record, header, plan, row, slots[slot][first_row + row])
        done.put((slot, len(indices)))


class Processes:
    """As little as can be: no errors, no shutdown in mid-epoch, and each batch is overwritten after AHEAD others."""

    def __init__(self, root: Path, recipe: gp.Recipe, workers: int, *, shuffle: bool) -> None:
        self.source, self.shuffle, self.epoch = ImageFolder(root), shuffle, 0
        self.slots = [torch.empty(BATCH, 3, *recipe.output_size).share_memory_() for _ in range(AHEAD + 2)]
        context = mp.get_context("spawn")
        self.tasks, self.done = context.SimpleQueue(), context.SimpleQueue()
        arguments = (self.tasks, self.done, self.slots, root, recipe)
        self.workers = [context.Process(target=process, args=arguments, daemon=True) for _ in range(workers)]
        for worker in self.workers:
            worker.start()

    def __iter__(self) -> Iterator[torch.Tensor]:
        length = len(self.source)
        generator = torch.Generator().manual_seed(self.epoch)
        order = (torch.randperm(length, generator=generator) if self.shuffle else torch.arange(length)).tolist()
        batches = [order[first : first + BATCH] for first in range(0, length, BATCH)]
        rows_done = [0] * len(self.slots)
        for number in range(len(batches) + AHEAD):
            if number < len(batches):
                slot, indices = number % len(self.slots), batches[number]
                rows_done[slot] = 0
                for first in range(0, len(indices), ROWS_A_TASK):
                    self.tasks.put((slot, self.epoch, first, indices[first : first + ROWS_A_TASK]))
            if number >= AHEAD:
                slot, rows = (number - AHEAD) % len(self.slots), len(batches[number - AHEAD])
                while rows_done[slot] < rows:
                    finished, count = self.done.get()
                    rows_done[finished] += count
                yield self.slots[slot][:rows]
        self.epoch += 1

    def close(self) -> None:
        for _ in self.workers:
            self.tasks.put(None)
        for worker in self.workers:
            worker.join()


# --- measuring ---


def epoch_of(loader: Any, busy_s: float) -> Callable[[], None]:
    def run() -> None:
        for _ in loader:
            end = time.perf_counter() + busy_s
            while time.perf_counter() < end:
                pass

    return run


def check(loader: gp.Loader, processes: Processes) -> None:
    ours = torch.cat([images for images, _ in loader])
    theirs = torch.cat([images.clone() for images in processes])
    if not torch.equal(ours.sort(dim=0).values[:, 0], theirs.sort(dim=0).values[:, 0]):
        raise SystemExit("threads and processes make different images: these times mean nothing")


def measure(root: Path, name: str, workers: int, rounds: int, busy_s: float = 0.0) -> dict[str, Any]:
    shuffle = name != "eval"
    options = gp.Options(threads=workers)
    threads = gp.Loader(root, RECIPES[name], batch_size=BATCH, shuffle=shuffle, backend="torchvision", options=options)
    processes = Processes(root, RECIPES[name], workers, shuffle=shuffle)
    check(threads, processes)
    loaders = {
        YARDSTICK: data_loader(root, name, workers, pillow=True),
        "dataloader v2": data_loader(root, name, workers, pillow=False),
        "threads": threads,
        "processes": processes,
    }
    times = interleaved({kind: epoch_of(loader, busy_s) for kind, loader in loaders.items()}, rounds)
    processes.close()
    threads.close()
    count = len(threads.dataset)
    return {
        "times": times,
        "images_per_s": {kind: count / found["median_s"] for kind, found in times.items()},
        "ratio_to_yardstick": {kind: times[YARDSTICK]["median_s"] / found["median_s"] for kind, found in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--photos", type=Path, default=PHOTOS, help="an image folder: FOLDER/class/image")
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        repeat_photos(arguments.photos, root, arguments.images)
        measured = {name: measure(root, name, arguments.workers, arguments.rounds) for name in RECIPES}
        measured["train, busy main thread"] = measure(root, "train", arguments.workers, arguments.rounds, 0.02)
    settings = {
        "images": arguments.images,
        "workers": arguments.workers,
        "batch_size": BATCH,
        "precision": "float32",
        "load_average_at_end": round(os.getloadavg()[0], 1),
    }
    write_result("workers", settings | {"recipes": measured})


if __name__ == "__main__":
    main()
