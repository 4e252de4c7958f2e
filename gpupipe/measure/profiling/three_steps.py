"""`gpupipe.profile`: is training waiting for data, by how much, and for which stage."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np

from gpupipe.backends import choose
from gpupipe.backends.base import Options
from gpupipe.checks import check_integer
from gpupipe.errors import ConfigError
from gpupipe.loader import Loader
from gpupipe.measure.batches import endless, rows_of
from gpupipe.measure.profiling.stages import Samples, stage_rates
from gpupipe.measure.profiling.training import TrainingStep, synchronize, training_step
from gpupipe.parallel import usable_cores
from gpupipe.parity.environment import environment
from gpupipe.recipe import Recipe
from gpupipe.sampling.samplers import permutation
from gpupipe.sources import open_source
from gpupipe.sources.base import Source

Say = Callable[[str], None]
Bound = Literal["data", "contention", "step", "unknown"]

PERCENTILES = (50, 90, 99)
# Batches before the clock starts.
WARM_UP = 3
# Times that differ by less than this share are taken as equal.
MARGIN = 0.1


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage alone.

    Attributes:
        name: "read", "header", "plan", "decode", "resize", "augment".
        images_per_s: Threads -> images a second, with nothing else running.
        headroom: How many times as fast as the whole pipeline it is by itself, with the most threads.
        share: Of the CPU time of all stages.
    """

    name: str
    images_per_s: dict[str, float]
    headroom: float
    share: float


@dataclass(frozen=True, slots=True)
class ProfileReport:
    """What `profile` measured.

    Attributes:
        target: What was loaded.
        batch_size: Samples in a batch.
        pipeline_ms: Percentile -> milliseconds from batch to batch, of the pipeline alone; and "mean".
        step_ms: The same of the training step alone, on one batch again and again; None without a step.
        both_ms: The same of both together.
        stages: Of the pipeline; empty for a loader that is not gpupipe's.
        limiting: The stage that takes the largest share of the CPU time.
        bound: By what training is bound: "data", "contention" (together they are slower than the slower one alone),
            "step", or "unknown" without a step.
        at_best: How many times as fast training would be with data that cost nothing.
        verdict: All that in words, with the arithmetic.
        machine: Name -> version or description of hardware and libraries.
    """

    target: str
    batch_size: int
    pipeline_ms: dict[str, float]
    step_ms: dict[str, float] | None
    both_ms: dict[str, float] | None
    stages: tuple[StageFigures, ...]
    limiting: str | None
    bound: Bound
    at_best: float | None
    verdict: str
    machine: dict[str, str]

    def to_json(self) -> str:
        """Everything, as strict JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    def table(self) -> str:
        """For a terminal."""
        lines = [f"{self.target}, batches of {self.batch_size}", ""]
        for name, times in (("pipeline alone", self.pipeline_ms), ("step alone", self.step_ms), ("both", self.both_ms)):
            if times is not None:
                shares = ", ".join(f"{times[str(share)]:.1f}" for share in PERCENTILES)
                speed = 1e3 * self.batch_size / times["mean"]
                lines.append(
                    f"{name:<15} {times['mean']:>8.1f} ms a batch  ({shares} at 50, 90, 99 %)  {speed:.0f} images/s"
                )
        if self.stages:
            threads = list(self.stages[0].images_per_s)
            heads = "".join(f"{count + (' thread' if count == '1' else ' threads'):>12}" for count in threads)
            lines += ["", f"{'stage alone':<12}{heads}{'headroom':>10}{'of CPU time':>13}"]
            for stage in self.stages:
                speeds = "".join(f"{speed:>10.0f}/s" for speed in stage.images_per_s.values())
                lines.append(f"{stage.name:<12}{speeds}{stage.headroom:>9.1f}x{100 * stage.share:>11.0f} %")
        return "\n".join([*lines, "", self.verdict])

    def plot(self, path: str | os.PathLike[str]) -> Any:
        """Draw the three times, and the share of each stage.

        Raises:
            BackendUnavailable: matplotlib is not installed.
            SourceError: It cannot be written.
        """
        from pathlib import Path

        from gpupipe.measure.plot import plot_profile

        return plot_profile(self, Path(path))


def profile(  # noqa: PLR0913 - what is measured, and how: the options of the command
    target: str | os.PathLike[str] | Source | Loader | Iterable[Any],
    recipe: Recipe | None = None,
    *,
    step: str | TrainingStep | None = None,
    batch_size: int = 64,
    backend: str = "auto",
    device: str | None = None,
    options: Options | None = None,
    images: int = 1000,
    seconds: float = 3.0,
    say: Say | None = None,
) -> ProfileReport:
    """Measure the pipeline alone, the training step alone, and both together, and say which one holds training up.

    Args:
        target: A data set (what `gpupipe.open_source` takes); a `Loader`; or any other loader, such as a torch
            DataLoader, which is measured as a whole.
        recipe: For a data set; None: `Recipe.train()`.
        step: A callable that takes a batch and trains on it; "resnet18" or "resnet50"; or None, for the pipeline alone.
        batch_size, backend, device, options: For a data set; see `Loader`.
        images: For a data set: at most so many of its samples, in a random order.
        seconds: For each measurement; a stage takes half of it for each number of threads.
        say: Is told what is going on.

    Raises:
        ConfigError: Wrong arguments, or nothing to measure.
        SourceError: The data set cannot be opened.
    """
    check_integer("batch_size", batch_size, 1)
    check_integer("images", images, 1)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not 0 < seconds <= 3600:
        raise ConfigError(
            f"seconds={seconds!r} is not valid: it must be above 0 and at most 3600",
            field="seconds",
            value=seconds,
            allowed="0 < seconds <= 3600",
        )
    tell: Say = say or (lambda _: None)
    loader: Any = target
    opened: list[Any] = []
    try:
        if _is_data_set(target):
            source = open_source(target)
            if source is not target:
                opened.append(source)
            loader = Loader(
                source,
                recipe or Recipe.train(),
                batch_size=batch_size,
                sampler=permutation(len(source), 0)[:images].tolist(),
                backend=backend,
                device=device,
                options=options,
            )
            opened.append(loader)
        elif recipe is not None:
            raise ConfigError("a recipe goes with a data set; a loader has its own", field="recipe", value=recipe)
        return _measured(loader, step, float(seconds), tell)
    finally:
        for each in reversed(opened):
            each.close()


def _is_data_set(target: object) -> bool:
    if isinstance(target, str | os.PathLike):
        return True
    return not isinstance(target, Loader) and hasattr(target, "__getitem__") and not hasattr(target, "batch_size")


def _measured(loader: Any, step: str | TrainingStep | None, seconds: float, tell: Say) -> ProfileReport:
    device = loader.backend.device if isinstance(loader, Loader) else choose("torchvision").device
    train = training_step(step, _training_device(device))
    tell("the pipeline alone")
    batches = endless(loader)
    batch = next(batches)
    pipeline = _times(lambda: next(batches), seconds, device)
    alone = both = None
    if train is not None:
        tell("the training step alone, on one batch")
        alone = _times(lambda: train(batch), seconds, device)
        tell("both together")
        both = _times(lambda: train(next(batches)), seconds, device)
    stages = _stages(loader, seconds / 2, 1.0 / (pipeline["mean"] / 1e3) * rows_of(batch), tell)
    limiting = max(stages, key=lambda stage: stage.share).name if stages else None
    bound, at_best, verdict = _verdict(pipeline, alone, both, limiting)
    return ProfileReport(
        target=loader.dataset.uri if isinstance(loader, Loader) else type(loader).__name__,
        batch_size=rows_of(batch),
        pipeline_ms=pipeline,
        step_ms=alone,
        both_ms=both,
        stages=stages,
        limiting=limiting,
        bound=bound,
        at_best=at_best,
        verdict=verdict,
        machine=environment(),
    )


def _training_device(device: Any) -> Any:
    import torch

    return device if device.type == "cuda" or not torch.cuda.is_available() else torch.device("cuda")


def _times(work: Callable[[], object], seconds: float, device: Any) -> dict[str, float]:
    """Milliseconds a call."""
    for _ in range(WARM_UP):
        work()
    synchronize(device)
    ends = [time.perf_counter()]
    while ends[-1] - ends[0] < seconds or len(ends) < 3:
        work()
        ends.append(time.perf_counter())
    synchronize(device)
    # A GPU may lag behind the calls: the mean counts to its end.
    total = time.perf_counter() - ends[0]
    spans = 1e3 * np.diff(ends)
    found = {str(share): float(np.percentile(spans, share)) for share in PERCENTILES}
    return {"mean": 1e3 * total / len(spans), **found}


def _stages(loader: Any, seconds: float, whole: float, tell: Say) -> tuple[StageFigures, ...]:
    if not isinstance(loader, Loader) or not isinstance(loader.recipe, Recipe):
        return ()
    samples = Samples(loader.dataset, permutation(len(loader.dataset), 1).tolist(), loader.recipe)
    if not samples.records:
        return ()
    threads = sorted({1, usable_cores()})
    rates = stage_rates(samples, loader, threads, seconds, tell)
    cost = {name: 1 / speeds[1] for name, speeds in rates.items()}
    return tuple(
        StageFigures(
            name=name,
            images_per_s={str(count): speed for count, speed in speeds.items()},
            headroom=speeds[threads[-1]] / whole,
            share=cost[name] / sum(cost.values()),
        )
        for name, speeds in rates.items()
    )


def _verdict(
    pipeline: dict[str, float], alone: dict[str, float] | None, both: dict[str, float] | None, limiting: str | None
) -> tuple[Bound, float | None, str]:
    load = pipeline["mean"]
    most = f" ({limiting} takes the most of it)" if limiting else ""
    if alone is None or both is None:
        return (
            "unknown",
            None,
            f"The pipeline makes a batch in {load:.1f} ms{most}. Give step= to see if that is enough.",
        )
    work, together = alone["mean"], both["mean"]
    at_best = max(1.0, together / work)
    gain = f"Data that cost nothing would make training {at_best:.2f} times as fast, no more."
    times = (
        f"the pipeline alone takes {load:.1f} ms a batch{most}, the step alone {work:.1f} ms, "
        f"both together {together:.1f} ms"
    )
    if together <= work * (1 + MARGIN):
        return "step", at_best, f"Not data-bound: {times}. {gain}"
    if together <= max(load, work) * (1 + MARGIN):
        return "data", at_best, f"Data-bound: {times}. {gain}"
    why = "they take cores, memory bandwidth or Python's lock from each other, or wait for the copy to the device"
    return "contention", at_best, f"Bound by contention: {times}: {why}. {gain}"
