"""Resuming at any position of an epoch against starting a fresh one, at 1.3 and 10 million samples.

    python benchmarks/bench_resume.py [--samples 1281167 10000000] [--rounds 7]

Timed is everything from `load_state_dict` to the first batch, shuffled, in a process whose libraries are loaded and
whose kernels are compiled: with a state of the beginning ("fresh"), of 10, 50 and 99 % of an epoch, and of the
middle with another batch size. "new loader": a `Loader` is made for it, as after a
restart. Every sample is the same small JPEG, so that the time is that of resuming and not of decoding. The target:
under 0.1 s above a fresh start, whatever the position.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import interleaved, write_result
from PIL import Image

import gpupipe as gp
from gpupipe.records import Record

BATCH = 64
RECIPE = gp.Recipe.train(size=64)
SHARES = (0.1, 0.5, 0.99)
TARGET_S = 0.1


class OneImage:
    """A source that has one image as often as asked for; no more of one than a loader needs."""

    columns = ()
    labels = None

    def __init__(self, samples: int) -> None:
        y, x = np.mgrid[0:96, 0:112]
        pixels = np.stack([x * 2, y * 2, x + y], axis=-1).astype(np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG")
        self._data, self._samples = out.getvalue(), samples
        self.uri, self.fingerprint = f"memory:{samples}", f"one image, {samples} times"

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Record:
        return Record(self._data, index % 1000, index, str(index), None)

    def close(self) -> None:
        """There is nothing to close."""


def make(samples: int, batch_size: int = BATCH) -> gp.Loader:
    return gp.Loader(OneImage(samples), RECIPE, batch_size=batch_size, shuffle=True, device="cpu")


def resume(loader: gp.Loader, state: dict[str, Any]) -> None:
    loader.load_state_dict(state)
    images, _ = next(iter(loader))
    assert len(images) == loader.batch_size


def measure(samples: int, rounds: int) -> dict[str, Any]:
    """Case -> times; the epoch is another one each time, so that no order is left over from the last."""
    with make(samples) as loader, make(samples, BATCH // 2) as smaller:
        state = loader.state_dict()
        epochs = iter(range(1, 1_000_000))

        def at(share: float, into: gp.Loader = loader) -> Callable[[], object]:
            delivered = int(share * samples) // BATCH * BATCH
            return lambda: resume(into, state | {"epoch": next(epochs), "delivered": delivered})

        def new() -> None:
            with make(samples) as made:
                resume(made, state | {"epoch": next(epochs), "delivered": samples // 2 // BATCH * BATCH})

        cases: dict[str, Callable[[], object]] = {
            "fresh": lambda: resume(loader, state | {"epoch": next(epochs)}),
            **{f"{share:.0%} delivered": at(share) for share in SHARES},
            "50% delivered, half the batch size": at(0.5, smaller),
            "50% delivered, new loader": new,
        }
        times = interleaved(cases, rounds)
    fresh = times["fresh"]["median_s"]
    return {
        "times": times,
        "above_fresh_s": {name: found["median_s"] - fresh for name, found in times.items() if name != "fresh"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_281_167, 10_000_000])
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    with make(BATCH) as first:
        backend = first.backend.name
        next(iter(first))  # compiles, or loads, the kernels
    measured = {str(samples): measure(samples, options.rounds) for samples in options.samples}
    worst = max(above for each in measured.values() for above in each["above_fresh_s"].values())
    write_result(
        "resume",
        {
            "batch_size": BATCH,
            "backend": backend,
            "samples": measured,
            "target_above_fresh_s": TARGET_S,
            "target_met": worst < TARGET_S,
        },
    )


if __name__ == "__main__":
    main()
