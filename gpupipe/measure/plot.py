"""Pictures of measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpupipe.errors import BackendUnavailable, SourceError

if TYPE_CHECKING:
    from gpupipe.measure.bench import BenchReport
    from gpupipe.measure.profiling import ProfileReport
    from gpupipe.measure.tuning import TuneReport
    from gpupipe.measure.watch_log import Log

# A round is cut into spans of time with four batches each on average, so that single ones do not hide the course.
_MOST_SPANS = 20


def plot_bench(report: BenchReport, path: Path) -> Path:
    """Images a second over time, round after round, and the time between batches.

    Raises:
        BackendUnavailable: matplotlib is not installed.
        SourceError: The picture cannot be written there, or not in the format that its name ends in.
    """
    figure_class = _matplotlib()
    figure = figure_class(figsize=(11, 4.6), layout="constrained")
    over_time, between = figure.subplots(1, 2, width_ratios=(3, 2))
    for number, each in enumerate(report.figures):
        begin = 0.0
        for times in each.times_s:
            ends, speeds = _speeds(times, report.images)
            label = each.name if begin == 0.0 else None
            over_time.stairs(speeds, begin + ends, baseline=None, color=f"C{number}", linewidth=1.5, label=label)
            begin += times[-1]
    over_time.set(xlabel="seconds of its own rounds, one after another", ylabel="images / s", title=report.target)
    over_time.set_ylim(bottom=0)
    over_time.legend(loc="best", fontsize="small")
    shares = [f"{share} %" for share in report.figures[0].batch_ms]
    places = np.arange(len(shares))
    width = 0.8 / len(report.figures)
    for number, each in enumerate(report.figures):
        bars = between.bar(places + number * width, list(each.batch_ms.values()), width, color=f"C{number}")
        between.bar_label(bars, fmt="%.0f", fontsize="x-small")
    between.set_xticks(places + 0.4 - width / 2, shares)
    between.set(ylabel="ms from batch to batch", title="percentiles of the time between batches")
    return _saved(figure, path)


def plot_profile(report: ProfileReport, path: Path) -> Path:
    """The pipeline alone, the step alone and both together; and the share of each stage.

    Raises:
        As `plot_bench`.
    """
    figure = _matplotlib()(figsize=(11, 4.0), layout="constrained")
    times, stages = figure.subplots(1, 2)
    named = {"pipeline alone": report.pipeline_ms, "step alone": report.step_ms, "both": report.both_ms}
    measured = {name: each["mean"] for name, each in named.items() if each is not None}
    bars = times.barh(list(measured), list(measured.values()), color=[f"C{place}" for place in range(len(measured))])
    times.bar_label(bars, fmt="%.1f ms", padding=3)
    times.invert_yaxis()
    times.set(xlabel="ms a batch", title=report.target)
    shares = {stage.name: 100 * stage.share for stage in report.stages}
    if shares:
        bars = stages.barh(list(shares), list(shares.values()), color="C4")
        stages.bar_label(bars, fmt="%.0f %%", padding=3)
        stages.invert_yaxis()
    stages.set(xlabel="% of the CPU time of an image", title="stages")
    for axes in (times, stages):
        axes.margins(x=0.15)
    return _saved(figure, path)


def plot_watch(log: Log, path: Path) -> Path:
    """Waits and steps over the run, and what was held and used meanwhile.

    Raises:
        As `plot_bench`.
    """
    figure = _matplotlib()(figsize=(11, 6.0), layout="constrained")
    times, use, memory = figure.subplots(3, 1, sharex=True, height_ratios=(2, 1, 1))
    steps, looks = log.steps, log.resources
    times.plot(steps["t"], 1e3 * steps["wait_s"], ".", markersize=3, color="C3", label="wait for data")
    times.plot(steps["t"], 1e3 * steps["step_s"], ".", markersize=3, color="C0", label="step")
    for begin in steps["t"][steps["step"] == 0]:
        times.axvline(begin, color="0.85", linewidth=1, zorder=0)
    times.set(yscale="log", ylabel="ms", title=f"{log.name}: rank {log.rank} (a line at each epoch's first step)")
    times.legend(loc="upper right", fontsize="small")
    if len(looks["t"]) > 1 and "cpu_s" in looks:
        busy = np.diff(looks["cpu_s"]) / np.diff(looks["t"]) / log.cores
        use.plot(looks["t"][1:], 100 * busy.clip(0, 1), color="C1", label="CPU of this run")
    for name, label in (("machine_use", "CPU of all"), ("gpu_use", "GPU")):
        if name in looks:
            use.plot(looks["t"][1:], 100 * looks[name][1:], linewidth=1, label=label)
    use.set(ylabel="% in use", ylim=(0, 105))
    for name, label in (("host_bytes", "host memory"), ("gpu_memory_bytes", "GPU memory")):
        if name in looks:
            memory.plot(looks["t"], looks[name] / 1e9, label=label)
    memory.set(ylabel="GB", xlabel="seconds")
    memory.set_ylim(bottom=0)
    for axes in (use, memory):
        if axes.lines:
            axes.legend(loc="lower right", fontsize="small")
    return _saved(figure, path)


def plot_tune(report: TuneReport, path: Path) -> Path:
    """Images a second of all that was tried.

    Raises:
        As `plot_bench`.
    """
    figure = _matplotlib()(figsize=(10, 0.4 * len(report.trials) + 1.6), layout="constrained")
    axes = figure.subplots()
    names = [", ".join(f"{value}" for value in trial.settings.values()) for trial in report.trials]
    speeds = [float(np.median(trial.images_per_s)) for trial in report.trials]
    axes.barh(names, speeds, color=["C2" if not trial.why_out else "0.8" for trial in report.trials])
    for place, trial in enumerate(report.trials):
        axes.plot(trial.images_per_s, [place] * len(trial.images_per_s), "k.", markersize=4)
    if report.target_images_per_s is not None:
        axes.axvline(report.target_images_per_s, color="C3", linestyle="--", label="target")
        axes.legend(loc="lower right")
    axes.invert_yaxis()
    axes.set(xlabel="images / s", title=", ".join(report.settings), ylabel=None)
    return _saved(figure, path)


def _saved(figure: Any, path: Path) -> Path:
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:  # the latter says which formats there are
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise SourceError(f"cannot write the picture to {path}: {why}", uri=str(path)) from error
    return path


def _speeds(times: list[float], images: int) -> tuple[Any, Any]:
    """Ends of spans of a round in seconds, from 0 on, and the images a second that arrived in each."""
    spans = max(1, min(_MOST_SPANS, len(times) // 4))
    batches, ends = np.histogram(times, spans, range=(0.0, times[-1]))
    return ends, batches * (images / len(times)) / (times[-1] / spans)


def _matplotlib() -> Any:
    try:
        # Not pyplot, which looks for a screen and keeps every figure.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendUnavailable(
            "pictures need matplotlib: pip install 'gpupipe[measure]'",
            stage="plot",
            missing="matplotlib",
            install="pip install 'gpupipe[measure]'",
        ) from error
    return Figure
