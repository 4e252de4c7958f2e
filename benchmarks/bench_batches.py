"""What mixing a batch and several views of an image cost, in CPU time.

    python benchmarks/bench_batches.py [--rounds 3] [--photos ../shared/data/photos]

Mixing: a batch of 64 images of 224 x 224 float32 with 1,000 classes, on one thread, against torchvision's transforms.
Views: milliseconds of CPU for each image, of the whole process, over an epoch of `gp.Views` and of the same recipes in
loaders of their own: two views with jitter (SimCLR), and two large and six small ones (DINO).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import write_result
from torchvision.transforms import v2

import gpupipe as gp
from gpupipe.mixing import Mixture, mix_images, soft_labels

ROWS, CLASSES, IMAGES = 64, 1000, 256
JITTER = (0.8, 0.8, 0.8, 0.2)
LARGE = gp.Recipe.train(size=224, jitter=JITTER)
SMALL = gp.Recipe.train(size=96, scale=(0.05, 0.3), jitter=JITTER)
SETS = {"two views": (LARGE,) * 2, "two large and six small": (LARGE,) * 2 + (SMALL,) * 6}


def cpu_ms(function: Callable[[], object], rounds: int) -> float:
    """Median of the thread's CPU time, after a warm-up."""
    taken = []
    for _ in range(rounds + 1):
        start = time.thread_time()
        function()
        taken.append(1e3 * (time.thread_time() - start))
    return float(np.median(taken[1:]))


def mixing(rounds: int) -> dict[str, dict[str, float]]:
    torch.set_num_threads(1)
    images, labels = torch.randn(ROWS, 3, 224, 224), torch.randint(CLASSES, (ROWS,))
    usable = np.ones(ROWS, np.bool_)

    def own(mixture: Mixture) -> None:
        mix_images(images, mixture, usable)
        soft_labels(labels, mixture, usable, CLASSES)

    mix_up, cut_mix = v2.MixUp(num_classes=CLASSES), v2.CutMix(num_classes=CLASSES)
    return {
        "MixUp": {
            "gpupipe": cpu_ms(lambda: own(Mixture(0.3)), rounds),
            "torchvision": cpu_ms(lambda: mix_up(images, labels), rounds),
        },
        "CutMix, half of the area": {
            "gpupipe": cpu_ms(lambda: own(Mixture(0.5, (33, 33, 158, 158))), rounds),
            "torchvision": cpu_ms(lambda: cut_mix(images, labels), rounds),
        },
    }


def epoch_ms(source: Any, recipe: gp.Recipe | gp.Views, backend: str) -> float:
    """CPU time of one image of an epoch, the process's."""
    order = [index % len(source) for index in range(IMAGES)]
    with gp.Loader(source, recipe, batch_size=32, sampler=order, backend=backend, device="cpu") as loader:
        next(iter(loader))
        loader.set_epoch(0)
        start = time.process_time()
        for _ in loader:
            pass
        return 1e3 * (time.process_time() - start) / IMAGES


def views(source: Any, backend: str, rounds: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, list[float]]] = {name: {"together": [], "apart": []} for name in SETS}
    for _ in range(rounds):
        alone = {recipe: epoch_ms(source, recipe, backend) for recipe in (LARGE, SMALL)}
        for name, recipes in SETS.items():
            found[name]["together"].append(epoch_ms(source, gp.Views(*recipes), backend))
            found[name]["apart"].append(sum(alone[recipe] for recipe in recipes))
    return {name: {way: float(np.median(taken)) for way, taken in both.items()} for name, both in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--photos", type=Path, default=Path(__file__).parents[2] / "shared" / "data" / "photos")
    arguments = parser.parse_args()
    source = gp.open_source(arguments.photos)
    measured = {
        "mixing_ms": mixing(max(arguments.rounds, 5)),
        "views_ms_an_image": {name: views(source, name, arguments.rounds) for name in ("numba", "torchvision", "dali")},
    }
    write_result("batches", measured)


if __name__ == "__main__":
    main()
