"""What every backend does with a submitted batch besides its pixels: check it, and say which of its records are bad."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from gpupipe.errors import ConfigError, DecodeError
from gpupipe.headers import Header, name_record
from gpupipe.records import Plan, Record

E = TypeVar("E", bound=BaseException)


def check_submission(records: Sequence[Record], headers: Sequence[Header], plan: Plan, batch_size: int) -> None:
    """Raise ConfigError unless there are 1 to `batch_size` records, and a header and a plan row for each."""
    count = len(records)
    if not 1 <= count <= batch_size or not count == len(headers) == len(plan):
        raise ConfigError(
            f"{count} records, {len(headers)} headers and {len(plan)} plan rows make no batch of this backend: it "
            f"takes from 1 to {batch_size} of each, as many of one as of the other",
            field="records",
            value=count,
            allowed=f"from 1 to {batch_size}",
        )


def condemned(error: DecodeError, record: Record, backend: str) -> DecodeError:
    """What goes into `Applied.errors`: the error with the record's and the backend's name, caused by the bare one."""
    named = name_record(DecodeError(error.message, **(error.facts | {"backend": backend})), record)
    named.__cause__ = without_frames(error)
    return named


def without_frames(error: E) -> E:
    """The same error, and what caused it, without tracebacks.

    For errors that outlive what they came from: a traceback's frames link to the frames that called them, and so keep
    the whole batch alive, often in a cycle that only the garbage collector finds.
    """
    link: BaseException | None = error
    while link is not None:
        link.__traceback__ = None
        link = link.__cause__ or link.__context__
    return error
