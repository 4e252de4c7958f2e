"""What was set out to be reached, and what was measured: every target beside its figure, peers included.

    python benchmarks/performance_table.py

Figures come from the files in benchmarks/results and from nowhere else; what no benchmark has measured is "missing",
with the command that measures it. Ratios are to ImageFolder + Pillow + DataLoader with two workers, in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import readme_tables
from readme_tables import CPU_ROWS, RECIPES, TARGETS, table

MISSING = "missing"

# Peers on two cores, as they were found before gpupipe was written: ratios to the yardstick, by recipe.
NOTED: dict[str, tuple[float | None, float | None, float | None]] = {
    "torchvision + Pillow, DataLoader": (1.0, 1.0, 1.0),
    "torchvision v2 tensors, DataLoader": (1.35, 0.93, 1.50),
    "DALI's own operators": (1.52, 1.63, 1.41),
    "SPDL, threads": (1.00, 0.87, 1.06),
    "FFCV, JPEG": (1.34, 1.21, 1.61),
    "FFCV, half raw, at most 500 px": (1.77, None, 2.05),
    "webdataset, DataLoader": (0.80, 0.92, 0.86),
    "litData": (0.91, 1.02, 1.01),
    "MosaicML Streaming": (0.85, 0.87, 0.87),
    "LMDB + DataLoader": (0.94, 1.01, 1.02),
    "DALI's torchvision API, DataLoader": (0.77, 0.92, 0.55),
}


@dataclass(frozen=True, slots=True)
class Target:
    """One figure that has to hold.

    Attributes:
        what: In words.
        sense: What the bound is.
        bound: The number it is compared with.
        unit: Behind both.
        script: What measures it.
        find: From the results to the figure.
    """

    what: str
    sense: Literal["at least", "at most"]
    bound: float
    unit: str
    script: str
    find: Callable[[], float]

    def row(self) -> list[str]:
        """What, target, measured, verdict."""
        shown = f"{self.sense} {self.bound:,g}{self.unit}"
        try:
            found = self.find()
        except (KeyError, FileNotFoundError):
            return [self.what, shown, MISSING, f"`{self.script}`"]
        met = found >= self.bound if self.sense == "at least" else found <= self.bound
        digits = ",.0f" if abs(found) >= 1e5 else ".3g"
        return [self.what, shown, f"{found:{digits}}{self.unit}", verdict(met)]


def verdict(met: bool) -> str:  # noqa: FBT001 - one word for one fact
    """What a comparison came to."""
    return "met" if met else "**not met**"


def result(name: str) -> Any:
    """What a benchmark measured.

    Raises:
        FileNotFoundError: It has not been run.
    """
    return readme_tables.result(name)


def on_the_cpu() -> dict[str, Any]:
    """Recipe -> contestant -> figures."""
    try:
        found: dict[str, Any] = result("cpu")["recipes"]
    except FileNotFoundError:
        return {recipe: {} for recipe in RECIPES}
    return found


def peers() -> str:
    """Peers: what is measured now, and in brackets what was noted before."""
    measured = on_the_cpu()
    rows = []
    for name, noted in NOTED.items():
        cells = []
        for recipe, before in zip(RECIPES, noted, strict=True):
            found = measured[recipe].get(name, {}).get("ratio")
            cells.append(
                f"{MISSING if found is None else f'{found:.2f}'} ({'-' if before is None else f'{before:.2f}'})"
            )
        rows.append([name, *cells])
    absent = {name: why for recipe in RECIPES for name, why in measured[recipe].get("missing", {}).items()}
    said = "".join(f"\n{name} did not take part: {why}" for name, why in absent.items())
    return table(["ratio to the yardstick, measured (noted before)", *RECIPES], rows) + said


def targets() -> str:
    """gpupipe's own, on a CPU."""
    measured = on_the_cpu()
    names = {name: shown.strip("*") for name, shown, _ in CPU_ROWS}
    rows = []
    for name, wanted in TARGETS.items():
        cells = []
        for recipe, bound in zip(RECIPES, wanted, strict=True):
            found = measured[recipe].get(name, {}).get("ratio")
            cells.append(MISSING if found is None else f"{found:.2f} of {bound}: {verdict(found >= bound)}")
        rows.append([names[name], *cells])
    return table(["ratio to the yardstick, of the target", *RECIPES], rows)


def _sampler(samples: int) -> dict[str, Any]:
    measured = result("sampler")
    every = [measured, *measured.get("others", [])]
    return {each["samples"]: each for each in every}[samples]


def _epoch_ratio(samples: int) -> float:
    times = _sampler(samples)["times"]["world_size 1"]
    return float(times["gpupipe"]["median_s"] / times["torch"]["median_s"])


def _resume(samples: int) -> float:
    return float(max(result("resume")["samples"][str(samples)]["above_fresh_s"].values()))


def _open(name: str) -> float:
    return float(max(result("open")[kind][name] for kind in ("folder", "tar", "lmdb")))


SCALE = [
    Target(
        "plans a second, batch 256, with jitter",
        "at least",
        150_000,
        "",
        "bench_plan.py",
        lambda: result("plan")["plans_per_s"]["train with jitter, batch 256"],
    ),
    *(
        Target(
            f"plans a second over a whole epoch of {samples:,}, its order included",
            "at least",
            150_000,
            "",
            "bench_plan.py",
            lambda samples=samples: result("plan")["whole_epochs_plans_per_s"][str(samples)],
        )
        for samples in (1_281_167, 10_000_000)
    ),
    *(
        Target(
            f"begin an epoch of {samples:,}: time, to DistributedSampler's",
            "at most",
            1.0,
            "",
            "bench_sampler.py",
            lambda samples=samples: _epoch_ratio(samples),
        )
        for samples in (1_281_167, 10_000_000)
    ),
    Target(
        "the same at 10,000,000: memory above the array",
        "at most",
        100,
        " MB",
        "bench_sampler.py",
        lambda: max(0.0, _sampler(10_000_000)["peak_above_array_bytes"]["gpupipe"] / 1e6),
    ),
    *(
        Target(
            f"resume anywhere in {samples:,}: above a fresh start",
            "at most",
            0.1,
            " s",
            "bench_resume.py",
            lambda samples=samples: _resume(samples),
        )
        for samples in (1_281_167, 10_000_000)
    ),
    Target("open 1,281,167 records, slowest source", "at most", 2.0, " s", "bench_open.py", lambda: _open("seconds")),
    Target("the same: memory", "at most", 200, " MB", "bench_open.py", lambda: _open("memory_mb")),
]
START = (
    [
        Target(
            f"{name}: first batch, above bare `import torch`",
            "at most",
            1.0,
            " s",
            "bench_start.py",
            lambda name=name: result("start")[name]["above_torch_s"],
        )
        for name in ("numba", "dali")
    ]
    + [
        Target(
            f"{name}: memory at the first batch, above bare `import torch`",
            "at most",
            300,
            " MB",
            "bench_start.py",
            lambda name=name: result("start")[name]["above_torch_mb"],
        )
        for name in ("numba", "dali")
    ]
    + [
        Target(
            "loader over a bare DALI pipeline with the same operators: time",
            "at most",
            1.05,
            "",
            "bench_start.py",
            lambda: result("start")["loader_over_bare_dali"],
        ),
    ]
)
# "No growth" of memory, as DALI's and torch's pools of up to some MB let it be seen.
GPU = [
    Target(
        "exact pipeline, to DALI's own (inexact) with the same decoder settings",
        "at least",
        0.9,
        "",
        "gpu/run.py",
        lambda: result("gpu_throughput")["ratios"]["exact to native"],
    ),
    Target(
        "exact pipeline, to decoding alone",
        "at least",
        0.8,
        "",
        "gpu/run.py",
        lambda: result("gpu_throughput")["ratios"]["exact to decode only"],
    ),
    Target(
        "exact pipeline, to a DataLoader on all cores",
        "at least",
        8,
        "",
        "gpu/run.py",
        lambda: result("gpu_throughput")["ratios"]["exact to DataLoader"],
    ),
    Target(
        "ResNet-50 step in bf16, to the same step on synthetic data: time",
        "at most",
        1.02,
        "",
        "gpu/run.py",
        lambda: result("gpu_step")["loader_over_synthetic"],
    ),
    Target(
        "GPU memory after 2,000 batches, more than after 200",
        "at most",
        32,
        " MB",
        "gpu/run.py",
        lambda: result("gpu_throughput")["memory_growth_mb"],
    ),
]
LISTS: dict[str, Sequence[Target]] = {"at scale, one core": SCALE, "start and overhead": START, "on a GPU": GPU}


def gpu_notes() -> str:
    """What is asked for as a figure, and has no target."""
    try:
        cost = result("gpu_throughput")["fancy_upsampling_cost_percent"]
    except FileNotFoundError:
        return f"cost of jpeg_fancy_upsampling on a GPU: {MISSING}, `gpu/run.py`"
    return f"cost of jpeg_fancy_upsampling on a GPU: {cost:.1f} % of decoding alone"


def whole() -> str:
    """All tables."""
    parts = [peers(), targets()]
    parts += [table([head, "target", "measured", ""], [each.row() for each in rows]) for head, rows in LISTS.items()]
    return "\n\n".join([*parts, gpu_notes()])


if __name__ == "__main__":
    print(whole())
