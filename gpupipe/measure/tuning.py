"""`gpupipe.tune`: the settings that load fastest here, or just fast enough, found in minutes."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from gpupipe import backends
from gpupipe.backends.base import DECODE, Options
from gpupipe.checks import check_integer
from gpupipe.errors import BackendUnavailable, ConfigError, SourceError
from gpupipe.loader import Loader
from gpupipe.measure.batches import endless, rows_of
from gpupipe.measure.usage import MISSING, Tree
from gpupipe.parallel import usable_cores
from gpupipe.parity.environment import environment
from gpupipe.recipe import Recipe
from gpupipe.sampling.samplers import permutation
from gpupipe.sources import open_source
from gpupipe.sources.base import Source

Say = Callable[[str], None]
Settings = Mapping[str, Any]

VERSION = 1
_clock = time.perf_counter
# Shares of the time: the sweep may have the first, repeating the best up to the second; the rest confirms.
SWEEP, REPEAT = 0.5, 0.7
LEAST_S, MOST_S = 0.3, 5.0  # of one measurement
SETTLED = 0.7  # the share of its time that a measurement counts; the rest is for starting and stopping
WARM_UP_BATCHES = 1
REPEATS = 3
# What a target is exceeded by before it counts as covered: a loader that is exactly as fast as the step makes it wait
# half of the time.
RESERVE = 1.1


class Factory(Protocol):
    """Makes a loader, such as a torch DataLoader, with the settings that are tried."""

    def __call__(
        self, *, num_workers: int, prefetch_factor: int | None, pin_memory: bool, persistent_workers: bool
    ) -> Iterable[Any]: ...


@dataclass(frozen=True, slots=True)
class Trial:
    """One of the settings that were tried.

    Attributes:
        settings: By name.
        images_per_s: Each time it was measured.
        memory_mb: Of this process and its children while it loaded; None where psutil is missing.
        why_out: Why it was given up; empty for the chosen one.
    """

    settings: dict[str, Any]
    images_per_s: list[float]
    memory_mb: float | None
    why_out: str


@dataclass(frozen=True, slots=True)
class TuneReport:
    """What `tune` found.

    Attributes:
        settings: The chosen ones, by name.
        default: Those it started from.
        gain: How many times as fast as the default, in the confirming run.
        spread: Of that gain over the confirming run's rounds: (lowest, highest).
        images_per_s, default_images_per_s: In the confirming run, medians.
        target_images_per_s: What had to be reached; None: as much as there is.
        trials: All that was tried, the fastest first.
        seconds: It took.
        notes: What the reader has to know.
        machine: Name -> version or description.
    """

    settings: dict[str, Any]
    default: dict[str, Any]
    gain: float
    spread: tuple[float, float]
    images_per_s: float
    default_images_per_s: float
    target_images_per_s: float | None
    trials: tuple[Trial, ...]
    seconds: float
    notes: tuple[str, ...]
    machine: dict[str, str]

    @property
    def backend(self) -> str | None:
        """For `Loader(backend=...)`; None for other loaders."""
        found = self.settings.get("backend")
        return None if found is None else str(found)

    @property
    def options(self) -> Options:
        """For `Loader(options=...)`.

        Raises:
            ConfigError: The settings are those of another loader.
        """
        if self.backend is None:
            raise ConfigError("these settings are a DataLoader's: use report.settings", field="options")
        return _options(self.settings)

    def to_json(self) -> str:
        """Everything, as strict JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write what `load_options` reads.

        Raises:
            SourceError: It cannot be written.
        """
        path = Path(path)
        text = json.dumps({"version": VERSION, "settings": self.settings, "machine": self.machine}, indent=2)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise SourceError(f"cannot write {str(path)!r}: {error.strerror or error}", uri=str(path)) from error
        return path

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the images a second of all that was tried.

        Raises:
            BackendUnavailable: matplotlib is not installed.
            SourceError: It cannot be written.
        """
        from gpupipe.measure.plot import plot_tune

        return plot_tune(self, Path(path))

    def table(self) -> str:
        """For a terminal."""
        names = list(self.settings)
        head = (*names, "images/s", "memory", "")
        rows = [
            (
                *(str(trial.settings.get(name, "")) for name in names),
                " ".join(f"{speed:.0f}" for speed in trial.images_per_s),
                "-" if trial.memory_mb is None else f"{trial.memory_mb:.0f} MB",
                trial.why_out or "chosen",
            )
            for trial in self.trials
        ]
        widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in (head, *rows)]
        low, high = self.spread
        chosen = ", ".join(f"{name}={value!r}" for name, value in self.settings.items())
        lines += [
            "",
            f"{chosen}: {self.gain:.2f} times the default ({low:.2f} to {high:.2f}), {self.images_per_s:.0f} against "
            f"{self.default_images_per_s:.0f} images/s in a fresh run; it took {self.seconds:.0f} s",
            *self.notes,
        ]
        return "\n".join(line.rstrip() for line in lines)


def load_options(path: str | os.PathLike[str]) -> Options:
    """The options that `TuneReport.save` (`gpupipe tune --save`) wrote.

    Raises:
        SourceError: There is no such file, or it is none of these.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
        if found["version"] != VERSION:
            raise ValueError(f"version {found['version']}")
        settings = found["settings"]
        if "backend" not in settings:
            raise ValueError("the settings are those of a DataLoader")
        return _options(settings)
    except (OSError, ValueError, KeyError, TypeError, ConfigError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise SourceError(f"{str(path)!r} holds no options that gpupipe.tune saved: {why}", uri=str(path)) from error


def _options(settings: Settings) -> Options:
    return Options(**{name: value for name, value in settings.items() if name != "backend"})


def tune(
    target: str | os.PathLike[str] | Source | Factory,
    recipe: Recipe | None = None,
    *,
    batch_size: int = 64,
    device: str | None = None,
    images_per_s: float | None = None,
    memory_mb: float | None = None,
    seconds: float = 180.0,
    say: Say | None = None,
) -> TuneReport:
    """Find the settings that load fastest, or the cheapest ones that load fast enough.

    Starts from the rule of thumb for this number of cores, tries what lies around it for a short time each, drops the
    slower half and gives the rest twice the time (successive halving), repeats the best two to tell gain from noise,
    and confirms the winner against the default in fresh loaders that took no part in choosing.

    Args:
        target: A data set (what `gpupipe.open_source` takes), whose `Loader` is tuned: backend, threads, prefetch, and
            on a GPU where to decode. Or a function ``make(*, num_workers, prefetch_factor, pin_memory,
            persistent_workers)`` that makes a torch DataLoader (the module it is in is imported by its workers).
        recipe: For a data set; None: `Recipe.train()`.
        batch_size: For a data set.
        device: For a data set; see `Loader`.
        images_per_s: What the training step needs: then the cheapest settings are chosen that give a tenth more. None:
            the fastest.
        memory_mb: The most that this process and its children may hold.
        seconds: It takes no longer, whatever it has found by then.
        say: Is told what is going on.

    Raises:
        ConfigError: Wrong arguments, or nothing could be measured.
        SourceError: The data set cannot be opened.
    """
    check_integer("batch_size", batch_size, 1)
    for name, value, least in (("images_per_s", images_per_s, 0), ("memory_mb", memory_mb, 0), ("seconds", seconds, 1)):
        if value is not None and (not isinstance(value, int | float) or isinstance(value, bool) or not value > least):
            raise ConfigError(f"{name}={value!r} is not valid: it must be above {least}", field=name, value=value)
    tell: Say = say or (lambda _: None)
    if callable(target):
        if recipe is not None:
            raise ConfigError("a recipe goes with a data set; a DataLoader has its own", field="recipe", value=recipe)
        make: Make = partial(_made_by, target)
        return _Search(make, float(seconds), images_per_s, memory_mb, tell).run(_data_loader_candidates())
    source = open_source(target)
    try:
        make = partial(_loader, source, recipe or Recipe.train(), batch_size, device)
        return _Search(make, float(seconds), images_per_s, memory_mb, tell).run(_loader_candidates(device))
    finally:
        if source is not target:
            source.close()


# What is tried


def _counts(default: int, cores: int) -> list[int]:
    """Numbers of threads or workers around the default, it first."""
    around = {default, 1, max(1, default // 2), default * 2, cores, max(1, cores - 1)}
    return [default, *sorted(around - {default})]


def rule_of_thumb(cores: int) -> dict[str, Any]:
    """A DataLoader's settings for images: 8 workers on 16 to 32 cores, half of the cores on fewer, a quarter on more.

    Source: PERFORMANCE.md; PyTorch's tuning guide, for pinned memory and persistent workers.
    """
    import torch

    workers = max(1, cores // 2) if cores < 16 else max(8, cores // 4)
    pinned = torch.cuda.is_available()
    return {"num_workers": workers, "prefetch_factor": 2, "pin_memory": pinned, "persistent_workers": True}


def _data_loader_candidates() -> Iterator[dict[str, Any]]:
    cores = usable_cores()
    default = rule_of_thumb(cores)
    for workers in _counts(default["num_workers"], cores):
        yield default | {"num_workers": workers}
    yield default | {"prefetch_factor": 4}
    yield {"num_workers": 0, "prefetch_factor": None, "pin_memory": default["pin_memory"], "persistent_workers": False}


def _loader_candidates(device: str | None) -> Iterator[dict[str, Any]]:
    cores = usable_cores()
    chosen = backends.choose("auto", device)
    on_gpu = chosen.name == "dali"
    default = {"backend": chosen.name, "threads": cores, "prefetch": 2, "decode": "gpu"}
    names = [chosen.name]
    for name in ("numba", "torchvision"):
        if name not in names:
            try:
                backends.choose(name, device)
            except BackendUnavailable:
                continue
            names.append(name)
    yield default
    for name in names:
        for threads in _counts(cores, cores):
            yield default | {"backend": name, "threads": threads}
    yield default | {"prefetch": 4}
    if on_gpu:
        for decode in DECODE[1:]:
            yield default | {"decode": decode}


def _loader(
    source: Source, recipe: Recipe, batch_size: int, device: str | None, settings: Settings
) -> tuple[Iterable[Any], Callable[[], None]]:
    loader = Loader(
        source,
        recipe,
        batch_size=batch_size,
        sampler=permutation(len(source), 0).tolist(),
        backend=settings["backend"],
        device=device,
        options=_options(settings),
    )
    return loader, loader.close


def _made_by(factory: Any, settings: Settings) -> tuple[Iterable[Any], Callable[[], None]]:
    return factory(**settings), lambda: None


# The search

Make = Callable[[Settings], "tuple[Iterable[Any], Callable[[], None]]"]
"""From settings to a loader, and what closes it."""


@dataclass(slots=True)
class _Tried:
    """What is known of some settings so far."""

    settings: dict[str, Any]
    rates: list[float] = field(default_factory=list)
    memory_mb: float | None = None
    why_out: str = ""

    @property
    def rate(self) -> float:
        return float(np.median(self.rates))

    @property
    def workers(self) -> int:
        """What it takes of the machine."""
        return int(self.settings.get("threads") or self.settings.get("num_workers") or 1)


class _Search:
    def __init__(self, make: Make, seconds: float, target: float | None, memory_mb: float | None, say: Say) -> None:
        self._begin = _clock()
        self._make, self._seconds, self._target, self._memory_mb, self._say = make, seconds, target, memory_mb, say
        self._tree = Tree()
        self._notes = [] if self._tree.measured or memory_mb is None else [MISSING]

    def run(self, candidates: Iterable[dict[str, Any]]) -> TuneReport:
        """Sweep, repeat, confirm.

        Args:
            candidates: The default first; the same one may come again.
        """
        tried: list[_Tried] = []
        for settings in candidates:
            if all(settings != each.settings for each in tried):
                tried.append(_Tried(settings))
        default = tried[0]
        chosen = self._better(self._swept(tried))
        for each in tried:
            if each is not chosen and not each.why_out:
                each.why_out = "no better" if each.rates else "not tried: there was no time"
        mine, others = self._confirmed(chosen, default)
        gains = np.array(mine) / np.array(others)
        measured = sorted((each for each in tried if each.rates), key=lambda each: (each is not chosen, -each.rate))
        return TuneReport(
            settings=chosen.settings,
            default=default.settings,
            gain=float(np.median(gains)),
            spread=(float(gains.min()), float(gains.max())),
            images_per_s=float(np.median(mine)),
            default_images_per_s=float(np.median(others)),
            target_images_per_s=self._target,
            trials=tuple(Trial(each.settings, each.rates, each.memory_mb, each.why_out) for each in measured),
            seconds=_clock() - self._begin,
            notes=tuple(self._notes),
            machine=environment(),
        )

    def _deadline(self, share: float) -> float:
        return self._begin + share * self._seconds

    def _swept(self, tried: Sequence[_Tried]) -> list[_Tried]:
        """Successive halving: the two that are left, or one, the better one first.

        Source: Jamieson and Talwalkar, "Non-stochastic best arm identification and hyperparameter optimization", 2016.
        """
        end = self._deadline(SWEEP)
        alive = list(tried)
        rounds = max(1, math.ceil(math.log2(len(alive))) - 1)
        for number in range(rounds):
            # A round has as many measurements as there are left, so each takes longer than in the round before.
            span = (end - _clock()) / (rounds - number) / len(alive)
            for each in alive:
                if _clock() < end or not any(known.rates for known in tried):
                    self._measure(each, span, end)
            measured = [each for each in alive if each.rates and not each.why_out]
            if not measured:
                why = "; ".join(f"{_shown(each.settings)}: {each.why_out}" for each in tried if each.why_out)
                raise ConfigError(f"no settings are left: {why}", field="memory_mb", value=self._memory_mb)
            alive = self._ranked(measured)[: max(2, -(-len(measured) // 2))]
            if len(alive) <= 2:
                break
        return alive[:2]

    def _measure(self, each: _Tried, span: float, deadline: float) -> None:
        """Load with these settings for a while, in a loader of their own."""
        span = min(MOST_S, max(LEAST_S, SETTLED * span))
        rate, memory_mb = _rate(self._make, each.settings, span, deadline, self._tree)
        each.rates.append(rate)
        each.memory_mb = max(filter(None, (each.memory_mb, memory_mb)), default=None)
        if self._memory_mb is not None and each.memory_mb is not None and each.memory_mb > self._memory_mb:
            each.why_out = f"took {each.memory_mb:.0f} MB of the {self._memory_mb:.0f} allowed"
        self._say(f"{_shown(each.settings)}: {rate:.0f} images/s{each.why_out and ', ' + each.why_out}")

    def _covers(self, each: _Tried) -> bool:
        return self._target is not None and each.rate >= RESERVE * self._target

    def _ranked(self, tried: Sequence[_Tried]) -> list[_Tried]:
        """The best first: the fastest, or the cheapest of those that are fast enough, which come before the others."""
        return sorted(
            tried, key=lambda each: (0, each.workers, -each.rate) if self._covers(each) else (1, 0, -each.rate)
        )

    def _better(self, best: list[_Tried]) -> _Tried:
        """The better of two, by turns; where they cannot be told apart, the cheaper one."""
        if len(best) == 1:
            return best[0]
        end = self._deadline(REPEAT)
        for number in range(REPEATS):
            for each in best:
                if _clock() < end:
                    self._measure(each, (end - _clock()) / (2 * (REPEATS - number)), end)
        first, second = self._ranked(best)
        noise = max(float(np.ptp(each.rates)) / 2 for each in best)
        if self._covers(first) or first.rate - second.rate > noise or first.workers <= second.workers:
            return first
        self._notes.append(
            f"{_shown(second.settings)} is as fast as {_shown(first.settings)} within the noise of {noise:.0f} "
            "images/s, and takes less."
        )
        return second

    def _confirmed(self, chosen: _Tried, default: _Tried) -> tuple[list[float], list[float]]:
        """Images a second of the chosen settings and of the default, by turns, in loaders of their own."""
        end = self._deadline(1.0)
        self._say(f"confirming {_shown(chosen.settings)}")
        mine: list[float] = []
        others: list[float] = []
        while not others or (len(others) < REPEATS and end - _clock() > 4 * LEAST_S):
            span = max(LEAST_S, SETTLED * (end - _clock()) / (2 * (REPEATS - len(others))))
            for each, rates in ((chosen, mine), (default, others)):
                rates.append(_rate(self._make, each.settings, span, end, self._tree)[0])
        return mine, others


def _rate(make: Make, settings: Settings, seconds: float, deadline: float, tree: Tree) -> tuple[float, float | None]:
    """Images a second of a fresh loader, epoch after epoch, behind its first two batches; and its memory in MB."""
    loader, close = make(settings)
    try:
        batches = endless(loader)
        begin, images = time.perf_counter(), 0
        for number, batch in enumerate(batches):
            now = time.perf_counter()
            if number == WARM_UP_BATCHES and now < deadline:
                begin, images = now, 0  # without the start of threads, workers and kernels
            else:
                images += rows_of(batch)
                if number > WARM_UP_BATCHES and (now - begin >= seconds or now >= deadline):
                    break
        memory_mb = tree.memory_mb()
        batches.close()
        return images / (now - begin), memory_mb
    finally:
        close()


def _shown(settings: Settings) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())
