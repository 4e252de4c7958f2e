"""How a data set is packed."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gpupipe.errors import ConfigError
from gpupipe.sources.lmdb_environment import import_lmdb

Format = Literal["tar", "lmdb", "memmap"]
FORMATS: tuple[Format, ...] = ("tar", "lmdb", "memmap")
# By format: at most so many samples, and bytes of images, in a shard; or between two points from which a killed run
# goes on, where the format is one file.
_LIMITS = {"tar": (10_000, 1_000_000_000), "lmdb": (4096, 128_000_000), "memmap": (4096, 128_000_000)}


@dataclass(frozen=True, kw_only=True, slots=True)
class PackOptions:
    """What `gpupipe.pack` does besides copying.

    Attributes:
        shard_samples: Most samples in a shard. LMDB and memmap are one file: there it is how many samples are written
            before they are safe from a kill. None: 10,000, and 4096 there.
        shard_bytes: The same in bytes of images; one larger image still gets a shard of its own. None: 1,000,000,000
            and 128,000,000.
        prefix: Of the shards' names: ``<prefix>-000000.tar``.
        shuffle: The seed of the order in which samples are stored (that of `torch.randperm`); None: the source's.
        resize: Decode each image, make its shorter side this many pixels, and encode it as JPEG. Images that are no
            larger stay as they are.
        quality: Of these JPEGs.
        raw: Only for memmap: store decoded RGB pixels, which need no decoding when they are read. Any EXIF orientation
            is lost.

    Raises:
        ConfigError: A value that cannot work.
    """

    shard_samples: int | None = None
    shard_bytes: int | None = None
    prefix: str = "shard"
    shuffle: int | None = None
    resize: int | None = None
    quality: int = 90
    raw: bool = False

    def __post_init__(self) -> None:
        for name, least, most in (
            ("shard_samples", 1, None),
            ("shard_bytes", 1, None),
            ("shuffle", 0, 2**63 - 1),
            ("resize", 1, 65_535),
        ):
            value = getattr(self, name)
            if value is not None:
                _check_integer(name, value, least, most)
        _check_integer("quality", self.quality, 1, 100)
        if not isinstance(self.prefix, str) or not re.fullmatch(r"[\w-][\w.-]*", self.prefix):
            raise _wrong("prefix", self.prefix, "letters, digits, '-', '_' and '.', and not begin with a '.'")
        if not isinstance(self.raw, bool):
            raise _wrong("raw", self.raw, "True or False")

    def limits(self, format: Format) -> tuple[int, int]:
        """Most samples and bytes in one shard of this format."""
        samples, size = _LIMITS[format]
        return self.shard_samples or samples, self.shard_bytes or size

    def to_dict(self, format: Format) -> dict[str, Any]:
        """What decides on the result, as JSON has it: without options that this format does not have."""
        samples, size = self.limits(format)
        found = asdict(self) | {"shard_samples": samples, "shard_bytes": size}
        if format != "tar":
            del found["prefix"]
        if self.resize is None:
            del found["quality"]
        return found


def check_format(format: object, options: PackOptions) -> None:
    """ConfigError unless there is such a format, it has these options, and what writes it is installed."""
    if format not in FORMATS:
        raise ConfigError(
            f"format={format!r} is not valid: it must be one of {', '.join(FORMATS)}",
            field="format",
            value=format,
            allowed=FORMATS,
        )
    if options.raw and format != "memmap":
        raise ConfigError(
            f"raw pixels cannot be stored as {format}: only format='memmap' holds them",
            field="raw",
            value=True,
            allowed="with format='memmap'",
        )
    if format == "lmdb":
        import_lmdb("format='lmdb' makes an LMDB environment", "format", format)


def _check_integer(name: str, value: object, least: int, most: int | None) -> None:
    if isinstance(value, int) and not isinstance(value, bool) and value >= least and (most is None or value <= most):
        return
    raise _wrong(name, value, f"an integer of at least {least}" if most is None else f"an integer, {least} to {most}")


def _wrong(name: str, value: object, allowed: str) -> ConfigError:
    return ConfigError(
        f"options.{name}={value!r} is not valid: it must be {allowed}", field=name, value=value, allowed=allowed
    )
