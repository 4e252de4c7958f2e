"""What `gpupipe.watch` costs: microseconds a step, and the share of a run of short steps.

The loop computes in Python for a fixed count of operations, so that what watch takes makes it longer; steps of 20 ms
are shorter than any training step on images.

    python benchmarks/bench_watch.py
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import torch
from harness import interleaved, write_result

import gpupipe as gp
from gpupipe.measure.gauges import Meter

STEPS, ROUNDS = 300, 7
BARE_STEPS = 20_000


def work(rounds: int) -> None:
    total = 0
    for number in range(rounds):
        total += number


def main() -> None:
    batch = (torch.zeros(64, 3, 8, 8), torch.zeros(64))
    begin = time.perf_counter()
    work(1_000_000)
    rounds = int(1_000_000 * 0.02 / (time.perf_counter() - begin))
    bare = [batch] * BARE_STEPS
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.jsonl"

        def plain() -> None:
            for _ in [batch] * STEPS:
                work(rounds)

        def watched() -> None:
            with gp.watch([batch] * STEPS, every=100, log=log, say=lambda _: None) as loader:
                for _ in loader:
                    work(rounds)

        def bare_plain() -> None:
            for _ in bare:
                pass

        def bare_watched() -> None:
            with gp.watch(bare, every=0, log=log) as loader:
                for _ in loader:
                    pass

        times = interleaved({"plain": plain, "watched": watched}, ROUNDS)
        single = interleaved({"plain": bare_plain, "watched": bare_watched}, ROUNDS)
    meter = Meter()
    begin = time.perf_counter()
    for _ in range(100):
        meter.look()
    look_ms = (time.perf_counter() - begin) * 10
    overhead = times["watched"]["median_s"] / times["plain"]["median_s"] - 1
    a_step_us = (single["watched"]["median_s"] - single["plain"]["median_s"]) / BARE_STEPS * 1e6
    write_result(
        "watch",
        {
            "step_ms": 20,
            "share": overhead,
            "us_a_step": a_step_us,
            "ms_a_look": look_ms,
            "times": times,
            "bare": single,
        },
    )


if __name__ == "__main__":
    main()
