"""Epochs over remote data: direct, through the local cache for the first time and later, and staged before.

    python benchmarks/bench_cache.py               # about 8 minutes, 500 MB in the temporary folder
    python benchmarks/bench_cache.py --images 4000 --rounds 2 --remote-rounds 1 --no-peers

The store is an HTTP server of the tests on the loopback address, in a process of its own, which takes 20 ms before
each answer. 1 % of the requests stall for 2 s, and so do 3 % of the further MiB of an answer, so that packed data meets
stalls, too; which ones, a seed picks by object, part and try. The bandwidth has no limit but this machine. Images are
JPEGs of about 17 KB, one object each ("folder") or in tar shards of 250 ("tar", about 5 MB each); batches of 64,
`Recipe.train(size=64)`, numba, two threads. The shards are read in shard order with 2 lanes and windows of 250, except
where "global order" is said.

"epochs": seconds for epochs that nothing holds up, interleaved; the first epoch through the cache and the staged one
begin with an empty cache every time, and staging counts. "ratio" of later epochs: that of the seconds of a local copy
on the same disk to theirs. Peers are what people use: fsspec in a Dataset with two DataLoader workers, and webdataset.

"waits": one epoch each with a training step of 100 ms, simulated by a sleep, and how long the loop waited for each
batch; "steady" leaves out the first 30 steps. The picture, results/cache.png, shows them over time.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from harness import RESULTS, interleaved, write_result
from PIL import Image

import gpupipe as gp

REPO = Path(__file__).resolve().parent.parent
BATCH, THREADS, SIZE, CLASSES, DISTINCT, SHARD = 64, 2, 64, 10, 200, 250
LATENCY_S, STALL_S, STALL_SHARE, PART_STALL_SHARE = 0.02, 2.0, 0.01, 0.03
STEP_S, WARM_UP_STEPS, LONG_S = 0.1, 30, 0.1
SHARD_ORDER = gp.Sharding(order=gp.ShardOrder(lanes=2, window=SHARD))


def write_images(folder: Path, count: int) -> None:
    """JPEGs of 213 x 160 pixels and about 17 KB."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:160, 0:213] / 213
    files = []
    for _ in range(DISTINCT):
        waves = [np.sin(rng.uniform(2, 40) * x + rng.uniform(2, 40) * y + rng.uniform(0, 6)) for _ in range(3)]
        pixels = 128 + 80 * np.stack(waves, axis=-1) + rng.normal(0, 14, (160, 213, 3))
        out = io.BytesIO()
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=90)
        files.append(out.getvalue())
    for number in range(count):
        place = folder / f"{number % CLASSES:03}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:06}.jpg").write_bytes(files[number % DISTINCT])


class SlowStore:
    """The store as a process, which ends with the `with` block."""

    def __init__(self, root: Path) -> None:
        command = [sys.executable, "-m", "tests.remote_servers.store", str(root)]
        command += ["--latency-s", str(LATENCY_S), "--stall-s", str(STALL_S), "--stall-share", str(STALL_SHARE)]
        command += ["--part-stall-share", str(PART_STALL_SHARE)]
        self._process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.url = self._line().strip()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def given(self) -> dict[str, int]:
        """Requests and stalls since the last call."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return dict(json.loads(self._line()))

    def __enter__(self) -> SlowStore:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)


@dataclass
class Places:
    """Where everything is.

    Attributes:
        local: The data set, which the store serves; `url` in front of the same paths.
        scratch: For caches.
    """

    local: Path
    url: str
    scratch: Path
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1_000_000)))

    def new_cache(self) -> Path:
        return self.scratch / f"cache-{next(self.numbers)}"


def loader(target: str | Path, form: str, **options: Any) -> gp.Loader:
    """Over one of the forms: "folder", "tar" (shard order) or "tar, global order"."""
    place = f"{target}/{form.partition(',')[0]}"
    return gp.Loader(
        gp.open_source(place if form == "folder" else f"{place}/*.tar", **options),
        gp.Recipe.train(size=SIZE),
        batch_size=BATCH,
        shuffle=True,
        backend="numba",
        device="cpu",
        sharding=SHARD_ORDER if form == "tar" else None,
        options=gp.Options(threads=THREADS),
    )


def run(batches: Any, images: int, step_s: float = 0.0) -> list[float]:
    """Take all batches; returns how long each was waited for, in seconds.

    Raises:
        RuntimeError: An epoch of another length.
    """
    waits: list[float] = []
    count, before = 0, time.perf_counter()
    for batch in batches:
        waits.append(time.perf_counter() - before)
        count += len(batch[1])
        time.sleep(step_s)
        before = time.perf_counter()
    if count != images:
        raise RuntimeError(f"an epoch had {count} images of {images}")
    return waits


Epoch = Callable[[float], list[float]]


def kept(stack: ExitStack, images: int, made: gp.Loader) -> Epoch:
    """Epochs of one loader, one after another."""
    stack.callback(made.close)
    return lambda step_s: run(made, images, step_s)


def direct(places: Places, images: int, form: str) -> Epoch:
    def epoch(step_s: float) -> list[float]:
        made = loader(places.url, form)
        try:
            return run(made, images, step_s)
        finally:
            made.close()

    return epoch


def through_cache(places: Places, images: int, form: str, *, staged: bool = False) -> Epoch:
    """An epoch that begins with an empty cache."""

    def epoch(step_s: float) -> list[float]:
        cache = places.new_cache()
        made = loader(places.url, form, cache_dir=cache)
        try:
            if staged:
                gp.stage(made.dataset, progress=False)
            return run(made, images, step_s)
        finally:
            made.close()
            shutil.rmtree(cache, ignore_errors=True)

    return epoch


def later(stack: ExitStack, places: Places, images: int, form: str) -> Epoch:
    """Epochs over a cache that has everything."""
    made = loader(places.url, form, cache_dir=places.new_cache())
    gp.stage(made.dataset, progress=False)
    return kept(stack, images, made)


# --- what people use ---


class FsspecFolder:
    """One object for each image, read when it is asked for."""

    def __init__(self, url: str, names: list[str], transform: Any) -> None:
        self.url, self.names, self.transform = url, names, transform

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        import fsspec

        data = fsspec.filesystem("http").cat_file(f"{self.url}/{self.names[index]}")
        image = Image.open(io.BytesIO(data)).convert("RGB")
        return self.transform(image), int(self.names[index].partition("/")[0])


def transform() -> Any:
    from torchvision import transforms

    return transforms.Compose(
        [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.ToTensor()]
    )


def fsspec_peer(places: Places, images: int) -> Epoch:
    from torch.utils.data import DataLoader

    names = [path.relative_to(places.local / "folder").as_posix() for path in places.local.glob("folder/*/*.jpg")]
    data: Any = FsspecFolder(f"{places.url}/folder", names, transform())
    order = list(range(BATCH))
    # fsspec must not be used before a fork: its event loop would be the parent's.
    made: DataLoader[Any] = DataLoader(
        data,
        batch_size=BATCH,
        sampler=order,
        num_workers=THREADS,
        multiprocessing_context="forkserver",
        persistent_workers=True,
    )
    run(made, BATCH)  # starts the workers, which import torch

    def epoch(step_s: float) -> list[float]:
        order[:] = np.random.default_rng(0).permutation(images).tolist()
        return run(made, images, step_s)

    return epoch


def webdataset_peer(places: Places, images: int, *, cached: bool) -> Epoch:
    import webdataset as wds
    from torch.utils.data import DataLoader

    urls = [f"{places.url}/tar/{path.name}" for path in sorted((places.local / "tar").glob("*.tar"))]

    def epoch(step_s: float) -> list[float]:
        cache = places.new_cache() if cached else None
        if cache is not None:
            cache.mkdir()
        data = (
            wds.WebDataset(
                urls, shardshuffle=len(urls), workersplitter=wds.split_by_worker, cache_dir=cache and str(cache)
            )
            .shuffle(SHARD)
            .decode("pil")
            .to_tuple("jpg", "cls")
            .map_tuple(transform(), int)
        )
        return run(DataLoader(data, batch_size=BATCH, num_workers=THREADS), images, step_s)

    return epoch


# --- measuring ---


def epochs(contestants: dict[str, Epoch], rounds: int, images: int, warm_up: int = 1) -> dict[str, Any]:
    functions = {name: (lambda each=each: each(0.0)) for name, each in contestants.items()}
    timed = interleaved(functions, rounds, warm_up)
    return {name: {"images_per_s": round(images / times["median_s"], 1), **times} for name, times in timed.items()}


def summary_of_waits(waits: list[float]) -> dict[str, Any]:
    steady = waits[WARM_UP_STEPS:]
    return {
        "steps": len(waits),
        "first_s": waits[0],
        "steady": {
            "steps": len(steady),
            **{f"p{share}_s": float(np.percentile(steady, share)) for share in (50, 99)},
            "longest_s": max(steady),
            "share_over_100_ms": float(np.mean(np.array(steady) > LONG_S)),
        },
        "share_over_100_ms": float(np.mean(np.array(waits) > LONG_S)),
        "waited_s": sum(waits),
    }


def draw(waits: dict[str, list[float]], path: Path) -> None:
    """A row for each contestant: how long each step waited, over time."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 1.1 * len(waits) + 0.8), layout="constrained")
    rows = figure.subplots(len(waits), 1, sharey=True, sharex=True, squeeze=False)[:, 0]
    for row, (name, values) in zip(rows, waits.items(), strict=True):
        ends = np.cumsum(values) + STEP_S * np.arange(len(values))
        long = np.array(values) > LONG_S
        row.vlines(ends, 1e-4, np.maximum(values, 1e-4), color=np.where(long, "C3", "C0"), linewidth=1)
        row.axhline(LONG_S, color="0.6", linewidth=0.6)
        row.axvline(ends[min(WARM_UP_STEPS, len(ends)) - 1], color="0.6", linewidth=0.6, linestyle=":")
        row.set(yscale="log", ylim=(1e-4, 10))
        row.set_title(name, loc="left", fontsize="small", pad=2)
    rows[-1].set_xlim(0, max(sum(values) + STEP_S * len(values) for values in waits.values()))
    rows[-1].set_xlabel(f"seconds, with a step of {STEP_S * 1e3:.0f} ms for {BATCH} images; dotted: warm-up ends")
    figure.supylabel("seconds that a step waited for its batch", fontsize="small")
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=6_000)
    parser.add_argument("--rounds", type=int, default=9, help="of local and later epochs")
    parser.add_argument("--remote-rounds", type=int, default=2, help="of those that need the store")
    parser.add_argument("--no-peers", action="store_true")
    options = parser.parse_args()
    images = options.images // SHARD * SHARD
    if images < 2 * WARM_UP_STEPS * BATCH:
        parser.error(f"--images must be at least {2 * WARM_UP_STEPS * BATCH}, so that waits are seen after the warm-up")
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        data = scratch / "data"
        write_images(data / "folder", images)
        gp.pack(data / "folder", data / "tar", format="tar", options=gp.PackOptions(shard_samples=SHARD))
        store = stack.enter_context(SlowStore(data))
        places = Places(data, store.url, scratch)
        local = {
            f"local copy, {form}": kept(stack, images, loader(data, form))
            for form in ("folder", "tar", "tar, global order")
        }
        again = {
            f"later epochs, {form}": later(stack, places, images, form)
            for form in ("folder", "tar", "tar, global order")
        }
        remote = {f"direct, {form}": direct(places, images, form) for form in ("folder", "tar")}
        remote |= {f"first epoch, {form}": through_cache(places, images, form) for form in ("folder", "tar")}
        remote |= {
            f"staged first, {form}": through_cache(places, images, form, staged=True) for form in ("folder", "tar")
        }
        peers: dict[str, Epoch] = {}
        slow_peers: dict[str, Epoch] = {}  # minutes each, so once
        if not options.no_peers:
            slow_peers["fsspec in a DataLoader, folder"] = fsspec_peer(places, images)
            peers["webdataset, tar"] = webdataset_peer(places, images, cached=False)
            peers["webdataset with its cache, tar"] = webdataset_peer(places, images, cached=True)
        measured: dict[str, Any] = {
            "images": images,
            "batch_size": BATCH,
            "mean_bytes": round(float(np.mean([path.stat().st_size for path in data.glob("folder/*/*.jpg")]))),
            "latency_s": LATENCY_S,
            "stall_s": STALL_S,
            "stall_share": STALL_SHARE,
            "part_stall_share": PART_STALL_SHARE,
            "step_s": STEP_S,
            "warm_up_steps": WARM_UP_STEPS,
        }
        print("local and later epochs", file=sys.stderr)
        near = epochs(local | again, options.rounds, images)
        print("remote epochs", file=sys.stderr)
        far = epochs(remote | peers, options.remote_rounds, images, warm_up=0)
        far |= epochs(slow_peers, 1, images, warm_up=0)
        measured["epochs"] = near | far
        waits, measured["waits"] = {}, {}
        for name, epoch in (local | again | remote).items():
            print(f"waits: {name}", file=sys.stderr)
            store.given()
            waits[name] = epoch(STEP_S)
            measured["waits"][name] = {**summary_of_waits(waits[name]), **store.given()}
        measured["headline"] = headline(measured)
        measured["load_average_at_end"] = round(os.getloadavg()[0], 2)
        RESULTS.mkdir(exist_ok=True)
        draw(waits, RESULTS / "cache.png")
        write_result("cache", measured)


def headline(measured: dict[str, Any]) -> dict[str, float]:
    """The figures that gpupipe promises."""
    seconds = {name: each["median_s"] for name, each in measured["epochs"].items()}
    found = {
        f"later_over_local, {form}": round(seconds[f"local copy, {form}"] / seconds[f"later epochs, {form}"], 3)
        for form in ("folder", "tar", "tar, global order")
    }
    for name in ("direct, folder", "fsspec in a DataLoader, folder"):
        if name in seconds:
            found[f"first_epoch_with_shards_over, {name}"] = round(seconds[name] / seconds["first epoch, tar"], 2)
    found["longest_wait_after_warm_up_s, first epoch, tar"] = round(
        measured["waits"]["first epoch, tar"]["steady"]["longest_s"], 4
    )
    found["stalls_met, first epoch, tar"] = measured["waits"]["first epoch, tar"]["stalls"]
    return found


if __name__ == "__main__":
    main()
