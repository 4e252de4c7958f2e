"""What all benchmarks share: interleaved timing, and results as strict JSON with the machine and the versions."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results"
SETTLE_S = 0.3
_PACKAGES = {
    "torch": "torch",
    "torchvision": "torchvision",
    "dali": "nvidia-dali-cuda120",
    "numpy": "numpy",
    "pillow": "pillow",
    "numba": "numba",
    "nvimgcodec": "nvidia-nvimgcodec-cu12",
    "spdl": "spdl",
    "webdataset": "webdataset",
    "ffcv": "ffcv",
}


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 1,
    before: Callable[[], object] | None = None,
) -> dict[str, Any]:
    """Time functions in turn, so that a change of the machine's mood hits all of them.

    Every second round runs them in reverse order.

    Args:
        functions: Name -> what to time.
        rounds: How often each is timed.
        warm_up: Rounds before those, not counted.
        before: Called before each, and not timed.

    Returns:
        Name -> {"median_s", "iqr_s", "min_s", "rounds"}.
    """
    names = list(functions)
    taken_s: dict[str, list[float]] = {name: [] for name in names}
    for number in range(-warm_up, rounds):
        for name in names if number % 2 == 0 else reversed(names):
            # Some loaders read ahead into their next epoch; that must not be paid by whoever comes after them.
            time.sleep(SETTLE_S)
            if before is not None:
                before()
            start = time.perf_counter()
            functions[name]()
            elapsed = time.perf_counter() - start
            if number >= 0:
                taken_s[name].append(elapsed)
    return {name: summary(values) for name, values in taken_s.items()}


def summary(values_s: list[float]) -> dict[str, Any]:
    """Median, interquartile range and minimum of times in seconds."""
    low, median, high = np.percentile(values_s, (25, 50, 75)).tolist()
    return {"median_s": median, "iqr_s": high - low, "min_s": min(values_s), "rounds": len(values_s)}


def write_result(name: str, measured: Mapping[str, Any]) -> Path:
    """Print and write `benchmarks/results/<name>.json`; NaN and infinity are refused, not hidden.

    Raises:
        ValueError: `measured` holds a number that is not finite.
    """
    result = {"benchmark": name, "measured": measured, "machine": machine()}
    text = json.dumps(result, indent=2, allow_nan=False)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(text + "\n")
    print(text)
    return path


def machine() -> dict[str, Any]:
    """The hardware and the versions that a figure belongs to; nothing that names the machine or its user."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "system": platform.system(),
        "python": platform.python_version(),
        **{name: _version(package) for name, package in _PACKAGES.items()},
        "gpu": _gpu(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _gpu() -> str | None:
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    try:
        driver = re.search(r"\s(\d{3,}\.[\d.]+)\s", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        driver = None
    version = "unknown" if driver is None else driver[1]
    return f"{torch.cuda.get_device_name()}, driver {version}, torch's CUDA {torch.version.cuda}"
