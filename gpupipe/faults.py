"""What a run does with samples that cannot be read or decoded, and the list of those it met."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, replace
from typing import Literal, overload

from gpupipe.errors import ConfigError, RecordError
from gpupipe.headers import MAX_PIXELS

Policy = Literal["raise", "substitute", "ignore"]
POLICIES: tuple[Policy, ...] = ("raise", "substitute", "ignore")

# A share says little of few rows: three bad files among the first ten are no reason to stop.
LEAST_ROWS = 1000
# Of the bad samples that an error names.
_NAMED_AT_MOST = 5


@dataclass(frozen=True, slots=True)
class OnError:
    """What happens to samples that cannot be read or decoded: hand it to a Loader as ``on_error=``.

    A sample is bad because of its file, whatever crop, backend, batch or rank it comes to, and every batch keeps its
    shape, so no rank waits for another. Bad is what Pillow cannot decode whole: what is cut off, empty or no image;
    what is of another format than `gpupipe.pillow.FORMATS`; what has too many pixels. And what would take for ever:
    JPEGs of more than 100 scans, or of more than 100 EXIF segments.

    Args:
        policy: "raise": the run stops with an error that names the sample. "substitute": the first good one of up to 8
            other samples of the epoch takes its place, the same ones at any batch size and world size and after any
            resume; under ``Sharding(pad="mask")`` it is not valid. "ignore": an image of zeros, ``valid`` False, and
            label -100, which torch's cross-entropy passes over (its mean over a batch of nothing else is NaN);
            labels that are no integers stay, so "valid" must be among the Loader's fields then.
        max_bad: More bad samples than this stop the run with the error of the last one. A float is a share of the rows
            that this rank has met in this epoch, or of 1000 where these are fewer; an int is a number of samples.
        max_pixels: Images of more pixels (height x width) are bad. What Pillow decodes is also bound by Pillow's own
            limit, 2 x PIL.Image.MAX_IMAGE_PIXELS, which is the default here.

    >>> OnError("substitute", max_bad=10)
    OnError(policy='substitute', max_bad=10, max_pixels=178956970)
    """

    policy: Policy = "raise"
    _: KW_ONLY
    max_bad: float = 0.05
    max_pixels: int = MAX_PIXELS

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise _wrong("policy", self.policy, f"one of {', '.join(map(repr, POLICIES))}")
        share = isinstance(self.max_bad, float) and 0.0 <= self.max_bad <= 1.0
        if not share and not _is_count(self.max_bad, 0):
            raise _wrong("max_bad", self.max_bad, "a float from 0.0 to 1.0, a share; or an integer of at least 0")
        if not _is_count(self.max_pixels, 1):
            raise _wrong("max_pixels", self.max_pixels, "an integer of at least 1")

    def too_many(self, bad: int, rows: int) -> bool:
        """Whether so many bad samples among so many rows stop the run."""
        if isinstance(self.max_bad, float):
            return bad > self.max_bad * max(rows, LEAST_ROWS)
        return bad > self.max_bad


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _wrong(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"on_error.{name}={value!r} is not valid: it must be {allowed}",
        field=f"on_error.{name}",
        value=value,
        allowed=allowed,
    )


@dataclass(frozen=True, slots=True)
class BadSample:
    """One that could not be read or decoded.

    Attributes:
        index: Its position in the data set.
        key, path, offset: As in `Record`.
        reason: What is wrong with it.
        count: How often this rank met it in this epoch.
        substitute: The index of what took its place, the last time; None where nothing did.
    """

    index: int
    key: str | None
    path: str | None
    offset: int | None
    reason: str
    count: int
    substitute: int | None


class BadSamples(Sequence[BadSample]):
    """The bad samples that a rank has met in one epoch, each once, in the order in which they came.

    Attributes:
        epoch: Which one.
        rows: How many rows of it this rank has delivered since its beginning, or since a state was loaded.
        decoded_by_pillow: How many of these were images that no native decoder takes, and Pillow decoded: PNG, WebP
            and all else but JPEG, and JPEGs of unusual build.
    """

    def __init__(self, epoch: int = 0) -> None:
        self.epoch, self.rows, self.decoded_by_pillow = epoch, 0, 0
        self._found: dict[int, BadSample] = {}

    def __len__(self) -> int:
        return len(self._found)

    @overload
    def __getitem__(self, place: int) -> BadSample: ...
    @overload
    def __getitem__(self, place: slice) -> list[BadSample]: ...
    def __getitem__(self, place: int | slice) -> BadSample | list[BadSample]:
        return list(self._found.values())[place]

    def __iter__(self) -> Iterator[BadSample]:
        return iter(list(self._found.values()))

    def __repr__(self) -> str:
        return f"BadSamples(epoch {self.epoch}: {len(self)} bad samples met in {self.rows} rows)"

    def to_json(self) -> str:
        """The same as a JSON object, with a list "bad"."""
        bad = [asdict(each) for each in self]
        return json.dumps(
            {"epoch": self.epoch, "rows": self.rows, "decoded_by_pillow": self.decoded_by_pillow, "bad": bad}, indent=2
        )

    def add(self, index: int, error: RecordError) -> None:
        """Note that a sample was bad."""
        known = self._found.get(index)
        if known is None:
            known = BadSample(index, error.key, error.path, error.offset, error.message, 0, None)
        self._found[index] = replace(known, count=known.count + 1)

    def replaced(self, index: int, substitute: int) -> None:
        """Note what took the place of a bad sample."""
        self._found[index] = replace(self._found[index], substitute=substitute)

    def names(self) -> str:
        """The first few, for a message."""
        named = ", ".join(repr(each.key) for each in self[:_NAMED_AT_MOST])
        return named + (", ..." if len(self) > _NAMED_AT_MOST else "")
