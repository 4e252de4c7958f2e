"""How often and how long a request is tried."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TypeVar

from gpupipe.errors import ConfigError, GpupipeError

T = TypeVar("T")

_PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, TypeError, ValueError)
# HTTP: Request Timeout, Too Early, Too Many Requests.
_SAID_AT_MOST = 200
_TEMPORARY_STATUS = frozenset((408, 425, 429))


@dataclass(frozen=True, kw_only=True, slots=True)
class Retries:
    """How often and how long a request to a remote store is tried, and how long one is waited for.

    Before try n a pause is made, of a random length up to ``first_s * 2**(n - 1)``, so that the many readers of a
    store that was away do not all come back at once. A store that says when to come back (Retry-After) is believed.

    Args:
        tries: At most.
        first_s: The longest pause before the second try.
        longest_s: The longest pause of all.
        attempt_s: How long one try may take.
        limit_s: How long all tries together may take; none begins later.

    Raises:
        ConfigError: No positive numbers.

    Source: https://aws.amazon.com/blogs/architecture/exponential-backoff-and-jitter/, "full jitter".
    """

    tries: int = 8
    first_s: float = 0.1
    longest_s: float = 10.0
    attempt_s: float = 30.0
    limit_s: float = 300.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds = int if field.name == "tries" else (int, float)
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value < float("inf"):
                allowed = "an integer of at least 1" if field.name == "tries" else "a number of seconds above 0"
                raise ConfigError(
                    f"{field.name}={value!r} of gpupipe.Retries is not valid: it must be {allowed}",
                    field=field.name,
                    value=value,
                    allowed=allowed,
                )

    def call(self, attempt: Callable[[float], T], again: Callable[[], object] = lambda: None) -> T:
        """The result of the first try that succeeds.

        Args:
            attempt: One try; gets the seconds that it may take.
            again: Called before each further one.

        Raises:
            GaveUp: What went wrong last cannot change by itself, or the tries or the time are used up.
        """
        began = time.monotonic()
        for number in range(1, self.tries + 1):
            left = self.limit_s - (time.monotonic() - began)
            try:
                return attempt(max(0.001, min(self.attempt_s, left)))
            except GpupipeError:
                raise
            except Exception as error:
                took = time.monotonic() - began
                if is_permanent(error) or number == self.tries:
                    raise GaveUp(error, number, took) from error
                pause = min(self.longest_s, self.first_s * 2.0 ** (number - 1)) * _uniform()
                pause = max(pause, min(self.longest_s, _retry_after_s(error)))
                if took + pause >= self.limit_s:
                    raise GaveUp(error, number, took) from error
            time.sleep(pause)
            again()
        raise AssertionError("unreachable: the last try returns or raises")


class GaveUp(Exception):
    """A request that was tried in vain.

    Attributes:
        cause: What went wrong last.
        tries, seconds: How often and how long it was tried.
    """

    def __init__(self, cause: Exception, tries: int, seconds: float) -> None:
        super().__init__(cause, tries, seconds)
        self.cause, self.tries, self.seconds = cause, tries, seconds

    def __str__(self) -> str:
        often = "1 try" if self.tries == 1 else f"{self.tries} tries"
        return f"{often} in {self.seconds:.1f} s, the last: {type(self.cause).__name__}: {_said(self.cause)}"

    @property
    def missing(self) -> bool:
        """Whether the store says that there is no such object."""
        cause = _behind(self.cause)
        return isinstance(cause, FileNotFoundError) or _status(cause) in (404, 410)


def is_permanent(error: BaseException) -> bool:
    """Whether trying again cannot help."""
    status = _status(error)
    if status is not None:
        return 400 <= status < 500 and status not in _TEMPORARY_STATUS
    behind = _behind(error)
    if behind is not error:
        return is_permanent(behind)
    # botocore's, which have no base class of their own.
    return isinstance(error, _PERMANENT) or "Credentials" in type(error).__name__


def _behind(error: BaseException) -> BaseException:
    """What a "not found" was made of: fsspec's HTTP file system calls so whatever happens to a HEAD request."""
    cause = error.__cause__
    if isinstance(error, FileNotFoundError) and cause is not None:
        # S3's, though, is one.
        return error if type(cause).__module__.startswith("botocore") else cause
    return error


def _status(error: BaseException) -> int | None:
    """The HTTP status of aiohttp's errors and gcsfs's; None for an answer that is no HTTP, which aiohttp calls 400."""
    if type(error).__name__ == "ClientResponseError" and error.__cause__ is not None:
        return None
    for name in ("status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int) and 100 <= value < 600:
            return value
    return None


def _retry_after_s(error: BaseException) -> float:
    """What the header Retry-After says in seconds; 0 where there is none, or a date."""
    headers = getattr(error, "headers", None)
    try:
        return max(0.0, float(headers["Retry-After"])) if headers else 0.0
    except (KeyError, TypeError, ValueError):
        return 0.0


def _said(error: BaseException) -> str:
    """The message of an error, without the URL's query: it may hold a signature."""
    status = _status(error)
    message = getattr(error, "message", None)
    if isinstance(message, str):  # aiohttp's text has the whole URL
        text = message if status is None else f"HTTP status {status} {message}"
    else:
        text = str(error) or "no message"
    text = " ".join(text.split())
    return text if len(text) <= _SAID_AT_MOST else f"{text[:_SAID_AT_MOST]}..."


def _uniform() -> float:
    """From 0 to 1, different in each process: this decides no sample and no pixel."""
    return int.from_bytes(os.urandom(4), "little") / 2**32
