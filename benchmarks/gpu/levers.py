"""What the levers do, one at a time and then the best of each together, and which setting is best on this machine.

First decoding alone, whose levers are DALI's; then the loader, whose levers are gpupipe's options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

from gpu.common import Setup, native, run_through
from gpu.throughput import exact
from harness import interleaved

MIB = 1 << 20
# The first value of each is gpupipe's, or DALI's where gpupipe sets none.
DECODER: dict[str, tuple[Any, ...]] = {
    "engine": (0.0, 0.65, 1.0),
    "preallocate": (0, 1024),
    "device_memory_padding": (16 * MIB, 0, 64 * MIB),
    "host_memory_padding": (8 * MIB, 0, 32 * MIB),
    "hybrid_huffman_threshold": (1_000_000, 1, 100_000_000),
    "depth": (2, 3),
}
PREFETCH = (2, 3, 4)


def decoder_setting(setting: Mapping[str, Any]) -> dict[str, Any]:
    """One that `native` takes: a side that is preallocated is two arguments of DALI."""
    others = {name: value for name, value in setting.items() if name != "preallocate"}
    side = setting["preallocate"]
    return others | ({"preallocate_width_hint": side, "preallocate_height_hint": side} if side else {})


def thread_counts(at: Setup) -> tuple[int, ...]:
    """As many as workers, a half and a quarter of it, and a half more."""
    found = (at.workers, at.workers // 2, at.workers // 4, at.workers * 3 // 2)
    return tuple(dict.fromkeys(max(1, count) for count in found))


def swept(
    at: Setup,
    levers: Mapping[str, tuple[Any, ...]],
    make: Callable[[dict[str, Any], ExitStack], Callable[[], object]],
) -> dict[str, Any]:
    """Every value of every lever beside the others' first; then the best of each together against all first ones."""
    first = {name: values[0] for name, values in levers.items()}
    images = len(at.paths())
    by_lever: dict[str, Any] = {}
    best = dict(first)

    def timed(settings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
        with ExitStack() as stack:  # nobody's memory is held for longer
            return interleaved({name: make(setting, stack) for name, setting in settings.items()}, at.rounds)

    for name, values in levers.items():
        times = timed({str(value): first | {name: value} for value in values})
        by_lever[name] = {value: images / each["median_s"] for value, each in times.items()}
        best[name] = min(values, key=lambda value, times=times: times[str(value)]["median_s"])
    times = timed({"first": first, "best of each": best})
    speeds = {name: images / each["median_s"] for name, each in times.items()}
    return {
        "images_per_s": by_lever,
        "best": best if speeds["best of each"] > speeds["first"] else first,
        "together_images_per_s": speeds,
    }


def decoder(at: Setup, setting: Mapping[str, Any], stack: ExitStack) -> Callable[[], object]:
    made = native(at, train=False, **decoder_setting(setting))
    stack.callback(made.close)
    return made


def loader(at: Setup, setting: Mapping[str, Any], stack: ExitStack) -> Callable[[], object]:
    made = exact(at, stack, **setting)
    return lambda: run_through(made, at.synchronize)


def measure(at: Setup) -> dict[str, Any]:
    threads = thread_counts(at)
    decoding = swept(at, DECODER | {"threads": threads}, partial(decoder, at))
    levers = {"decode": ("gpu", "hardware", "cpu"), "threads": threads, "prefetch": PREFETCH}
    loading = swept(at, levers, partial(loader, at))
    best = loading["best"]
    options = ", ".join(f"{name}={best[name]!r}" for name in ("threads", "prefetch", "decode"))
    print(f"best here: gp.Options({options})")
    return {"batch_size": at.batch, "workers": at.workers, "decode_only": decoding, "loader": loading}
