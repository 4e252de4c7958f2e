"""What every backend does with a submitted batch besides its pixels: check it, and say which of its records are bad."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import numpy as np

from gpupipe import decode
from gpupipe.backends.base import Plans
from gpupipe.errors import ConfigError, DecodeError
from gpupipe.headers import Header, name_record, scan
from gpupipe.recipe import Exif
from gpupipe.records import Plan, Record

E = TypeVar("E", bound=BaseException)


def check_submission(
    records: Sequence[Record], headers: Sequence[Header], plan: Plans, batch_size: int, views: int = 1
) -> tuple[Plan, ...]:
    """The plan of each view; ConfigError unless there are 1 to `batch_size` records, with a header and plan rows each.

    Args:
        records, headers, plan: See `Backend.submit`.
        batch_size: The most that the backend takes.
        views: How many it makes.
    """
    plans = plan if isinstance(plan, tuple) else (plan,)
    if len(plans) != views:
        raise ConfigError(
            f"{len(plans)} plans were given where this backend makes {views} views: it takes one for each",
            field="plan",
            value=len(plans),
            allowed=views,
        )
    count = len(records)
    for each in plans:
        if not 1 <= count <= batch_size or not count == len(headers) == len(each):
            raise ConfigError(
                f"{count} records, {len(headers)} headers and {len(each)} plan rows make no batch of this backend: it "
                f"takes from 1 to {batch_size} of each, as many of one as of the other",
                field="records",
                value=count,
                allowed=f"from 1 to {batch_size}",
            )
    return plans


def decoded(record: Record, header: Header, exif: Exif) -> tuple[Record, Header]:
    """A record with its pixels in the place of its file, upright if the recipe wants it so, and their header.

    Raises:
        DecodeError: The image cannot be decoded.
    """
    pixels = decode.rgb(record.data, header)
    if exif == "apply":
        pixels = np.ascontiguousarray(decode.upright(pixels, header.orientation))
    return replace(record, data=pixels), scan(pixels)


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
