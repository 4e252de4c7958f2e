"""Names of many files in one pattern: ``train-{000..146}.tar``, ``{train,val}.tar``."""

from __future__ import annotations

import re
from itertools import chain

from gpupipe.errors import ConfigError

NAMES_AT_MOST = 1_000_000

_NUMBERS = re.compile(r"(-?\d{1,18})\.\.(-?\d{1,18})(?:\.\.(-?\d{1,18}))?")
_LETTERS = re.compile(r"([a-zA-Z])\.\.([a-zA-Z])(?:\.\.(-?\d{1,18}))?")


def expand_braces(pattern: str) -> list[str]:
    """All the names that a pattern stands for, as a shell expands it.

    Lists ``{a,b}``, ranges of numbers ``{1..9}``, ``{000..146}`` (zeros in front set the width), ``{0..100..10}``,
    and of letters ``{a..e}``; all of them nested and repeated. Other braces stand for themselves.

    Args:
        pattern: The pattern; without braces it is the one name.

    Returns:
        The names in order: what is on the left varies slowest.

    Raises:
        ConfigError: More than a million names.

    Source: GNU Bash manual, "Brace Expansion", without its escapes.

    >>> expand_braces("{a,b}-{08..10}.tar")
    ['a-08.tar', 'a-09.tar', 'a-10.tar', 'b-08.tar', 'b-09.tar', 'b-10.tar']
    """
    start = pattern.find("{")
    while start >= 0:
        end = _closing(pattern, start)
        if end is not None:
            parts = _parts(pattern[start + 1 : end])
            if len(parts) > 1:
                middle = list(chain.from_iterable(map(expand_braces, parts)))
            else:
                middle = _range(parts[0], pattern)
            if middle:
                tails = expand_braces(pattern[end + 1 :])
                _check_count(len(middle) * len(tails), pattern)
                return [f"{pattern[:start]}{each}{tail}" for each in middle for tail in tails]
        start = pattern.find("{", start + 1)
    return [pattern]


def _closing(pattern: str, start: int) -> int | None:
    """Where the brace that opens at `start` closes."""
    depth = 0
    for place in range(start, len(pattern)):
        depth += {"{": 1, "}": -1}.get(pattern[place], 0)
        if depth == 0:
            return place
    return None


def _parts(body: str) -> list[str]:
    """Split at the commas that are in no inner braces."""
    parts, depth, start = [], 0, 0
    for place, character in enumerate(body):
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth == 0:
            parts.append(body[start:place])
            start = place + 1
    return [*parts, body[start:]]


def _range(body: str, pattern: str) -> list[str]:
    """What a range stands for; nothing if it is none."""
    if found := _NUMBERS.fullmatch(body):
        first, last, step = found.groups()
        padded = any(each.lstrip("-").startswith("0") and each.lstrip("-") != "0" for each in (first, last))
        width = max(len(first), len(last)) if padded else 0
        numbers = _steps(int(first), int(last), int(step or 1))
        _check_count(len(numbers), pattern)
        return [f"{number:0{width}d}" for number in numbers]
    if found := _LETTERS.fullmatch(body):
        first, last, step = found.groups()
        return [chr(number) for number in _steps(ord(first), ord(last), int(step or 1))]
    return []


def _steps(first: int, last: int, step: int) -> range:
    step = abs(step) or 1
    return range(first, last + 1, step) if first <= last else range(first, last - 1, -step)


def _check_count(count: int, pattern: str) -> None:
    if count > NAMES_AT_MOST:
        raise ConfigError(
            f"the pattern {pattern!r} stands for {count} names or more: at most {NAMES_AT_MOST} are allowed",
            field="shards",
            value=pattern,
            allowed=NAMES_AT_MOST,
        )
