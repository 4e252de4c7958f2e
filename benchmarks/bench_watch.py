"""What `gpupipe.watch` costs: the share of a run of short steps, and microseconds a step.

The loop computes in Python for a fixed count of operations, so that what watch takes makes it longer; steps of 20 ms
are shorter than any training step on images. Pieces of the run of half a second are taken in turn, watched and not, and
the CPU time of each is compared with that of the one beside it: a machine changes its speed by more than watch costs.
The looks, once a second, fall into both kinds of pieces; what one takes is measured by itself, and added.

    python benchmarks/bench_watch.py
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from harness import interleaved, write_result

import gpupipe as gp
from gpupipe.measure.gauges import Meter

STEP_S, STEPS, PAIRS = 0.02, 25, 150
BARE_STEPS, BARE_ROUNDS = 20_000, 7
RESAMPLED = 10_000


def work(rounds: int) -> None:
    total = 0
    for number in range(rounds):
        total += number


def seconds(function: Callable[[], object]) -> float:
    """CPU time, of all threads."""
    begin = time.process_time()
    function()
    return time.process_time() - begin


def ratios(watched: Callable[[], object], plain: Callable[[], object]) -> list[float]:
    """Of the times of each pair; who goes first alternates."""
    found = []
    for number in range(PAIRS):
        order = (watched, plain) if number % 2 else (plain, watched)
        taken = {function: seconds(function) for function in order}
        found.append(taken[watched] / taken[plain])
    return found


def main() -> None:
    batch = (torch.zeros(64, 3, 8, 8), torch.zeros(64))
    rounds = int(1_000_000 * STEP_S / seconds(lambda: work(1_000_000)))
    bare = [batch] * BARE_STEPS
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"

        def plain() -> None:
            for _ in [batch] * STEPS:
                work(rounds)

        watch = gp.Watch(every=100, log=log, say=lambda _: None)

        def watched() -> None:
            for _ in watch([batch] * STEPS):
                work(rounds)

        def bare_plain() -> None:
            for _ in bare:
                pass

        def bare_watched() -> None:
            with gp.watch(bare, every=0, log=Path(folder) / "bare.jsonl") as loader:
                for _ in loader:
                    pass

        with watch:
            pairs = np.array(ratios(watched, plain)) - 1
        single = interleaved({"plain": bare_plain, "watched": bare_watched}, BARE_ROUNDS)
    resampled = np.median(np.random.default_rng(0).choice(pairs, (RESAMPLED, len(pairs))), axis=1)
    meter = Meter()
    look_s = seconds(lambda: [meter.look() for _ in range(100)]) / 100  # the share of a second, too
    low, high = np.percentile(resampled, (2.5, 97.5)).tolist()
    write_result(
        "watch",
        {
            "step_ms": 1e3 * STEP_S,
            "pairs": PAIRS,
            "share": float(np.median(pairs)) + look_s,
            "share_95": [low + look_s, high + look_s],
            "us_a_step": (single["watched"]["median_s"] - single["plain"]["median_s"]) / BARE_STEPS * 1e6,
            "ms_a_look": 1e3 * look_s,
            "bare": single,
        },
    )


if __name__ == "__main__":
    main()
