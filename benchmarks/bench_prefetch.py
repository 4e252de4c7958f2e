"""What gpupipe.prefetch gains over a plain loop: batches made, and moved, while the step before runs.

    python benchmarks/bench_prefetch.py [--rounds 5] [--batches 40]

Producer and consumer take about equally long, the case in which most can be gained: at best half of the plain loop's
time. "waiting": both sleep, as for a disk and a GPU; what is left is the overhead of prefetch itself. "working": the
producer gathers rows of a large array into a batch, the consumer multiplies matrices on one thread; both use a core,
memory and, in between, Python's lock. The peer is a torch DataLoader with one worker process, started in each pass, and
one with persistent workers.

With a GPU, "to the GPU" compares a plain loop with `.to(device)`, one with pinned memory and non_blocking copies on the
same stream, and prefetch, with a matrix product on the GPU for a step. Without one that part is null.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from harness import interleaved, write_result
from torch.utils.data import DataLoader, IterableDataset

import gpupipe as gp

STEP_S = 0.01
ROWS, WIDTH = 64, 3 * 96 * 96


class Waiting(IterableDataset[torch.Tensor]):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        for _ in range(self.batches):
            time.sleep(STEP_S)
            yield torch.zeros(1)


class Working(IterableDataset[torch.Tensor]):
    def __init__(self, batches: int) -> None:
        self.batches = batches
        self.store = np.random.default_rng(0).random((2048, WIDTH), np.float32)

    def __iter__(self) -> Iterator[torch.Tensor]:
        random = np.random.default_rng(1)
        for _ in range(self.batches):
            rows = self.store[random.integers(0, len(self.store), ROWS)]
            np.sqrt(rows, out=rows)
            yield torch.from_numpy(rows)


def matrix_step(seconds: float) -> Callable[[torch.Tensor], object]:
    """Products of matrices that take about this long on one thread."""
    matrix = torch.rand(256, 256)
    start = time.perf_counter()
    for _ in range(50):
        matrix @ matrix
    count = max(1, round(seconds / ((time.perf_counter() - start) / 50)))

    def step(batch: torch.Tensor) -> object:
        for _ in range(count):
            matrix @ matrix
        return batch

    return step


def taken(batches: Iterable[torch.Tensor], step: Callable[[torch.Tensor], object]) -> Callable[[], None]:
    def run() -> None:
        for batch in batches:
            step(batch)

    return run


def compare(data: Waiting | Working, step: Callable[[torch.Tensor], object], rounds: int) -> dict[str, Any]:
    one_worker: dict[str, Any] = {"batch_size": None, "num_workers": 1, "prefetch_factor": 2}
    found = interleaved(
        {
            "plain loop": taken(data, step),
            **{f"prefetch, depth {depth}": taken(gp.prefetch(data, "cpu", depth), step) for depth in (1, 2, 4)},
            "DataLoader, 1 worker": taken(DataLoader(data, **one_worker), step),
            "DataLoader, 1 persistent worker": taken(DataLoader(data, persistent_workers=True, **one_worker), step),
        },
        rounds,
    )
    plain = found["plain loop"]["median_s"]
    return {name: {**times, "share_of_plain": times["median_s"] / plain} for name, times in found.items()}


def to_the_gpu(batches: int, rounds: int) -> dict[str, Any] | None:
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    data = [torch.rand(256, 3, 224, 224) for _ in range(4)]
    matrix = torch.rand(8192, 8192, device=device)

    def source() -> Iterator[torch.Tensor]:
        for number in range(batches):
            yield data[number % len(data)]

    def loop(moved: Callable[[], Iterable[torch.Tensor]]) -> Callable[[], None]:
        def run() -> None:
            for batch in moved():
                matrix @ matrix
                batch.mean()
            torch.cuda.synchronize()

        return run

    return interleaved(
        {
            "plain loop, pageable": loop(lambda: (batch.to(device) for batch in source())),
            "plain loop, pinned": loop(
                lambda: (batch.pin_memory().to(device, non_blocking=True) for batch in source())
            ),
            "prefetch": loop(lambda: gp.prefetch(source(), device)),
            "no copies": loop(lambda: (matrix for _ in range(batches))),
        },
        rounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batches", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    working = Working(options.batches)
    start = time.perf_counter()
    for _ in working:
        pass
    made_s = (time.perf_counter() - start) / options.batches
    write_result(
        "prefetch",
        {
            "batches": options.batches,
            "waiting": compare(Waiting(options.batches), lambda _: time.sleep(STEP_S), options.rounds),
            "working": {"producer_ms": made_s * 1e3, **compare(working, matrix_step(made_s), options.rounds)},
            "to the GPU": to_the_gpu(options.batches, options.rounds),
        },
    )


if __name__ == "__main__":
    main()
