"""The log of `gpupipe.watch`: JSON, one event a line, so that a run that was killed leaves what it had written.

begin:     once: who wrote it, where, and how the loader is set up
step:      one a step: epoch, step, wait_s, step_s, samples, bytes, pixels, tensor_bytes; t is the end of the wait;
           ready: whether the batch had been loaded when it was asked for
resources: one a second or so: `gpupipe.measure.gauges.Gauges`; and remote_*, `gpupipe.RemoteStats`, if there is one
types:     with trace_memory, now and then: the bytes that objects of each type hold
end:       once, if the run got there

All times are seconds of one clock, from the beginning.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import SourceError

VERSION = 1

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

_STEP_FIELDS = ("t", "epoch", "step", "wait_s", "step_s", "ready", "samples", "bytes", "pixels", "tensor_bytes")


@dataclass(frozen=True, slots=True)
class Log:
    """What one rank saw.

    Attributes:
        name: Of the file, for messages.
        begin: The event that tells who and where.
        steps: Name -> float64 (steps,), NaN where it is not known.
        resources: Name -> float64 (looks,), NaN where it is not known; "t" among them.
        types: Of each trace, the bytes by type.
        finished: Whether the end is in it.
    """

    name: str
    begin: dict[str, Any]
    steps: dict[str, F64]
    resources: dict[str, F64]
    types: tuple[dict[str, int], ...]
    finished: bool

    @property
    def rank(self) -> int:
        return int(self.begin.get("rank", 0))

    @property
    def loader(self) -> dict[str, Any]:
        """How the loader was set up."""
        found: dict[str, Any] = self.begin.get("loader", {})
        return found

    @property
    def cores(self) -> int:
        """CPU cores that the processes may use."""
        return int(self.begin.get("cores", 1))

    @property
    def epochs(self) -> I64:
        return np.unique(self.steps["epoch"].astype(np.int64))


def read_log(path: str | Path) -> Log:
    """Read a log, of a run that still goes on, too.

    Raises:
        SourceError: There is none, or it is none.
    """
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise SourceError(f"cannot read the log {str(path)!r}: {why}", uri=str(path)) from error
    events = []
    for number, line in enumerate(lines[:-1]):  # behind the last newline: nothing, or half a line
        try:
            event = json.loads(line)
            event["event"]
        except (ValueError, TypeError, KeyError) as error:
            raise _no_log(path, f"line {number + 1} is no event") from error
        events.append(event)
    return log_of(events, str(path))


def log_of(events: Sequence[dict[str, Any]], name: str) -> Log:
    """A log from its events.

    Raises:
        SourceError: They are none of this version.
    """
    if not events or events[0].get("event") != "begin" or events[0].get("version") != VERSION:
        raise _no_log(Path(name), f'it does not start with an event "begin" of version {VERSION}')
    _check_begin(events[0], name)
    looks = [event for event in events if event["event"] == "resources"]
    names = sorted({key for look in looks for key in look} - {"event"})
    types: list[Any] = [event.get("bytes") for event in events if event["event"] == "types"]
    try:
        return Log(
            name=name,
            begin=dict(events[0]),
            steps=_columns([event for event in events if event["event"] == "step"], _STEP_FIELDS),
            resources=_columns(looks, names),
            types=tuple({str(kind): int(size) for kind, size in dict(held).items()} for held in types),
            finished=events[-1]["event"] == "end",
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise _no_log(Path(name), f"a value in it is no number ({error})") from error


def _check_begin(begin: dict[str, Any], name: str) -> None:
    for field, least in (("rank", 0), ("world_size", 1), ("cores", 1)):
        value = begin.get(field, least)
        if not isinstance(value, int) or value < least:
            raise _no_log(Path(name), f"{field}={value!r} in its first line is no integer of at least {least}")
    if not isinstance(begin.get("loader", {}), dict):
        raise _no_log(Path(name), f"loader={begin['loader']!r} in its first line is no object")


def _columns(events: Sequence[dict[str, Any]], names: Iterable[str]) -> dict[str, F64]:
    def number(value: Any) -> float:
        if value is None:
            return float("nan")
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise TypeError(repr(value))
        return float(value)

    return {name: np.array([number(event.get(name)) for event in events], np.float64) for name in names}


def _no_log(path: Path, why: str) -> SourceError:
    return SourceError(f"{str(path)!r} is no log of gpupipe.watch: {why}", uri=str(path))
