"""`gpupipe.watch`: what a training loop waits for, step by step, while it runs."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TextIO, TypeVar

import numpy as np

from gpupipe.checks import check_integer
from gpupipe.errors import ConfigError, SourceError
from gpupipe.measure.batches import samples_of
from gpupipe.measure.gauges import Meter, held_by_type, memory_limit_bytes
from gpupipe.measure.readiness import Readiness
from gpupipe.measure.watch_log import VERSION, Log, log_of
from gpupipe.parallel import usable_cores
from gpupipe.remote.counters import RemoteStats
from gpupipe.sampling.rank import find_ranks

T = TypeVar("T")
Say = Callable[[str], None]
Cost = Callable[[Any], "tuple[int | None, int | None]"]
"""(bytes, pixels) that a batch cost to load, from the batch."""

PERCENTILES = (50, 90, 99)
JOIN_TIMEOUT_S = 5.0
LOOKS_A_TRACE = 5
MAX_RESOURCES_S = 86_400
REMOTE = "remote_"


def watch(
    loader: Iterable[T],
    *,
    every: int = 100,
    log: str | os.PathLike[str] | None = None,
    say: Say | None = None,
    resources_s: float = 1.0,
    cost: Cost | None = None,
    global_batch_size: int | None = None,
    trace_memory: bool = False,
) -> Watched[T]:
    """Watch a training loop: how long each step waits for data, how long it takes, and what the processes hold.

    Use it in the loader's place; it costs some microseconds a step and a millisecond a second. What comes out can be
    read by `gpupipe.diagnose`, which says what to change.

    Args:
        loader: A `Loader`, a torch DataLoader, or any iterable of batches.
        every: A line is said after so many steps; 0: none.
        log: A file for everything, JSON lines; where several ranks write, ``{rank}`` in its name is replaced. If its
            disk fills up, a line says so, and the training goes on.
        say: Takes the lines; None: they go to stderr.
        resources_s: Seconds between two looks at memory, files, threads and the GPU.
        cost: A batch's (bytes, pixels), where the loader does not tell them; a `Loader` does.
        global_batch_size: What the learning rate was chosen for; `gpupipe.diagnose` compares it with what comes.
        trace_memory: Count the objects of each type now and then (some 100 ms each time), so that a leak can be named.

    Returns:
        An iterable of the same batches and length, with `report()`; close it, or use it in a `with`, to end the log.

    Raises:
        ConfigError: An argument that cannot work.
        SourceError: The log cannot be opened.

    >>> import torch
    >>> watched = watch([torch.zeros(4, 3)] * 5, every=0)
    >>> for batch in watched:
    ...     pass
    >>> watched.close()
    >>> watched.report().steps, watched.report().samples
    (5, 20)
    """
    return Watched(
        loader,
        Watch(
            every=every,
            log=log,
            say=say,
            resources_s=resources_s,
            cost=cost,
            global_batch_size=global_batch_size,
            trace_memory=trace_memory,
        ),
    )


class Watched(Generic[T]):
    """What `watch` returns: the loader, watched."""

    def __init__(self, loader: Iterable[T], watch: Watch) -> None:
        self.loader, self._watch = loader, watch

    def __iter__(self) -> Iterator[T]:
        return self._watch(self.loader)

    def __len__(self) -> int:
        return len(self.loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Whatever else is asked for is the loader's: set_epoch, state_dict, batch_size, ..."""
        if name in ("loader", "_watch"):  # while it is unpickled or copied
            raise AttributeError(name)
        return getattr(self.loader, name)

    def report(self) -> WatchReport:
        """What was seen so far."""
        return self._watch.report()

    def close(self) -> None:
        """End the log. Idempotent; the loader stays open."""
        self._watch.close()

    def __enter__(self) -> Watched[T]:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class WatchReport:
    """The times of a run, so far.

    Attributes:
        steps, samples, epochs: Seen so far.
        seconds: In steps and waits.
        waited: The share of the time in which the loop waited for data, the first step of the first epoch apart.
        wait_ms, step_ms: Percentile -> milliseconds.
        samples_per_s: Over all.
        remote: What a source in a remote store had counted at the last look, named as in `gpupipe.RemoteStats`; else
            empty.
        log: Everything, as `gpupipe.diagnose` takes it.
    """

    steps: int
    samples: int
    epochs: int
    seconds: float
    waited: float
    wait_ms: dict[str, float]
    step_ms: dict[str, float]
    samples_per_s: float
    remote: dict[str, float]
    log: Log

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw waits and steps over the run, and what was held and used meanwhile.

        Raises:
            BackendUnavailable: matplotlib is not installed.
            SourceError: It cannot be written.
        """
        from gpupipe.measure.plot import plot_watch

        return plot_watch(self.log, Path(path))

    def __str__(self) -> str:
        def row(values: dict[str, float]) -> str:
            return " / ".join(f"{value:.1f}" for value in values.values())

        shares = "/".join(self.wait_ms)
        return (
            f"{self.steps} steps in {self.epochs} epochs, {self.seconds:.1f} s, {self.samples_per_s:.0f} samples/s; "
            f"waited for data {100 * self.waited:.1f} % of the time; "
            f"wait {row(self.wait_ms)} ms, step {row(self.step_ms)} ms ({shares} %)"
            + "".join(f"; {name} {value:g}" for name, value in self.remote.items() if value)
        )


class Watch:
    """Watches the loops over one loader or several; see `watch` for the arguments.

    ``with Watch(log="run.jsonl") as w: for batch in w(loader): ...``
    """

    def __init__(
        self,
        *,
        every: int = 100,
        log: str | os.PathLike[str] | None = None,
        say: Say | None = None,
        resources_s: float = 1.0,
        cost: Cost | None = None,
        global_batch_size: int | None = None,
        trace_memory: bool = False,
    ) -> None:
        self._every = check_integer("every", every, 0)
        if not isinstance(resources_s, int | float) or not 0 < resources_s <= MAX_RESOURCES_S:
            raise ConfigError(
                f"resources_s={resources_s!r} is not valid: it must be seconds above 0, of at most {MAX_RESOURCES_S}",
                field="resources_s",
                value=resources_s,
                allowed=f"0 < resources_s <= {MAX_RESOURCES_S}",
            )
        if global_batch_size is not None:
            global_batch_size = check_integer("global_batch_size", global_batch_size, 1)
        self._say, self._cost, self._global_batch_size = say or _say, cost, global_batch_size
        self._trace_memory, self._looks = trace_memory, 0
        self._ranks = find_ranks()
        self._start = time.perf_counter()
        self._events: list[dict[str, Any]] = []
        self._recent: deque[tuple[float, float, int]] = deque(maxlen=self._every or 1)
        self._steps = self._epochs = 0
        self._lock = threading.Lock()
        self._file = None if log is None else _opened(Path(os.fspath(log).replace("{rank}", str(self._ranks.rank))))
        self._meter: Meter | None = None
        self._stats: Callable[[], Any] = lambda: None
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()
        self._resources_s = float(resources_s)

    def __call__(self, loader: Iterable[T]) -> Iterator[T]:
        """One pass over a loader, watched."""
        if self._closing.is_set():
            raise ConfigError("this Watch is closed: make a new one", field="watch", value="closed")
        self._begin(loader)
        epoch, number = self._epochs, 0
        self._epochs += 1
        clock = time.perf_counter
        asked = clock()
        batches = iter(loader)  # which starts workers: the loop waits for that, too
        readiness = Readiness(batches)
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                return
            came, ready = clock(), readiness.was_ready()
            samples, tensor_bytes = samples_of(batch)
            size, pixels = self._cost_of(loader, batch)
            yield batch
            done = clock()
            self._note(
                {
                    "event": "step",
                    "t": came - self._start,
                    "epoch": epoch,
                    "step": number,
                    "wait_s": came - asked,
                    "step_s": done - came,
                    "ready": None if ready is None else int(ready),
                    "samples": samples,
                    "bytes": size,
                    "pixels": pixels,
                    "tensor_bytes": tensor_bytes,
                }
            )
            number += 1
            readiness.ask()
            # What this took is neither wait nor step.
            asked = clock()

    def report(self) -> WatchReport:
        """What was seen so far.

        Raises:
            ConfigError: Nothing yet.
        """
        with self._lock:
            events = list(self._events)
        if not any(event["event"] == "step" for event in events):
            raise ConfigError("no step was seen yet: iterate the watched loader first", field="watch", value=0)
        return report_of(log_of(events, "this run"))

    def close(self) -> None:
        """End the log. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        if self._thread is not None:
            self._thread.join(JOIN_TIMEOUT_S)
        if self._events:
            self._look()
            self._write({"event": "end", "t": time.perf_counter() - self._start})
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self._say_end_of_log(self._file, error)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # Inside

    def _begin(self, loader: Iterable[Any]) -> None:
        """The first event, once: later loaders, such as that of a validation set, are counted as further epochs."""
        if self._events:
            return
        gpu = _gpu(loader)
        self._meter, self._stats = Meter(gpu), lambda: getattr(loader, "stats", None)
        self._write(
            {
                "event": "begin",
                "version": VERSION,
                "unix_s": time.time(),
                "pid": os.getpid(),
                "rank": self._ranks.rank,
                "world_size": self._ranks.world_size,
                "cores": usable_cores(),
                "gpu": gpu is not None,
                "torch_threads": _torch_threads(),
                "memory_limit_bytes": memory_limit_bytes(),
                "global_batch_size": self._global_batch_size,
                "loader": describe(loader),
            }
        )
        self._look()
        self._thread = threading.Thread(target=self._keep_looking, name="gpupipe-watch", daemon=True)
        self._thread.start()

    def _cost_of(self, loader: Iterable[Any], batch: Any) -> tuple[int | None, int | None]:
        if self._cost is not None:
            said: Any = self._cost(batch)
            try:
                size, pixels = (None if number is None else int(number) for number in said)
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"cost(batch) returned {said!r}: it must be (bytes, pixels), integers or None",
                    field="cost",
                    value=said,
                    allowed="(bytes, pixels)",
                ) from error
            return size, pixels
        told = getattr(loader, "last_cost", None)
        return (None, None) if told is None else (told.bytes, told.pixels)

    def _note(self, step: dict[str, Any]) -> None:
        self._write(step)
        self._steps += 1
        self._recent.append((step["wait_s"], step["step_s"], step["samples"] or 0))
        if self._every and self._steps % self._every == 0:
            wait, work, samples = np.array(self._recent).T
            total = float(wait.sum() + work.sum())
            self._say(
                f"step {self._steps}: {samples.sum() / total:.0f} samples/s, waited {100 * wait.sum() / total:.1f} % "
                f"(median {1e3 * np.median(wait):.1f} ms, worst {1e3 * wait.max():.0f} ms; "
                f"step {1e3 * np.median(work):.1f} ms)"
            )

    def _keep_looking(self) -> None:
        while not self._closing.wait(self._resources_s):
            self._look()

    def _look(self) -> None:
        assert self._meter is not None
        known = {name: value for name, value in asdict(self._meter.look()).items() if value is not None}
        remote = getattr(self._stats(), "cache", None)
        if isinstance(remote, RemoteStats):
            known |= {f"{REMOTE}{name}": value for name, value in asdict(remote).items()}
        self._write({"event": "resources", "t": time.perf_counter() - self._start, **known})
        if self._trace_memory and self._looks % LOOKS_A_TRACE == 0:
            self._write({"event": "types", "t": time.perf_counter() - self._start, "bytes": held_by_type()})
        self._looks += 1

    def _write(self, event: dict[str, Any]) -> None:
        with self._lock:
            self._events.append(event)
            file = self._file
            if file is None or file.closed:
                return
            try:
                file.write(json.dumps(event) + "\n")
                if event["event"] != "step":  # a look a second takes the steps before it along
                    file.flush()
                return
            except OSError as error:
                self._file, why = None, error
        self._say_end_of_log(file, why)

    def _say_end_of_log(self, file: TextIO, error: OSError) -> None:
        """A full disk ends the log, not the training."""
        with contextlib.suppress(OSError):  # it flushes, which fails again
            file.close()
        self._say(f"the log {file.name!r} ends here, it cannot be written: {error.strerror or error}")


def report_of(log: Log) -> WatchReport:
    """The summary of a log.

    Args:
        log: With one step at least.
    """
    wait, work = log.steps["wait_s"], log.steps["step_s"]
    samples, seconds = int(np.nansum(log.steps["samples"])), float(wait.sum() + work.sum())
    after_start = slice(1, None) if len(wait) > 1 else slice(None)
    counted = float(wait[after_start].sum() + work[after_start].sum())

    def percentiles(values: Any) -> dict[str, float]:
        return {str(share): float(np.percentile(1e3 * values, share)) for share in PERCENTILES}

    return WatchReport(
        steps=len(wait),
        samples=samples,
        epochs=len(log.epochs),
        seconds=seconds,
        waited=float(wait[after_start].sum()) / counted if counted else 0.0,
        wait_ms=percentiles(wait),
        step_ms=percentiles(work),
        samples_per_s=samples / seconds if seconds else 0.0,
        remote={
            name.removeprefix(REMOTE): float(values[-1])
            for name, values in log.resources.items()
            if name.startswith(REMOTE)
        },
        log=log,
    )


def describe(loader: Iterable[Any]) -> dict[str, Any]:
    """How a loader is set up, as far as it can be read from it; plain values."""
    found: dict[str, Any] = {"kind": type(loader).__name__}
    names = {
        "batch_size": "batch_size",
        "global_batch_size": "global_batch_size",
        "drop_last": "drop_last",
        "num_workers": "workers",
        "prefetch_factor": "prefetch_factor",
        "persistent_workers": "persistent_workers",
        "pin_memory": "pin_memory",
    }
    for attribute, name in names.items():
        value = getattr(loader, attribute, None)
        if isinstance(value, bool | int):
            found[name] = value
    options = getattr(loader, "options", None)
    for name in ("threads", "prefetch"):
        value = getattr(options, name, None)
        if isinstance(value, int):
            found[name] = value
    backend = getattr(getattr(loader, "backend", None), "name", None)
    if isinstance(backend, str):
        found["backend"] = backend
    for attribute in ("sampler", "batch_sampler", "dataset"):
        value = getattr(loader, attribute, None)
        if value is not None:
            found[attribute] = type(value).__name__
    return found


def _gpu(loader: Iterable[Any]) -> int | None:
    """Number of the CUDA device that this process works on."""
    import torch

    if not torch.cuda.is_available():
        return None
    device = getattr(getattr(loader, "backend", None), "device", None)
    index = getattr(device, "index", None)
    return index if isinstance(index, int) else torch.cuda.current_device()


def _torch_threads() -> int:
    import torch

    return torch.get_num_threads()


def _say(line: str) -> None:
    import sys

    sys.stderr.write(f"gpupipe: {line}\n")


def _opened(path: Path) -> TextIO:
    try:
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise SourceError(f"cannot write the log {str(path)!r}: {error.strerror or error}", uri=str(path)) from error
