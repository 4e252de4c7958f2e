"""A new epoch of 10,000,000 and of 1,281,167 samples: gpupipe's order against torch's DistributedSampler.

    python benchmarks/bench_sampler.py [--samples 10000000 1281167] [--rounds 5]

Timed is `set_epoch` and everything up to the first 256 indices of a rank, for one process and for rank 0 of 8; at the
end, that both orders are equal. Memory is the peak of a fresh process (VmHWM) above that of the same process before
the epoch: torch's allocations do not show in tracemalloc.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import interleaved, write_result
from torch.utils.data import DistributedSampler

from gpupipe.sampling.samplers import DefaultOrdering, RankRows, Weighted, WeightedOrdering

FIRST = 256
KINDS = ("gpupipe", "torch")


def ours(samples: int, world_size: int, epoch: int, first: int = FIRST) -> list[int]:
    order = DefaultOrdering(samples, shuffle=True, seed=0).draw(epoch)
    rows = RankRows.deal(samples, start=0, rank=0, world_size=world_size, pad="repeat", batch_size=FIRST)
    return order.at(rows.positions(0, min(first, rows.count)))[0].tolist()


def theirs(sampler: DistributedSampler[int], epoch: int, first: int = FIRST) -> list[int]:
    sampler.set_epoch(epoch)
    return list(itertools.islice(iter(sampler), first))


def torch_sampler(samples: int, world_size: int) -> DistributedSampler[int]:
    return DistributedSampler(range(samples), num_replicas=world_size, rank=0, shuffle=True, seed=0)


def runs(samples: int, world_size: int) -> dict[str, Callable[[], object]]:
    epochs = itertools.count()
    sampler = torch_sampler(samples, world_size)
    return {
        "gpupipe": lambda: ours(samples, world_size, next(epochs)),
        "torch": lambda: theirs(sampler, next(epochs)),
    }


def peak_kib() -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1])


def measure_peak(kind: str, samples: int) -> None:
    """In a process of its own: print the peak of one epoch in KiB above what was there before."""
    runs(1000, 8)[kind]()  # whatever is set up once
    before = peak_kib()
    runs(samples, 8)[kind]()
    print(peak_kib() - before)


def peak_above_bytes(kind: str, samples: int) -> int:
    command = [sys.executable, __file__, "--peak", kind, "--samples", str(samples)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) * 1024


def measure(samples: int, rounds: int) -> dict[str, Any]:
    for world_size in (1, 8):
        sampler = torch_sampler(samples, world_size)
        if ours(samples, world_size, 3, samples) != theirs(sampler, 3, samples):
            raise SystemExit("the two orders differ: these times mean nothing")
    times = {f"world_size {size}": interleaved(runs(samples, size), rounds) for size in (1, 8)}
    array_bytes = 8 * samples
    peaks = {kind: peak_above_bytes(kind, samples) for kind in KINDS}
    weights = np.random.default_rng(0).random(samples)
    ordering = WeightedOrdering(Weighted(weights), samples, seed=0)
    generator = torch.Generator()
    weighted = {
        "gpupipe": lambda: ordering.draw(1),
        "torch": lambda: list(
            torch.utils.data.WeightedRandomSampler(torch.from_numpy(weights), samples, generator=generator)
        ),
    }
    return {
        "samples": samples,
        "times": times,
        "torch_over_gpupipe": {
            name: each["torch"]["median_s"] / each["gpupipe"]["median_s"] for name, each in times.items()
        },
        "array_bytes": array_bytes,
        "peak_above_array_bytes": {kind: peak - array_bytes for kind, peak in peaks.items()},
        "weighted": interleaved(weighted, 1, warm_up=0),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000_000, 1_281_167])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peak", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        measure_peak(options.peak, options.samples[0])
        return
    first, *others = options.samples
    measured = measure(first, options.rounds)
    write_result("sampler", measured | {"others": [measure(samples, options.rounds) for samples in others]})


if __name__ == "__main__":
    main()
