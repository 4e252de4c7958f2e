"""The exception hierarchy.

Every class keeps the facts of the failure as attributes, so that a program can act on them without parsing the
message, and every class survives pickling, because errors travel out of worker processes.
"""

from __future__ import annotations

import pickle
from typing import Any


def _rebuild(cls: type[GpupipeError], message: str, facts: dict[str, Any]) -> GpupipeError:
    return cls(message, **facts)


def _picklable(value: Any) -> Any:
    """The value itself, or its repr where it cannot be pickled: a lambda given as an argument, an open file."""
    try:
        pickle.dumps(value)
    except Exception:
        return repr(value)
    return value


class GpupipeError(Exception):
    """Base class of every error that gpupipe raises on purpose.

    Args:
        message: What failed, the value found, what is allowed and what to do.
        **facts: The same as data; each becomes an attribute. A class lists the names it always has in `FACTS`
            (``None`` when unknown). A fact that cannot be pickled travels as its repr.
    """

    FACTS: tuple[str, ...] = ()

    def __init__(self, message: str, **facts: Any) -> None:
        super().__init__(message)
        self.message = message
        self.facts: dict[str, Any] = dict.fromkeys(self.FACTS) | facts
        for name, value in self.facts.items():
            setattr(self, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, {name: _picklable(value) for name, value in self.facts.items()})

    def __str__(self) -> str:
        return self.message


class ConfigError(GpupipeError, ValueError):
    """An argument or recipe that cannot work. Attributes: field, value, allowed."""

    FACTS: tuple[str, ...] = ("field", "value", "allowed")
    field: str | None
    value: Any
    allowed: Any


class SourceError(GpupipeError, OSError):
    """A data set that cannot be opened or read. Attributes: uri."""

    FACTS: tuple[str, ...] = ("uri",)
    uri: str | None


class RecordError(SourceError):
    """One record that cannot be read. Attributes: uri, index, key, path, offset."""

    FACTS: tuple[str, ...] = ("uri", "index", "key", "path", "offset")
    index: int | None
    key: str | None
    path: str | None
    offset: int | None


class DecodeError(RecordError):
    """One record whose bytes are no image that can be decoded. Attributes: those of RecordError, and backend."""

    FACTS: tuple[str, ...] = (*RecordError.FACTS, "backend")
    backend: str | None


class BackendError(GpupipeError, RuntimeError):
    """A backend failed for a reason other than its input. Attributes: backend, stage."""

    FACTS: tuple[str, ...] = ("backend", "stage")
    backend: str | None
    stage: str | None


class BackendUnavailable(BackendError, ImportError):
    """A backend that cannot run here. Attributes: backend, stage, missing, install."""

    FACTS: tuple[str, ...] = ("backend", "stage", "missing", "install")
    missing: str | None
    install: str | None


class StateError(GpupipeError, ValueError):
    """A saved state that does not fit. Attributes: expected, actual."""

    FACTS: tuple[str, ...] = ("expected", "actual")
    expected: Any
    actual: Any
