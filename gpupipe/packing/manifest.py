"""What a pack says of itself, in ``manifest.json``: written last, so that a folder which has one is whole."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpupipe.errors import ConfigError, SourceError
from gpupipe.files import replacing

VERSION = 1
NAME = "manifest.json"
CHECKS_NAME = "checks.npz"
_SHOWN_AT_MOST = 5


@dataclass(frozen=True, slots=True)
class Skipped:
    """A record that could not be read, and is not in the pack.

    Attributes:
        index, key, path: In the source.
        reason: What was wrong.
    """

    index: int
    key: str | None
    path: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Renamed:
    """A record that is stored under another name than its key would give it.

    Attributes:
        index, key: In the source.
        name: In the pack.
    """

    index: int
    key: str
    name: str


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A file of the pack.

    Attributes:
        name: In the folder of the pack.
        records: How many samples it holds.
        bytes: Its size.
        sha256: Of all its bytes, in hex.
    """

    name: str
    records: int
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What is in a pack.

    Attributes:
        format: "tar", "lmdb" or "memmap".
        options: Those of `PackOptions` that the format has.
        source: Of what was packed: "fingerprint" and number of "records".
        records: How many samples the pack holds.
        labels: Their "kind" (integer, float, boolean, none), "dtype" and "shape".
        classes: Names of the classes, where the source has them.
        columns: The kind of each further value of the records, by name; see `gpupipe.sources.values.kind_of`.
        fingerprint: Of the pack as a source.
        changed: How many images are not the bytes of the source: made smaller, decoded to pixels, or, from pixels,
            encoded.
        skipped, renamed: See there.
        files: In order.
    """

    format: str
    options: Mapping[str, Any]
    source: Mapping[str, Any]
    records: int
    labels: Mapping[str, Any]
    classes: tuple[str, ...] | None
    columns: Mapping[str, str]
    fingerprint: str
    changed: int
    skipped: tuple[Skipped, ...]
    renamed: tuple[Renamed, ...]
    files: tuple[PackedFile, ...]

    @property
    def identity(self) -> dict[str, Any]:
        """What a second run must have the same to be the same pack."""
        return identity(self.format, self.options, self.source)

    def to_json(self) -> str:
        return json.dumps({"gpupipe_pack": VERSION, **asdict(self)}, indent=2, ensure_ascii=True)

    def table(self) -> str:
        """A summary to read."""
        total = sum(file.bytes for file in self.files)
        lines = [
            f"{self.records} records of {self.source['records']} as {self.format}, {total / 1e6:.1f} MB in "
            f"{len(self.files)} file{'s' * (len(self.files) != 1)}",
            f"labels: {self.labels['kind']}"
            + (f" of shape {tuple(self.labels['shape'])}" if self.labels["shape"] else "")
            + (f", {len(self.classes)} classes" if self.classes is not None else ""),
        ]
        if self.columns:
            lines.append(f"columns: {', '.join(self.columns)}")
        if self.changed:
            lines.append(f"{self.changed} images are not the bytes of the source: {self._how_changed()}")
        else:
            lines.append("images: the bytes of the source, untouched")
        for what, found in (("skipped", self.skipped), ("renamed", self.renamed)):
            if found:
                named = ", ".join(repr(each.key) for each in found[:_SHOWN_AT_MOST])
                more = ", ..." if len(found) > _SHOWN_AT_MOST else ""
                lines.append(f"{what}: {len(found)} ({named}{more}); {NAME} lists them")
        return "\n".join(lines)

    def _how_changed(self) -> str:
        if self.options["raw"]:
            how = "decoded to RGB pixels"
            return how + (f", shorter side at most {self.options['resize']}" if self.options["resize"] else "")
        if self.options["resize"]:
            return f"shorter side {self.options['resize']}, JPEG of quality {self.options['quality']}"
        return "pixels, stored as PNG"

    def save(self, folder: str) -> None:
        with replacing(os.path.join(folder, NAME)) as part, open(part, "w", encoding="ascii") as file:
            file.write(self.to_json() + "\n")

    @classmethod
    def load(cls, folder: str) -> Manifest:
        """Read the one in a folder.

        Raises:
            SourceError: There is none, it is damaged, or it was written by a later version.
        """
        path = os.path.join(folder, NAME)
        try:
            with open(path, encoding="utf-8") as file:
                found = json.load(file)
            version = found.pop("gpupipe_pack")
            if version != VERSION:
                raise SourceError(
                    f"{path!r} is of version {version!r}, and this gpupipe reads version {VERSION}: pack it anew",
                    uri=path,
                )
            classes = found.pop("classes")
            return cls(
                classes=None if classes is None else tuple(classes),
                columns=dict(found.pop("columns")),
                skipped=tuple(Skipped(**each) for each in found.pop("skipped")),
                renamed=tuple(Renamed(**each) for each in found.pop("renamed")),
                files=tuple(PackedFile(**each) for each in found.pop("files")),
                **found,
            )
        except SourceError:
            raise
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise SourceError(
                f"{path!r} is no manifest of a pack, or damaged ({type(error).__name__}: {error}): restore it, or "
                "pack the data set anew",
                uri=path,
            ) from error


def identity(format: str, options: Mapping[str, Any], source: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must have the same to make the same pack."""
    return {"version": VERSION, "format": format, "options": dict(options), "source": dict(source)}


def check_same(folder: str, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """ConfigError that says what differs between a pack that is there and the one that is asked for."""
    differences = [
        f"{name}: {_shown(before)} there, {_shown(now)} asked for"
        for name, before, now in _pairs(found, wanted)
        if before != now
    ]
    if differences:
        raise ConfigError(
            f"{folder!r} holds a pack that was made, or begun, with other arguments ({'; '.join(differences)}). Give "
            "the same ones to go on with it, another folder, or remove this one",
            field="dst",
            value=folder,
            allowed="the arguments of the pack that is there",
        )


def _pairs(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    pairs = [("version", found.get("version"), wanted["version"]), ("format", found.get("format"), wanted["format"])]
    for part, prefix in (("options", ""), ("source", "source's ")):
        before, now = found.get(part) or {}, wanted[part]
        pairs += [(prefix + name, before.get(name), now.get(name)) for name in dict.fromkeys((*before, *now))]
    return pairs


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
