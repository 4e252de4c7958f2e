"""Sizes as people write them."""

from __future__ import annotations

import re

from gpupipe.errors import ConfigError

_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?\s*", re.IGNORECASE)


def parse_size(field: str, value: object) -> int:
    """Bytes, from a number of them or from text.

    Args:
        field: The argument's name, for messages.
        value: An integer above 0, or text: K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024; a B may follow.

    Raises:
        ConfigError: It is neither.

    >>> parse_size("cache_bytes", "1.5GB"), parse_size("cache_bytes", "2 KiB")
    (1500000000, 2048)
    """
    found = None
    if isinstance(value, str) and (match := _SIZE.fullmatch(value)):
        unit = " KMGT".index(match[2].upper() or " ")
        if not match[3] or unit:
            found = int(float(match[1]) * (1024 if match[3] else 1000) ** unit)
    elif isinstance(value, int) and not isinstance(value, bool):
        found = value
    if found is None or found < 1:
        allowed = "a number of bytes above 0, or text like '200GB' or '500MiB'"
        raise ConfigError(
            f"{field}={value!r} is not valid: it must be {allowed}", field=field, value=value, allowed=allowed
        )
    return found
