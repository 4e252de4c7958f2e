"""The one place where DALI's exceptions become gpupipe's."""

from __future__ import annotations

from typing import Literal

from gpupipe.errors import BackendError, BackendUnavailable, GpupipeError

NAME = "dali"
INSTALL = "pip install nvidia-dali-cuda120 (Linux only)"

Stage = Literal["build", "feed", "run", "hand-over"]


class boundary:  # reads as a statement: with boundary("run")
    """Turn whatever DALI raises inside into a BackendError that says at which stage.

    DALI raises RuntimeError for nearly everything, but its bindings also let through ValueError, TypeError,
    IndexError, MemoryError, StopIteration and classes of its own, and which of them for what is not documented.

    Args:
        stage: What DALI was asked to do.
    """

    # No contextlib.contextmanager: that lets StopIteration out, as BackendError is a RuntimeError (PEP 479).

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not isinstance(error, GpupipeError):
            raise BackendError(
                f"DALI failed at stage {self._stage!r}: {type(error).__name__}: {error}",
                backend=NAME,
                stage=self._stage,
            ) from error


def unavailable(problem: str, *, missing: str, install: str, cause: BaseException | None = None) -> BackendUnavailable:
    """The error for a machine that DALI, or the device that was asked for, is not on."""
    error = BackendUnavailable(
        f'backend="dali" cannot run here: {problem}. {install}; or use backend="torchvision"',
        backend=NAME,
        stage="build",
        missing=missing,
        install=install,
    )
    error.__cause__ = cause
    return error
