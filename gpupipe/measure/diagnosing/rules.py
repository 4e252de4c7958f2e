"""The rules: each looks at one run and says what is wrong, or nothing.

Each threshold stands beside its reason. They were set before the runs on which they are judged (see
benchmarks/bench_diagnose.py), and are coarse on purpose: a finding has to be worth acting on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.measure.diagnosing.finding import Finding
from gpupipe.measure.watch_log import Log

F64 = npt.NDArray[np.float64]
Rule = Callable[[Sequence[Log]], Finding | None]

# A loop that waits for less than this share of its time is not data-bound: a faster loader could gain no more.
LEAST_WAIT = 0.1
# Every loop pays for handing batches over; from this share on it is worth another way.
LEAST_HAND_OVER = 0.2
# Steps at the beginning of a run in which caches, pools and kernels warm up, and the fewest for any statement.
WARM_UP_STEPS, LEAST_STEPS = 5, 30
# Of the cores, below which they count as idle and above which as busy: between them nothing is said.
IDLE_CORES, BUSY_CORES = 0.6, 0.85
# A first batch of an epoch that takes as long as so many steps, in all but the first epoch.
LATE_START_STEPS = 10
# Correlation of a step's time with its batch's cost, that of their ranks (one huge batch makes the former alone), and
# the spread that makes it matter.
CORRELATION, RANK_CORRELATION, SPREAD = 0.5, 0.25, 0.2
# Fewer steps say nothing of what goes on for ever.
LEAST_STEPS_OF_A_TREND = 100
# Growth of memory: of what there was after the warm-up, and in bytes, over the run; chance of it without a trend.
GROWTH, GROWTH_BYTES, CHANCE = 0.05, 50e6, 1e-3
# Of the epochs, with something more open than in the one before.
LEAKING_EPOCHS = 0.7
# A rank that waits so many times as long as the middle one, and by what share of a step.
UNEVEN_RATIO, UNEVEN_SHARE = 1.5, 0.05
# A sudden wait: in seconds, and as a multiple of the median step and wait; it is rare, or it would be the rule.
SUDDEN_S, SUDDEN_TIMES, RARE = 0.5, 10, 0.1
# Threads that compute or want to, for each core; idle pools of libraries do not count.
OVERSUBSCRIBED = 1.5
SHARED_MEMORY_FULL = 0.8
# Of all memory, in batches that wait.
QUEUE_SHARE = 0.2
# Reads of fewer bytes are dominated by their own cost.
SMALL_READ_BYTES = 32_768


def _steady(log: Log) -> npt.NDArray[np.bool_]:
    """Steps behind the warm-up that do not begin an epoch."""
    number = np.arange(len(log.steps["t"]))
    steady: npt.NDArray[np.bool_] = (number >= WARM_UP_STEPS) & (log.steps["step"] > 0)
    return steady


def _waiting(log: Log) -> tuple[F64, F64]:
    """Waits and steps in seconds, the steady ones."""
    steady = _steady(log)
    return log.steps["wait_s"][steady], log.steps["step_s"][steady]


def waited_share(log: Log) -> float:
    """The share of its time in which the loop waits, warm-up and beginnings of epochs apart."""
    wait, work = _waiting(log)
    total = float(wait.sum() + work.sum())
    return float(wait.sum()) / total if total else 0.0


def loading_share(log: Log) -> float:
    """The share of its time in which it waits for batches that have not been loaded yet; `waited_share` if unknown."""
    wait, work = _waiting(log)
    total = float(wait.sum() + work.sum())
    return float(wait[log.steps["ready"][_steady(log)] != 1].sum()) / total if total else 0.0


def waited_overall(log: Log) -> float:
    """The same with the beginnings of epochs, the first one's apart."""
    wait, work = log.steps["wait_s"][WARM_UP_STEPS:], log.steps["step_s"][WARM_UP_STEPS:]
    total = float(wait.sum() + work.sum())
    return float(wait.sum()) / total if total else 0.0


def _busy_cores(log: Log) -> float | None:
    """The share of the cores that this process and its children used, on average."""
    looks = log.resources
    if "cpu_s" not in looks or len(looks["t"]) < 2:
        return None
    seconds = looks["t"][-1] - looks["t"][0]
    # Processes that ended take their CPU time with them.
    used = np.diff(looks["cpu_s"]).clip(min=0).sum()
    return float(used / seconds / log.cores) if seconds > 0 else None


def _used_by_others(log: Log, busy: float) -> float:
    """The share of the cores that processes outside this run used, on average."""
    use = log.resources.get("machine_use")
    if use is None or len(use) < 2:
        return 0.0
    return max(0.0, float(np.nanmean(use[1:])) - busy)  # the first look has nothing to compare with


def crowded(logs: Sequence[Log]) -> Finding | None:
    """The loop waits, and other processes have the cores."""
    log = max(logs, key=loading_share)
    busy = _busy_cores(log)
    if not _is_data_bound(log) or busy is None or busy > IDLE_CORES:
        return None
    others = _used_by_others(log, busy)
    if others <= IDLE_CORES - busy:
        return None
    return Finding(
        code="crowded",
        evidence=f"the loop waits {100 * waited_share(log):.0f} % of its time; its processes have {100 * busy:.0f} % "
        f"of the cores, others {100 * others:.0f} %",
        cause="other jobs use the cores that loading needs",
        fix="move them to another machine, or give this run cores of its own (taskset, cgroups, docker --cpus)",
        share=waited_share(log),
        numbers={"waited": waited_share(log), "cores_busy": busy, "others_busy": others},
    )


def _parallel(log: Log) -> tuple[str, int | None, str]:
    """What loads at the same time, how many of it there are, and the argument that sets their number."""
    if log.loader.get("kind") == "Loader":
        threads = log.loader.get("threads")
        return "threads", threads if threads is not None else log.cores, "options=gpupipe.Options(threads=...)"
    workers = log.loader.get("workers")
    return "workers", workers, "num_workers="


def _is_data_bound(log: Log) -> bool:
    return len(_waiting(log)[0]) >= LEAST_STEPS and loading_share(log) >= LEAST_WAIT


def too_little_parallelism(logs: Sequence[Log]) -> Finding | None:
    """The loop waits while cores are idle."""
    log = max(logs, key=loading_share)
    busy = _busy_cores(log)
    what, count, argument = _parallel(log)
    if not _is_data_bound(log) or busy is None or busy > IDLE_CORES:
        return None
    # These wait with idle cores, too, and say more.
    if any(rule(logs) is not None for rule in (sudden_waits, small_reads, uneven_ranks)):
        return None
    if _used_by_others(log, busy) > IDLE_CORES - busy:
        return None
    numbers = {"waited": waited_share(log), "cores_busy": busy}
    seen = f"the loop waits {100 * numbers['waited']:.0f} % of its time, while {100 * busy:.0f} % of the cores are busy"
    if count is not None and count < log.cores:
        return Finding(
            code="too-few-workers",
            evidence=f"{seen}; {count} {what} on {log.cores} cores",
            cause=f"fewer {what} load than there are cores",
            fix=f"raise {argument} to {log.cores}",
            share=numbers["waited"],
            numbers=numbers | {"workers": float(count)},
        )
    return Finding(
        code="blocked-reads",
        evidence=f"{seen}, with {count} {what} on {log.cores} cores",
        cause="those that load wait themselves, most likely for the disk or the network",
        fix=f"raise {argument} beyond the cores (twice, then again), so that more reads are under way; read a local "
        "copy, or pack the data set (`gpupipe pack`)",
        share=numbers["waited"],
        numbers=numbers,
    )


def decode_bound(logs: Sequence[Log]) -> Finding | None:
    """The loop waits and all cores are busy."""
    log = max(logs, key=loading_share)
    busy = _busy_cores(log)
    if not _is_data_bound(log) or busy is None or busy < BUSY_CORES or oversubscribed(logs) is not None:
        return None
    numbers = {"waited": waited_share(log), "cores_busy": busy}
    remedy = 'backend="numba" or, on a GPU, "dali"; store smaller images; take a machine with more cores for each GPU'
    return Finding(
        code="decode-bound",
        evidence=f"the loop waits {100 * numbers['waited']:.0f} % of its time, while {100 * busy:.0f} % of the cores "
        "are busy",
        cause="decoding and augmenting take all the CPU there is",
        fix=remedy if log.loader.get("kind") == "Loader" else f"use gpupipe.Loader with {remedy}",
        share=numbers["waited"],
        numbers=numbers,
    )


def slow_hand_over(logs: Sequence[Log]) -> Finding | None:
    """The loop waits for batches that have been loaded."""
    log = max(logs, key=waited_share)
    wait, work = _waiting(log)
    ready = log.steps["ready"][_steady(log)] == 1
    if ready.sum() < LEAST_STEPS:
        return None
    share = float(wait[ready].sum() / (wait.sum() + work.sum()))
    if share < LEAST_HAND_OVER:
        return None
    each = float(np.median(wait[ready]))
    size = float(np.nanmedian(log.steps["tensor_bytes"]))
    from_workers = "each of their tensors comes out of a worker's shared memory"
    return Finding(
        code="slow-hand-over",
        evidence=f"{100 * ready.mean():.0f} % of the batches had been loaded when they were asked for, and still took "
        f"{1e3 * each:.1f} ms to come ({size / 1e6:.1f} MB each): {100 * share:.0f} % of the time",
        cause="batches are handed over slowly, not loaded slowly"
        + (f": {from_workers}" if log.loader.get("workers") else ""),
        fix='gpupipe.Output(dtype="float16"), which halves them'
        if log.loader.get("kind") == "Loader"
        else "make them smaller (uint8 images, normalized on the GPU) and of few tensors; gpupipe.Loader loads in "
        "threads, which hand nothing over",
        share=share,
        numbers={"ready": float(ready.mean()), "hand_over_s": each, "waited": share},
    )


def late_epochs(logs: Sequence[Log]) -> Finding | None:
    """Each epoch begins with a stall."""
    log = logs[0]
    steps = log.steps
    firsts = (steps["step"] == 0) & (steps["epoch"] > steps["epoch"][0])
    wait, work = _waiting(log)
    if not firsts.any() or not len(wait):
        return None
    late, usual = float(np.median(steps["wait_s"][firsts])), float(np.median(wait + work))
    share = float(steps["wait_s"][firsts].sum() / (steps["wait_s"].sum() + steps["step_s"].sum()))
    if late < LATE_START_STEPS * usual or share < LEAST_WAIT / 2:
        return None
    seen = (
        f"epochs begin with {late:.2f} s of waiting, where a step takes {usual:.3f} s: {100 * share:.0f} % of the run"
    )
    numbers = {"first_wait_s": late, "step_s": usual, "waited": share}
    if log.loader.get("workers") and log.loader.get("persistent_workers") is False:
        cause, fix = "the DataLoader starts its workers anew in every epoch", "persistent_workers=True"
    else:
        cause = "something is built anew in every epoch: workers, a loader, or an index of the files"
        fix = "make the loader once, outside the loop over epochs, and let it list its files once"
    return Finding(code="late-epochs", evidence=seen, cause=cause, fix=fix, share=share, numbers=numbers)


def cost_swing(logs: Sequence[Log]) -> Finding | None:
    """A step takes as long as its batch is heavy."""
    log = max(logs, key=waited_share)
    steady = _steady(log)
    times = (log.steps["wait_s"] + log.steps["step_s"])[steady]
    if len(times) < LEAST_STEPS or times.std() < SPREAD * times.mean():
        return None
    best: tuple[float, str] = (0.0, "")
    for name in ("pixels", "bytes"):
        cost = log.steps[name][steady]
        if not np.isnan(cost).any() and cost.std() > 0:
            if _rank_correlation(times, cost) >= RANK_CORRELATION:
                best = max(best, (float(np.corrcoef(times, cost)[0, 1]), name))
    correlation, name = best
    if correlation < CORRELATION:
        return None
    spread = float(times.std() / times.mean())
    heavy = log.steps[name][steady]
    return Finding(
        code="cost-swing",
        evidence=f"the time of a step varies by {100 * spread:.0f} % and follows the {name} of its batch "
        f"(correlation {correlation:.2f}; heaviest batch {heavy.max() / np.median(heavy):.1f} times the median)",
        cause="some batches hold much heavier images than others",
        fix=f'sampler=gpupipe.CostAware("{name}"), which evens out the cost of batches',
        share=float((times - np.median(times)).clip(min=0).sum() / times.sum()),
        numbers={"correlation": correlation, "spread": spread},
    )


def _rank_correlation(one: F64, other: F64) -> float:
    """Spearman's."""
    ranks = [np.argsort(np.argsort(values)).astype(np.float64) for values in (one, other)]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def rising_memory(logs: Sequence[Log]) -> Finding | None:
    """Memory rises to the end."""
    if rising_handles(logs) is not None:  # which take memory along
        return None
    for log in logs:
        trend = _trend(log, "host_bytes")
        if trend is None:
            continue
        start, rise, low, high, chance, in_second_half = trend
        if rise < max(GROWTH * start, GROWTH_BYTES) or chance > CHANCE or in_second_half < 0.25 * rise:
            continue
        seconds = float(log.resources["t"][-1] - log.resources["t"][0])
        workers = log.loader.get("workers")
        grown = _grown(log)
        return Finding(
            code="rising-memory",
            evidence=f"rank {log.rank} holds {rise / 1e6:.0f} MB more than after its warm-up ({start / 1e6:.0f} MB), "
            f"{60 * low / 1e6:.0f} to {60 * high / 1e6:.0f} MB a minute (95 %), and it goes on",
            cause="something keeps a reference to every batch or sample"
            + (f": {grown[0]} holds {grown[1] / 1e6:.0f} MB more than before" if grown else "")
            + ("; worker processes copy Python objects of the dataset as they touch them" if workers else ""),
            fix=("" if grown else "watch(..., trace_memory=True) names the type that grows; ")
            + "keep no batch, loss or graph across steps (loss.item()), and hold the dataset's lists as NumPy arrays",
            share=1.0,
            numbers={"start_bytes": start, "rise_bytes": rise, "seconds": seconds, "chance": chance},
        )
    return None


def _grown(log: Log) -> tuple[str, int] | None:
    """The type whose objects hold most more than at first, and how many bytes more."""
    if len(log.types) < 2:
        return None
    first, last = log.types[min(1, len(log.types) - 2)], log.types[-1]
    name = max(last, key=lambda each: last[each] - first.get(each, 0))
    return name, last[name] - first.get(name, 0)


def deep_prefetch(logs: Sequence[Log]) -> Finding | None:
    """Batches that wait take much of the memory, and nobody waits for them."""
    log = logs[0]
    limit, sizes = log.begin.get("memory_limit_bytes"), log.steps["tensor_bytes"]
    if not limit or not len(sizes) or np.isnan(sizes).any() or waited_share(log) >= LEAST_WAIT:
        return None
    if log.loader.get("kind") == "Loader":
        depth, argument = log.loader.get("prefetch", 0) + 1, "options=gpupipe.Options(prefetch=2)"
    else:
        depth, argument = (
            (log.loader.get("workers") or 0) * (log.loader.get("prefetch_factor") or 0),
            "prefetch_factor=2",
        )
    held = depth * float(np.median(sizes))
    if held < QUEUE_SHARE * limit:
        return None
    return Finding(
        code="deep-prefetch",
        evidence=f"{depth} batches of {np.median(sizes) / 1e6:.0f} MB wait at a time: {held / 1e6:.0f} of "
        f"{limit / 1e6:.0f} MB of memory, and the loop waits {100 * waited_share(log):.1f} % of its time",
        cause="more batches are read ahead than are needed",
        fix=f"{argument}, or fewer workers",
        share=float(held / limit),
        numbers={"held_bytes": held, "limit_bytes": float(limit)},
    )


def _trend(log: Log, name: str) -> tuple[float, float, float, float, float, float] | None:
    """Start, rise over the run, 95 % limits of the slope a second, chance without a trend, rise in the second half."""
    values, times = log.resources.get(name), log.resources.get("t")
    if values is None or times is None:
        return None
    kept = ~np.isnan(values)
    values, times = values[kept], times[kept]
    after = len(values) // 3  # pools and caches fill
    values, times = values[after:], times[after:]
    if len(values) < 10 or len(log.steps["t"]) < LEAST_STEPS_OF_A_TREND:
        return None
    slope, low, high, chance = _theil_sen(times, values)
    half = len(values) // 2
    second = _theil_sen(times[half:], values[half:])[0] * (times[-1] - times[half])
    start = float(np.median(values[: max(3, len(values) // 10)]))
    return start, slope * float(times[-1] - times[0]), low, high, chance, float(second)


_MOST_POINTS = 300  # the slopes of all pairs of these are 45,000


def _theil_sen(times: F64, values: F64) -> tuple[float, float, float, float]:
    """Median slope of all pairs, its 95 % limits, and the chance of such a trend in noise.

    Source: Sen, "Estimates of the regression coefficient based on Kendall's tau", JASA 1968; Mann, "Nonparametric tests
    against trend", Econometrica 1945.
    """
    if len(times) > _MOST_POINTS:
        picked = np.linspace(0, len(times) - 1, _MOST_POINTS).astype(np.intp)
        times, values = times[picked], values[picked]
    n = len(times)
    earlier, later = np.triu_indices(n, 1)
    slopes = np.sort((values[later] - values[earlier]) / (times[later] - times[earlier]))
    spread = float(np.sqrt(n * (n - 1) * (2 * n + 5) / 18))
    score = float(np.sign(values[later] - values[earlier]).sum())
    margin = 1.96 * spread
    first = int(max(0, (len(slopes) - margin) / 2))
    last = int(min(len(slopes) - 1, (len(slopes) + margin) / 2))
    return float(np.median(slopes)), float(slopes[first]), float(slopes[last]), _two_sided(score / spread)


def _two_sided(z: float) -> float:
    """The chance of a normal number at least as far from 0."""
    from math import erfc, sqrt

    return erfc(abs(z) / sqrt(2))


def rising_handles(logs: Sequence[Log]) -> Finding | None:
    """Files, threads or processes rise with every epoch."""
    for log in logs:
        if len(log.epochs) < 4:  # the first one builds what stays
            continue
        for name, remedy in _HANDLES.items():
            held = _by_epoch(log, name)
            rises = np.diff(held)
            # What is open comes and goes a little; what leaks never goes.
            if len(rises) < 2 or rises.min() < 0 or np.mean(rises >= 1) < LEAKING_EPOCHS:
                continue
            return Finding(
                code=f"rising-{name}",
                evidence=f"open {name} on rank {log.rank} at the ends of epochs: "
                + ", ".join(f"{value:.0f}" for value in held[-6:]),
                cause=f"each epoch opens {name} that it does not close",
                fix=remedy,
                share=1.0,
                numbers={"by_epoch": float(rises.mean()), "last": float(held[-1])},
            )
    return None


def _by_epoch(log: Log, name: str) -> F64:
    """The median of a gauge in each epoch but the first, where it was looked at."""
    values, times = log.resources.get(name), log.resources.get("t")
    found = []
    if values is not None and times is not None:
        for epoch in log.epochs[1:]:
            ends = log.steps["t"][log.steps["epoch"] == epoch]
            inside = values[(times >= ends[0]) & (times <= ends[-1])]
            if len(inside):
                found.append(float(np.nanmedian(inside)))
    return np.array(found)


# Processes have threads and files of their own, and threads may have files.
_HANDLES = {
    "processes": "make the loader once, outside the loop over epochs; unfinished iterators keep their workers",
    "threads": "make thread pools once, outside the epoch, and shut them down (`with ThreadPoolExecutor(...)`)",
    "files": "close what the dataset opens (`with`), or open it once, not in every epoch",
}


def uneven_ranks(logs: Sequence[Log]) -> Finding | None:
    """One rank waits for its data, and all the others for that rank."""
    if len(logs) < 2:
        return None
    shortest = min(len(log.steps["t"]) for log in logs)
    if shortest < LEAST_STEPS:
        return None
    waits = np.array([np.median(_waiting(log)[0]) for log in logs])
    step = float(np.median([np.median(_waiting(log)[0] + _waiting(log)[1]) for log in logs]))
    slowest = int(waits.argmax())
    others = float(np.median(np.delete(waits, slowest)))
    excess = float(waits[slowest]) - others
    if waits[slowest] < UNEVEN_RATIO * others or excess < UNEVEN_SHARE * step:
        return None
    log = logs[slowest]
    late = np.flatnonzero(log.steps["wait_s"][:shortest] > others + excess / 2)
    since = int(late[0]) if len(late) else 0
    return Finding(
        code="uneven-ranks",
        evidence=f"rank {log.rank} waits {1e3 * waits[slowest]:.1f} ms a step for its data, the others "
        f"{1e3 * others:.1f} ms; first at step {since}",
        cause="all ranks wait in the gradient exchange for the one whose data come last",
        fix=f"look at rank {log.rank}'s machine: its disk, its cache, other jobs, its share of the cores; "
        "CostAware batches if it holds heavier ones",
        share=excess / step,
        numbers={
            "rank": float(log.rank),
            "wait_s": float(waits[slowest]),
            "others_s": others,
            "since_step": float(since),
        },
    )


def sudden_waits(logs: Sequence[Log]) -> Finding | None:
    """Rare waits of seconds."""
    log = max(logs, key=lambda each: float(each.steps["wait_s"].max(initial=0.0)))
    wait, work = _waiting(log)
    if len(wait) < LEAST_STEPS:
        return None
    usual = float(np.median(wait + work))
    limit = max(SUDDEN_S, SUDDEN_TIMES * usual)
    sudden = wait > limit
    share = float(wait[sudden].sum() / (wait.sum() + work.sum()))
    if sudden.sum() < 2 or sudden.mean() > RARE or share < LEAST_WAIT / 2:
        return None
    shown = ", ".join(f"{value:.1f}" for value in np.sort(wait[sudden])[::-1][:5])
    return Finding(
        code="sudden-waits",
        evidence=f"{int(sudden.sum())} of {len(wait)} steps waited more than {limit:.1f} s (longest: {shown} s; median "
        f"step {usual:.3f} s): {100 * share:.0f} % of the run",
        cause="the store answers late now and then, as remote ones do",
        fix="keep what was read on a local disk: open_source(..., cache_dir=..., cache_bytes=...); more prefetch "
        "(options=gpupipe.Options(prefetch=...) or prefetch_factor=) bridges short ones",
        share=share,
        numbers={"steps": float(sudden.sum()), "longest_s": float(wait.max()), "waited": share},
    )


def oversubscribed(logs: Sequence[Log]) -> Finding | None:
    """More threads compute than there are cores."""
    log = logs[0]
    running, busy = log.resources.get("running"), _busy_cores(log)
    if running is None or not len(running) or not _is_data_bound(log) or (busy or 0) < BUSY_CORES:
        return None
    computing = float(np.nanmedian(running))
    if computing < max(OVERSUBSCRIBED * log.cores, log.cores + 2):
        return None
    return Finding(
        code="oversubscribed",
        evidence=f"{computing:.0f} threads compute or wait for one of {log.cores} cores, which are "
        f"{100 * (busy or 0):.0f} % busy, and the loop waits {100 * waited_share(log):.0f} % of its time",
        cause="more threads compute than there are cores, and take them from each other",
        fix="torch.set_num_threads(1), cv2.setNumThreads(0) or OMP_NUM_THREADS=1 in worker_init_fn=, and "
        f"num_workers={log.cores}",
        share=waited_share(log),
        numbers={"threads": computing, "cores": float(log.cores)},
    )


def full_shared_memory(logs: Sequence[Log]) -> Finding | None:
    """Shared memory is nearly used up."""
    for log in logs:
        used, limit = (log.resources.get(f"shared_memory_{name}") for name in ("bytes", "limit_bytes"))
        if used is None or limit is None or not len(used):
            continue
        most = int(np.nanargmax(used))
        share = float(used[most] / limit[most]) if limit[most] else 0.0
        if share >= SHARED_MEMORY_FULL:
            return Finding(
                code="full-shared-memory",
                evidence=f"/dev/shm held {used[most] / 1e6:.0f} of {limit[most] / 1e6:.0f} MB",
                cause="worker processes hand batches over in shared memory, and there is little of it; at its end a "
                "worker dies with a bus error",
                fix="docker run --shm-size=8g (or --ipc=host); fewer num_workers= or a smaller prefetch_factor=; "
                "gpupipe.Loader loads in threads and needs none",
                share=1.0,
                numbers={"used_bytes": float(used[most]), "limit_bytes": float(limit[most])},
            )
    return None


def pinned_without_gpu(logs: Sequence[Log]) -> Finding | None:
    """Memory is pinned for a GPU that is not there."""
    log = logs[0]
    if log.loader.get("pin_memory") is not True or log.begin.get("gpu"):
        return None
    return Finding(
        code="pinned-without-gpu",
        evidence="pin_memory=True, and there is no GPU",
        cause="pinning copies each batch once more, for a transfer that does not happen",
        fix="pin_memory=False",
        share=0.0,
    )


def small_reads(logs: Sequence[Log]) -> Finding | None:
    """The loop waits for reads of a few kilobytes each."""
    log = max(logs, key=loading_share)
    reads, read_bytes = log.resources.get("reads"), log.resources.get("read_bytes")
    busy = _busy_cores(log)
    if reads is None or read_bytes is None or not _is_data_bound(log) or busy is None or busy > IDLE_CORES:
        return None
    samples = float(np.nansum(log.steps["samples"]))
    stored = float(np.nansum(log.steps["bytes"]))
    if not samples or not stored or stored / samples > SMALL_READ_BYTES:
        return None
    return Finding(
        code="small-reads",
        evidence=f"files of {stored / samples / 1e3:.0f} kB on average are read one by one, the loop waits "
        f"{100 * waited_share(log):.0f} % of its time, and {100 * busy:.0f} % of the cores are busy",
        cause="opening and seeking cost more than reading",
        fix="pack the files: `gpupipe pack FOLDER OUT`, and open_source(OUT)",
        share=waited_share(log) / 2,
        numbers={"bytes_a_sample": stored / samples, "cores_busy": busy},
    )


def wrong_global_batch(logs: Sequence[Log]) -> Finding | None:
    """A step of all ranks together has another number of samples than was meant."""
    log = logs[0]
    wanted, samples = log.begin.get("global_batch_size"), log.steps["samples"]
    if not wanted or not len(samples) or np.isnan(samples).any():
        return None
    world = int(log.begin.get("world_size", 1))
    found = int(np.median(samples)) * world
    if found == wanted:
        return None
    each = (
        f"{wanted // world}" if wanted % world == 0 else f"a divisor: {wanted} samples do not divide by {world} ranks"
    )
    return Finding(
        code="wrong-global-batch",
        evidence=f"{int(np.median(samples))} samples a step on each of {world} ranks are {found}, not {wanted}",
        cause="batch_size= counts the samples of one rank",
        fix=f"batch_size={each}, or a learning rate for {found}",
        share=1.0,
        numbers={"found": float(found), "wanted": float(wanted)},
    )


def not_sharded(logs: Sequence[Log]) -> Finding | None:
    """The ranks do not share the data set."""
    sizes = {int(log.begin.get("world_size", 1)) for log in logs}
    first = logs[0]
    world = max(sizes)
    sampler = first.loader.get("sampler")
    if world < 2 or first.loader.get("kind") != "DataLoader" or sampler not in ("RandomSampler", "SequentialSampler"):
        return None
    return Finding(
        code="not-sharded",
        evidence=f"{world} ranks, each with a {sampler} over the whole data set",
        cause="every rank trains on all samples, so that an epoch takes as long as on one GPU",
        fix="sampler=torch.utils.data.DistributedSampler(dataset), or gpupipe.Loader, which shards by itself",
        share=1.0 - 1.0 / world,
        numbers={"world_size": float(world)},
    )


RULES: tuple[Rule, ...] = (
    too_little_parallelism,
    crowded,
    decode_bound,
    slow_hand_over,
    late_epochs,
    cost_swing,
    rising_memory,
    rising_handles,
    deep_prefetch,
    uneven_ranks,
    sudden_waits,
    oversubscribed,
    full_shared_memory,
    pinned_without_gpu,
    small_reads,
    wrong_global_batch,
    not_sharded,
)


def described(log: Log) -> dict[str, Any]:
    """The figures that the rules go by, for the top of a diagnosis."""
    wait, work = _waiting(log)
    busy = _busy_cores(log)
    return {
        "rank": log.rank,
        "steps": len(log.steps["t"]),
        "epochs": len(log.epochs),
        "waited": waited_share(log),
        "wait_ms": float(1e3 * np.median(wait)) if len(wait) else None,
        "step_ms": float(1e3 * np.median(work)) if len(work) else None,
        "cores_busy": busy,
    }
