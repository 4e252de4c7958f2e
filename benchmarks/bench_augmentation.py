"""What training recipes with operations cost on a CPU: the torchvision and the numba backend, one thread each.

    python benchmarks/bench_augmentation.py ../shared/data/photos

CPU time from the encoded file to the finished image. "numba, handing over" is the numba backend with torchvision's
functions for its operations, which is what it does where its self-check fails: the gain that its kernels are for.
Writes results/augmentation.json.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from harness import write_result

import gpupipe as gp
from gpupipe.backends import numba_cpu
from gpupipe.backends.torchvision_cpu import decode_and_apply
from gpupipe.headers import Header, scan
from gpupipe.plan import make_plan
from gpupipe.records import Plan, Record

CROP, FLIP, NORMALIZE = gp.RandomResizedCrop(224), gp.RandomHorizontalFlip(), gp.Normalize()
SIMCLR_JITTER = gp.RandomApply((gp.ColorJitter(0.8, 0.8, 0.8, 0.2),), 0.8)
STEPS = {
    "train": (CROP, FLIP, NORMALIZE),
    "TrivialAugmentWide": (CROP, FLIP, gp.TrivialAugmentWide(), NORMALIZE),
    "TrivialAugmentWide, bilinear, erasing 0.1": (
        *(CROP, FLIP, gp.TrivialAugmentWide(interpolation="bilinear"), NORMALIZE),
        gp.RandomErasing(0.1),
    ),
    "RandAugment": (CROP, FLIP, gp.RandAugment(), NORMALIZE),
    "AutoAugment": (CROP, FLIP, gp.AutoAugment(), NORMALIZE),
    "SimCLR": (CROP, FLIP, SIMCLR_JITTER, gp.RandomGrayscale(0.2), gp.GaussianBlur(23, (0.1, 2.0)), NORMALIZE),
    "erasing 0.25 with noise": (CROP, FLIP, NORMALIZE, gp.RandomErasing(0.25, value="pixels")),
}

Apply = Callable[[Record, Header, Plan, int, torch.Tensor], None]


def cost_us(files: list[Path], recipe: gp.Recipe, rounds: int) -> dict[str, float]:
    """Microseconds of CPU time an image, by way; the ways take turns at each image."""
    records = [Record(path.read_bytes(), 0, index, path.name) for index, path in enumerate(files)]
    headers = [scan(record.data) for record in records]
    sizes = [(header.height, header.width) for header in headers]
    plan = make_plan(recipe, seed=0, epoch=0, indices=range(len(files)), sizes=sizes)
    numba_cpu._compile(recipe)
    ways: dict[str, Apply] = {
        "torchvision": partial(decode_and_apply, recipe),
        "numba, handing over": numba_cpu._Workers(recipe, own_operations=False).apply_row,
        "numba": numba_cpu._Workers(recipe).apply_row,
    }
    out = torch.zeros(3, *recipe.output_size)
    taken = {name: np.zeros((rounds, len(files))) for name in ways}
    for number in range(-1, rounds):
        for row in range(len(files)):
            for name, apply in ways.items():
                begin = time.thread_time()
                apply(records[row], headers[row], plan, row, out)
                if number >= 0:
                    taken[name][number, row] = time.thread_time() - begin
    # The median over the rounds of each image, then the mean of the images: operations differ by a factor of 100.
    return {name: round(float(np.median(times, axis=0).mean()) * 1e6, 1) for name, times in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, help="the first so many photos")
    options = parser.parse_args()
    torch.set_num_threads(1)
    files = sorted(path for path in options.photos.glob("*/*") if path.is_file())[: options.limit]
    measured = {
        f"{name} {precision}": cost_us(files, gp.Recipe(steps=steps, precision=precision), options.rounds)
        for name, steps in STEPS.items()
        for precision in ("float32", "uint8")
    }
    write_result(
        "augmentation",
        {"photos": len(files), "cpu_us": measured, "load_average_at_end": round(os.getloadavg()[0], 2)},
    )


if __name__ == "__main__":
    main()
