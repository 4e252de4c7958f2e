"""How fast a loader is on the user's own data, beside what else could be used, in the same run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from gpupipe.backends import choose
from gpupipe.backends.base import Options
from gpupipe.checks import check_integer
from gpupipe.errors import BackendUnavailable, ConfigError
from gpupipe.loader import Loader
from gpupipe.measure.usage import MISSING, Tree
from gpupipe.parallel import usable_cores
from gpupipe.parity.environment import environment
from gpupipe.recipe import Recipe
from gpupipe.sampling.samplers import permutation
from gpupipe.sources import open_source
from gpupipe.sources.base import Source

if TYPE_CHECKING:
    from gpupipe.measure.peers import Work

# Some loaders read ahead into their next epoch; that must not be paid by whoever comes after them.
SETTLE_S = 0.3
# Rounds shorter than this measure how an epoch begins.
LEAST_S = 1.0
PERCENTILES = (50, 90, 99)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Figures:
    """One contestant's.

    Attributes:
        name: "gpupipe numba", "torchvision", ...
        images_per_s: Median over the rounds.
        images_per_s_iqr: Interquartile range over the rounds.
        ratio: To the first peer, or to the first of all where there is no peer.
        mb_per_s: Of the files as they are stored.
        first_batch_s: From making it to its first batch.
        cpu_cores: CPU seconds a second, this process and its children; None where psutil is missing.
        memory_mb: Of the same while it is loaded, above what was in use before it was made.
        batch_ms: Percentile -> milliseconds between batches.
        times_s: Seconds from the beginning of each round to each of its batches.
    """

    name: str
    images_per_s: float
    images_per_s_iqr: float
    ratio: float
    mb_per_s: float
    first_batch_s: float
    cpu_cores: float | None
    memory_mb: float | None
    batch_ms: dict[str, float]
    times_s: list[list[float]] = field(repr=False)


@dataclass(frozen=True, slots=True)
class BenchReport:
    """What `bench` measured.

    Attributes:
        target: The data set.
        images: Images of a round.
        rounds: Measured, after one to warm up.
        batch_size, workers: Of every contestant.
        recipe: Its steps, shortened.
        figures: One for each contestant, in the order asked for.
        missing: Name -> why it could not take part.
        notes: What the reader has to know.
        machine: Name -> version or description of hardware and libraries.
    """

    target: str
    images: int
    rounds: int
    batch_size: int
    workers: int
    recipe: str
    figures: list[Figures]
    missing: dict[str, str]
    notes: list[str]
    machine: dict[str, str]

    def to_json(self) -> str:
        """Everything, as strict JSON."""
        return json.dumps(asdict(self), indent=2, allow_nan=False)

    def table(self) -> str:
        """For a terminal."""
        head = ("", "images/s", "+-", "ratio", "MB/s", "first batch", "CPU cores", "memory", "ms a batch 50/90/99 %")
        rows = [
            (
                each.name,
                f"{each.images_per_s:.0f}",
                f"{each.images_per_s_iqr:.0f}",
                f"{each.ratio:.2f}",
                f"{each.mb_per_s:.1f}",
                f"{each.first_batch_s:.2f} s",
                "-" if each.cpu_cores is None else f"{each.cpu_cores:.2f}",
                "-" if each.memory_mb is None else f"{each.memory_mb:.0f} MB",
                " / ".join(f"{value:.0f}" for value in each.batch_ms.values()),
            )
            for each in self.figures
        ]
        widths = [max(len(row[place]) for row in (head, *rows)) for place in range(len(head))]
        lines = [
            "  ".join(text.ljust(width) if place == 0 else text.rjust(width) for place, (text, width) in enumerate(row))
            for row in ([*zip(line, widths, strict=True)] for line in (head, *rows))
        ]
        about = (
            f"{self.target}: {self.images} images a round, {self.rounds} rounds, batches of {self.batch_size}, "
            f"{self.workers} workers, {self.recipe}"
        )
        absent = [f"{name} did not take part: {why}" for name, why in self.missing.items()]
        parts = [[about], lines, absent, self.notes]
        return "\n\n".join("\n".join(part) for part in parts if part)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw images a second over time, and the percentiles of the time between batches.

        Raises:
            BackendUnavailable: matplotlib is not installed.
            SourceError: It cannot be written.
        """
        from gpupipe.measure.plot import plot_bench

        return plot_bench(self, Path(path))


def bench(  # noqa: PLR0913 - what is measured, and how: the options of the command
    target: str | os.PathLike[str] | Source,
    recipe: Recipe | None = None,
    *,
    backends: Sequence[str] = ("auto",),
    against: Sequence[str] = (),
    batch_size: int = 64,
    images: int = 1000,
    rounds: int = 5,
    workers: int | None = None,
    say: Say | None = None,
) -> BenchReport:
    """Measure loaders on a data set, in turn, so that what else the machine does hits all alike.

    Args:
        target: What `gpupipe.open_source` takes.
        recipe: None: `Recipe.train()`.
        backends: Of gpupipe: "auto", "numba", "torchvision", "dali", each perhaps with ":cpu" or another device.
        against: Peers: "torchvision" (Pillow in a DataLoader, what most people run), "torchvision-tensors",
            "dali-native", "spdl", "webdataset", "ffcv". One that cannot run is listed in `missing`, with the reason;
            one that is not installed, with how to install it.
        batch_size: Samples in a batch.
        images: At most so many samples, the same for all, in a random order; they are read once before.
        rounds: Epochs over these that are measured, after one that warms up.
        workers: Threads of gpupipe and DALI, processes of a DataLoader; None: one for each core.
        say: Is told what is going on.

    Raises:
        ConfigError: Wrong arguments, or nothing could run.
        SourceError: The data set cannot be opened.
    """
    from gpupipe.measure.peers import PEERS, Work

    workers = usable_cores() if workers is None else workers
    for name, value in (("batch_size", batch_size), ("images", images), ("rounds", rounds), ("workers", workers)):
        check_integer(name, value, 1)
    unknown = [name for name in against if name not in PEERS]
    if unknown:
        raise ConfigError(
            f"against={unknown[0]!r} is not known: there are {', '.join(PEERS)}",
            field="against",
            value=unknown[0],
            allowed=tuple(PEERS),
        )
    if not backends and not against:
        raise ConfigError("there is nothing to measure: name a backend, or a peer to be against", field="backends")
    for spec in backends:
        name, _, device = spec.partition(":")
        with suppress(BackendUnavailable):  # listed in `missing`
            choose(name, device or None)
    tell: Say = say or (lambda _: None)
    tree = Tree()
    with ExitStack() as stack:
        source = open_source(target)
        if source is not target:
            stack.callback(source.close)
        indices = permutation(len(source), 0)[:images].tolist()
        tell(f"reading {len(indices)} of {len(source)} samples of {source.uri}")
        stored = sum(source[index].size_bytes for index in indices)
        work = Work(source, indices, recipe or Recipe.train(), batch_size, workers)
        makers: dict[str, Callable[[ExitStack], Any]] = {
            f"gpupipe {spec}": partial(_ours, work, spec) for spec in backends
        }
        makers |= {name: partial(PEERS[name], work) for name in against}
        made, missing = _warmed_up(makers, stack, tree, tell)
        if not made:
            raise ConfigError("; ".join(f"{name}: {why}" for name, why in missing.items()), field="backends")
        _run(made, rounds, tree, tell)
        yardstick = next((each for name, each in made.items() if name in PEERS), next(iter(made.values())))
        figures = [each.figures(name, len(indices), stored, yardstick) for name, each in made.items()]
    return BenchReport(
        target=source.uri,
        images=len(indices),
        rounds=rounds,
        batch_size=batch_size,
        workers=work.workers,
        recipe=", ".join(type(step).__name__ for step in work.recipe.steps),
        figures=figures,
        missing=missing,
        notes=_notes(figures, tree),
        machine=environment(),
    )


def _notes(figures: Sequence[Figures], tree: Tree) -> list[str]:
    found = [] if tree.measured else [MISSING]
    shortest = min(times[-1] for each in figures for times in each.times_s)
    if shortest < LEAST_S:
        found.append(
            f"The shortest round took {shortest:.2f} s, of which the start of an epoch is a good part: take more "
            "images for figures that hold in training."
        )
    return found


def _ours(work: Work, spec: str, stack: ExitStack) -> Loader:
    name, _, device = spec.partition(":")
    loader = Loader(
        work.source,
        work.recipe,
        batch_size=work.batch_size,
        sampler=work.indices,
        backend=name,
        device=device or None,
        options=Options(threads=work.workers),
    )
    stack.callback(loader.close)
    return loader


class _Contestant:
    def __init__(self, epochs: Any, first_batch_s: float, memory_mb: float | None) -> None:
        self.epochs, self.first_batch_s, self.memory_mb = epochs, first_batch_s, memory_mb
        self.times_s: list[list[float]] = []
        self.cpu_s: list[float] = []

    def run(self, tree: Tree) -> None:
        """One epoch, measured."""
        cpu = tree.cpu_s()
        self.times_s.append(_epoch(self.epochs))
        if cpu is not None:
            self.cpu_s.append((tree.cpu_s() or cpu) - cpu)

    def speed(self) -> float:
        return 1 / float(np.median([times[-1] for times in self.times_s]))

    def figures(self, name: str, images: int, stored: int, yardstick: _Contestant) -> Figures:
        totals = np.array([times[-1] for times in self.times_s])
        between = np.concatenate([np.diff([0.0, *times]) for times in self.times_s]) * 1e3
        low, high = np.percentile(images / totals, (25, 75)).tolist()
        return Figures(
            name=name,
            images_per_s=images * self.speed(),
            images_per_s_iqr=high - low,
            ratio=self.speed() / yardstick.speed(),
            mb_per_s=stored / 1e6 * self.speed(),
            first_batch_s=self.first_batch_s,
            cpu_cores=float(np.median(np.array(self.cpu_s) / totals)) if self.cpu_s else None,
            memory_mb=self.memory_mb,
            batch_ms={str(share): float(np.percentile(between, share)) for share in PERCENTILES},
            times_s=self.times_s,
        )


def _epoch(epochs: Any) -> list[float]:
    """Seconds from the beginning to each batch; the last one when all of it is there, on a GPU too."""
    times = []
    begin = time.perf_counter()
    for _ in epochs:
        times.append(time.perf_counter() - begin)
    _synchronize()
    times[-1] = time.perf_counter() - begin
    return times


def _synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _warmed_up(
    makers: dict[str, Callable[[ExitStack], Any]], stack: ExitStack, tree: Tree, tell: Say
) -> tuple[dict[str, _Contestant], dict[str, str]]:
    """Make everyone, let each run one epoch, and see who cannot."""
    made: dict[str, _Contestant] = {}
    missing: dict[str, str] = {}
    for name, make in makers.items():
        tell(f"{name}: warming up")
        before = tree.memory_mb()
        own = ExitStack()
        begin = time.perf_counter()
        try:
            epochs = make(own)
            batches = iter(epochs)
            next(batches)
            _synchronize()
            first_batch_s = time.perf_counter() - begin
            for _ in batches:
                pass
        except (BackendUnavailable, ConfigError) as error:
            own.close()
            missing[name] = str(error)
            continue
        except BaseException:
            own.close()
            raise
        stack.push(own)
        after = tree.memory_mb()
        made[name] = _Contestant(epochs, first_batch_s, None if before is None or after is None else after - before)
    return made, missing


def _run(made: dict[str, _Contestant], rounds: int, tree: Tree, tell: Say) -> None:
    names = list(made)
    for number in range(rounds):
        for name in names if number % 2 == 0 else reversed(names):
            time.sleep(SETTLE_S)
            made[name].run(tree)
        done = "; ".join(f"{name} {made[name].times_s[-1][-1]:.2f} s" for name in names)
        tell(f"round {number + 1} of {rounds}: {done}")
