"""What windows and lanes of `gpupipe.ShardOrder` do to the shuffle, and what an epoch's order costs to make.

    python benchmarks/bench_shard_order.py [--samples 1281167] [--epochs 1] [--large 10000000] [--rounds 5]

Quality is `gpupipe.shuffle_quality` of a data set like ImageNet, with 1000 classes, in shards of about 1,000 and of
about 10,000 images, next to shuffling the whole data set: the worst case, with the classes one after another in the
shards, and the usual one, with the samples shuffled before they were packed. A batch is all ranks' together. "in use"
is how many shards are begun and not done with at a time, at most and over all ranks: what a cache has to hold.

Timed is the order of `--large` samples against `torch.randperm`, which the default order is. Memory is the peak of a
fresh process (VmHWM) above that of the same process before, less the array itself.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import interleaved, write_result

from gpupipe.sampling.samplers import DefaultOrdering, ShardOrder
from gpupipe.sampling.shard_order import ShardOrdering
from gpupipe.sampling.shuffle_quality import shuffle_quality

I64 = npt.NDArray[np.int64]

CLASSES, BATCH = 1000, 1024
WINDOWS = (1, 1_000, 4_096, 16_384, 100_000)
LANES = (1, 4, 16, 64)
SHARD_SAMPLES = (1_000, 10_000)
GLOBAL = "global shuffle"


def starts_of(samples: int, per_shard: int) -> I64:
    """Shards of nearly equal size."""
    return np.linspace(0, samples, max(1, round(samples / per_shard)) + 1).astype(np.int64)


def order_of(starts: I64, config: ShardOrder, epoch: int) -> I64:
    ordering = ShardOrdering(config, starts, shuffle=True, seed=0, world_size=1)
    return ordering.draw(epoch).at(np.arange(starts[-1]))[0]


def most_in_use(order: I64, starts: I64, lanes: int) -> int:
    """Shards begun and not done with; each lane for itself, as it may be another process."""
    found = np.zeros(len(order), np.int64)
    for lane in range(lanes):
        rows = np.arange(lane, len(order), lanes)
        shards = np.searchsorted(starts, order[rows], side="right") - 1
        firsts = rows[np.unique(shards, return_index=True)[1]]
        lasts = rows[len(rows) - 1 - np.unique(shards[::-1], return_index=True)[1]]
        np.add.at(found, firsts, 1)
        np.subtract.at(found, np.minimum(lasts + lanes, len(found) - 1), 1)
    return int(found.cumsum().max())


def measure(
    order: Callable[[int], I64], starts: I64, labels: dict[str, I64], lanes: int, epochs: int
) -> dict[str, Any]:
    figures: dict[str, list[float]] = {}
    for epoch in range(epochs):
        each = order(epoch)
        by_class = asdict(shuffle_quality(each, starts, batch_size=BATCH, labels=labels["in order of classes"]))
        usual = shuffle_quality(each, starts, batch_size=BATCH, labels=labels["shuffled before packing"])
        found = by_class | {
            "same_label_shuffled_before_packing": usual.same_label,
            "shards_in_use": most_in_use(each, starts, lanes),
        }
        for name, value in found.items():
            figures.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in figures.items()}


def qualities(samples: int, epochs: int) -> dict[str, dict[str, Any]]:
    labels = {"in order of classes": np.arange(samples) * CLASSES // samples}
    labels["shuffled before packing"] = np.random.default_rng(0).permutation(labels["in order of classes"])
    found: dict[str, dict[str, Any]] = {}
    for per_shard in SHARD_SAMPLES:
        starts = starts_of(samples, per_shard)
        shards = len(starts) - 1
        plain = DefaultOrdering(samples, shuffle=True, seed=0)
        rows = {GLOBAL: measure(lambda epoch: plain.draw(epoch).indices, starts, labels, 1, epochs)}  # noqa: B023
        for lanes, window in itertools.product(LANES, WINDOWS):
            config = ShardOrder(lanes=lanes, window=window)
            rows[f"lanes {lanes}, window {window}"] = measure(
                lambda epoch: order_of(starts, config, epoch),  # noqa: B023 - called before they change
                starts,
                labels,
                lanes,
                epochs,
            )
        found[f"{shards} shards"] = rows
    return found


def table(found: dict[str, dict[str, Any]]) -> str:
    lines = []
    for shards, rows in found.items():
        names = list(next(iter(rows.values())))
        lines.append(
            f"\n{shards:<28}" + "".join(f"{name.replace('_shuffled_before_packing', ', mixed'):>20}" for name in names)
        )
        lines += [f"{row:<28}" + "".join(f"{values[name]:>20.4g}" for name in names) for row, values in rows.items()]
    return "\n".join(lines)


def large(samples: int) -> dict[str, Callable[[int], object]]:
    starts = starts_of(samples, 1000)
    found: dict[str, Callable[[int], object]] = {
        "torch.randperm": lambda epoch: torch.randperm(samples, generator=torch.Generator().manual_seed(epoch)),
        "default order": DefaultOrdering(samples, shuffle=True, seed=0).draw,
    }
    for window in (1_000, ShardOrder().window, 100_000):
        config = ShardOrder(window=window)
        ordering = ShardOrdering(config, starts, shuffle=True, seed=0, world_size=1)
        found[f"shards, window {window}"] = ordering.draw
    return found


def peak_bytes() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def measure_peak(kind: str, samples: int) -> None:
    """In a process of its own: print the peak of one epoch's order above what was there before and the array."""
    small, there = large(100_000)[kind], large(samples)[kind]
    small(0)  # whatever is set up once
    before = peak_bytes()
    there(0)
    print(peak_bytes() - before - 8 * samples)


def peak_above_array_bytes(kind: str, samples: int) -> int:
    command = [sys.executable, __file__, "--peak", kind, "--large", str(samples)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=1_281_167)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--large", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        measure_peak(options.peak, options.large)
        return
    epochs = itertools.count()
    timed = {name: (lambda draw=draw: draw(next(epochs))) for name, draw in large(options.large).items()}
    times = interleaved(timed, options.rounds)
    found = qualities(options.samples, options.epochs)
    measured = {
        "samples": options.samples,
        "classes": CLASSES,
        "batch_size": BATCH,
        "epochs": options.epochs,
        "quality": found,
        "large": {
            "samples": options.large,
            "times": times,
            "over_randperm": {
                name: each["median_s"] / times["torch.randperm"]["median_s"] for name, each in times.items()
            },
            "peak_above_array_bytes": {name: peak_above_array_bytes(name, options.large) for name in timed},
        },
    }
    write_result("shard_order", measured)
    print(table(found))


if __name__ == "__main__":
    main()
