"""A slow loader, made fast by doing what `gpupipe.diagnose` says, one finding after another.

The start is a common one: an ImageFolder of images of very different sizes, a DataLoader with one worker,
made anew in every epoch. Each round trains for some epochs (a step takes a fixed 15 ms), diagnoses the log, and applies
the first finding's fix; it ends when nothing is found, or nothing is left to apply. The gain after each is in
images a second of the whole run, epochs' beginnings included.

    python benchmarks/bench_slow_loader.py [--images 1200] [--epochs 4]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import RESULTS, write_result
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

import gpupipe as gp
from gpupipe.parallel import usable_cores

STEP_S = 0.015
BATCH = 32
SIZE = 96
# Of the images' sides: log-normal mean and sigma, limits in pixels. Most are small, some are huge.
SIDES = (4.8, 0.8, 48, 2000)


@dataclass(frozen=True)
class Setting:
    """How the data are loaded."""

    library: str = "torch"
    workers: int = 1
    keep_workers: bool = False
    cost_aware: bool = False
    packed: bool = False

    def __str__(self) -> str:
        if self.library == "torch":
            return f"DataLoader, {self.workers} worker{'s' * (self.workers > 1)}, " + (
                "kept" if self.keep_workers else "made anew in each epoch"
            )
        return "gpupipe.Loader" + ", cost-aware" * self.cost_aware + ", packed" * self.packed


def fixes(cores: int) -> dict[str, Callable[[Setting], Setting]]:
    """What each finding asks for."""
    return {
        "late-epochs": lambda s: replace(s, keep_workers=True),
        "rising-processes": lambda s: replace(s, keep_workers=True),
        "too-few-workers": lambda s: replace(s, workers=cores),
        "decode-bound": lambda s: replace(s, library="gpupipe"),
        "oversubscribed": lambda s: replace(s, workers=cores),
        "blocked-reads": lambda s: replace(s, workers=2 * cores) if s.library == "torch" else replace(s, packed=True),
        "small-reads": lambda s: replace(s, library="gpupipe", packed=True),
        "cost-swing": lambda s: replace(s, library="gpupipe", cost_aware=True),
    }


def train(setting: Setting, folder: Path, packed: Path, epochs: int, log: Path) -> gp.WatchReport:
    """Some epochs, watched."""
    with gp.Watch(every=0, log=log, resources_s=0.2) as watch:
        if setting.library == "gpupipe":
            source = gp.open_source(packed if setting.packed else folder)
            order: dict[str, Any] = {"sampler": gp.CostAware("pixels")} if setting.cost_aware else {"shuffle": True}
            with gp.Loader(source, gp.Recipe.train(size=SIZE), batch_size=BATCH, **order) as loader:
                for _ in range(epochs):
                    steps(watch(loader))
            source.close()
            return watch.report()
        loader = None
        for _ in range(epochs):
            if loader is None or not setting.keep_workers:
                loader = data_loader(folder, setting)
            steps(watch(loader))
        return watch.report()


def data_loader(folder: Path, setting: Setting) -> DataLoader:  # type: ignore[type-arg]
    transform = v2.Compose(
        [
            v2.RandomResizedCrop(SIZE),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    return DataLoader(
        ImageFolder(folder, transform),
        batch_size=BATCH,
        shuffle=True,
        num_workers=setting.workers,
        persistent_workers=setting.keep_workers,
        # As a program does that imports its model, its data and its configuration in each worker.
        multiprocessing_context="spawn",
    )


def steps(batches: Any) -> None:
    for _ in batches:
        time.sleep(STEP_S)


def make_images(folder: Path, n: int) -> None:
    rng = np.random.default_rng(0)
    mean, sigma, least, most = SIDES
    for number in range(n):
        height, width = (int(np.clip(rng.lognormal(mean, sigma), least, most)) for _ in range(2))
        coarse = rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
        path = folder / f"class{number % 10}" / f"{number:05d}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((width, height)).save(path, quality=90)


def draw(rounds: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 0.7 * len(rounds) + 1.4), layout="constrained")
    axes = figure.subplots()
    names = [f"{each['setting']}\n{each['finding'] or 'nothing found'}" for each in rounds]
    speeds = [each["images_per_s"] for each in rounds]
    bars = axes.barh(names, speeds, color=[f"C{number}" for number in range(len(rounds))])
    gains = [
        f"{speed:.0f} ({speed / speeds[0]:.1f}x), waits {100 * each['waited']:.0f} %"
        for speed, each in zip(speeds, rounds, strict=True)
    ]
    axes.bar_label(bars, gains, padding=4)
    axes.set(xlabel="images / s over whole epochs", title="doing what gpupipe.diagnose says, one finding after another")
    axes.margins(x=0.3)
    axes.invert_yaxis()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=1200)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--only-look", action="store_true", help="write no result")
    arguments = parser.parse_args()
    cores = usable_cores()
    known = fixes(cores)
    with tempfile.TemporaryDirectory() as name:
        folder, packed = Path(name) / "images", Path(name) / "packed"
        make_images(folder, arguments.images)
        gp.pack(folder, packed)
        setting, rounds = Setting(), []
        while True:
            log = Path(name) / f"round{len(rounds)}.jsonl"
            report = train(setting, folder, packed, arguments.epochs, log)
            diagnosis = gp.diagnose(log)
            print(f"\n=== {setting}\n{report}\n{diagnosis}", file=sys.stderr, flush=True)
            finding = next((each for each in diagnosis.findings if each.code in known), None)
            rounds.append(
                {
                    "setting": str(setting),
                    "images_per_s": report.samples_per_s,
                    "waited": report.waited,
                    "found": [each.code for each in diagnosis.findings],
                    "finding": None if finding is None else finding.code,
                    "fix": None if finding is None else finding.fix,
                }
            )
            changed = setting if finding is None else known[finding.code](setting)
            if changed == setting or len(rounds) > 8:
                break
            setting = changed
    first, last = rounds[0]["images_per_s"], rounds[-1]["images_per_s"]
    ceiling = BATCH / STEP_S
    measured = {"rounds": rounds, "gain": last / first, "step_s": STEP_S, "images_per_s_without_waiting": ceiling}
    if arguments.only_look:
        return
    write_result("slow_loader", measured)
    draw(rounds, RESULTS / "slow_loader.png")


if __name__ == "__main__":
    main()
