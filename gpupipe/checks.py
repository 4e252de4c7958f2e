"""Checks of arguments that many functions have in common."""

from __future__ import annotations

from numbers import Integral

from gpupipe.errors import ConfigError


def check_integer(field: str, value: object, least: int, most: int | None = None) -> int:
    """An argument as an int, NumPy's integers included.

    Args:
        field: Its name.
        value: What was given.
        least, most: What is allowed.

    Raises:
        ConfigError: It is no integer, a bool, or beyond these.

    >>> check_integer("threads", 2, 1)
    2
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        number = int(value)
        if number >= least and (most is None or number <= most):
            return number
    allowed = f"an integer of at least {least}" if most is None else f"an integer from {least} to {most}"
    raise ConfigError(
        f"{field}={value!r} is not valid: it must be {allowed}", field=field, value=value, allowed=allowed
    )
