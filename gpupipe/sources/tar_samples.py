"""From the files in a tar shard to its samples: what belongs together, which is the image, which the label."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError, DecodeError, SourceError
from gpupipe.headers import scan
from gpupipe.sources.folder import IMG_EXTENSIONS
from gpupipe.sources.labels import parse_label, stacked
from gpupipe.sources.table import Strings, Table
from gpupipe.sources.tar_members import Listing, Member

IMAGES = tuple(ending.removeprefix(".") for ending in IMG_EXTENSIONS)
NAMED_AT_MOST = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Which files of a sample are its image and its label.

    Attributes:
        image: Extensions (what follows the first dot of a file's name, in lower case) that are images.
        label: The extension of the file that holds the label, as text: a number, or a JSON list of numbers. With a
            path behind a colon the file is JSON, and the path leads to the label in it: "json:class_id",
            "json:annotation.category". None for samples without labels.
    """

    image: tuple[str, ...] = IMAGES
    label: str | None = "cls"

    def __post_init__(self) -> None:
        if not self.image or any(not isinstance(each, str) or _is_odd(each) for each in self.image):
            raise ConfigError(
                f"image={self.image!r} is not valid: extensions in lower case without a dot in front, such as 'jpg'",
                field="image",
                value=self.image,
                allowed="extensions",
            )
        if self.label is not None and (not isinstance(self.label, str) or _is_odd(self.label.partition(":")[0])):
            raise ConfigError(
                f"label={self.label!r} is not valid: it must be an extension in lower case such as 'cls', one with a "
                "path such as 'json:class_id', or None",
                field="label",
                value=self.label,
                allowed="an extension, with or without a path, or None",
            )

    @property
    def label_extension(self) -> str | None:
        """The extension of the file that holds the label."""
        return None if self.label is None else self.label.partition(":")[0]

    @property
    def label_path(self) -> tuple[str, ...]:
        """The names that lead to the label in a JSON file; empty where the file is nothing but the label."""
        path = "" if self.label is None else self.label.partition(":")[2]
        return tuple(path.split(".")) if path else ()


def _is_odd(extension: str) -> bool:
    return not extension or extension.startswith(".") or extension != extension.lower()


@dataclass(slots=True)
class _Sample:
    image: Member | None = None
    others: dict[str, Member] = field(default_factory=dict)


def split_name(name: str) -> tuple[str, str] | None:
    """The key and the extension of a file's name; None where it has none.

    Names are only ever names: an absolute one, or one with "..", leads nowhere.

    Args:
        name: In the archive.

    Returns:
        Folder and name up to the first dot of the name; what follows that dot, in lower case. Dots in folders do not
        count. None if there is no dot, nothing before it or nothing behind it.

    Source: `webdataset.tariterators.base_plus_ext`, which takes ".hidden.jpg" in a folder for a file of the folder's.

    >>> split_name("n0144.v2/img_1.seg.PNG")
    ('n0144.v2/img_1', 'seg.png')
    """
    start = name.rfind("/") + 1
    dot = name.find(".", start)
    if dot <= start or dot == len(name) - 1:
        return None
    return name[:dot], name[dot + 1 :].lower()


def samples_of(listing: Listing, data: memoryview, layout: Layout, uri: str) -> Table:
    """The samples of one shard, in the order in which the first file of each comes.

    Files belong together by key, wherever in the shard they are. In a shard that is cut off, the last sample may be
    incomplete, and is left out.

    Args:
        listing: The files of the shard.
        data: The bytes of the shard.
        layout: Which of the files is what.
        uri: The shard's path, for messages.

    Returns:
        A table with offsets, sizes and shapes of the images, their labels, and in `extra`: key_hashes uint64 (n,),
        and all other files in one row, those of sample i up to member_ends[i] (int64 (n,)): member_offsets and
        member_sizes int64 (m,), member_extensions int32 (m,), numbers into meta["extensions"]. A label's own file
        without anything else in it is not among them. meta["warnings"] counts what is odd:
        name -> [count, the first].

    Raises:
        SourceError: Two files of the same key and extension, two images for one sample, a sample without a label, or
            with one that is not a number (or numbers).
    """
    warnings: dict[str, list[Any]] = {}
    samples, stray, split = _group(listing.members, layout, uri)
    if listing.cut is not None and samples:
        last = _last_key(listing)
        dropped = samples.pop(last, None) if last is not None else None
        if dropped is not None and dropped.image is not None:
            _warn(warnings, "samples left out where a shard is cut off", [str(last)])
    _warn(warnings, "files without an extension, or hidden ones", stray)
    _warn(warnings, "links, devices and other special members", listing.special)
    _warn(warnings, "samples whose files are not side by side", split)
    without = [f"{key}.{next(iter(sample.others))}" for key, sample in samples.items() if sample.image is None]
    _warn(warnings, "samples without an image", without)
    if listing.cut is not None:
        _warn(warnings, "shards cut off", [f"{listing.cut}, at byte {listing.cut_at}"])
    if listing.junk_at is not None:
        _warn(warnings, "shards with other bytes behind their end", [f"at byte {listing.junk_at}"])
    images = {key: (sample.image, sample.others) for key, sample in samples.items() if sample.image is not None}

    labels = _labels([(key, others) for key, (_, others) in images.items()], data, layout, uri)
    if layout.label_extension is not None and not layout.label_path:
        for _, others in images.values():
            others.pop(layout.label_extension, None)
    extensions: dict[str, int] = {}
    members = [
        (extensions.setdefault(name, len(extensions)), *at[1:]) for _, o in images.values() for name, at in o.items()
    ]
    numbers = np.asarray(members, np.int64).reshape(-1, 3)
    return Table(
        keys=Strings.of(images),
        labels=labels,
        offsets=np.asarray([image.offset for image, _ in images.values()], np.int64),
        sizes_bytes=np.asarray([image.size for image, _ in images.values()], np.int64),
        shapes_px=_shapes([image for image, _ in images.values()], data),
        extra={
            "key_hashes": _hashes(images),
            "member_ends": np.cumsum([len(others) for _, others in images.values()], dtype=np.int64),
            "member_extensions": numbers[:, 0].astype(np.int32),
            "member_offsets": numbers[:, 1].copy(),
            "member_sizes": numbers[:, 2].copy(),
        },
        meta={"extensions": list(extensions), "warnings": warnings},
    )


def _group(members: list[Member], layout: Layout, uri: str) -> tuple[dict[str, _Sample], list[str], dict[str, None]]:
    """Samples by key, names that belong to none, and the keys of samples whose files lie apart."""
    samples: dict[str, _Sample] = {}
    stray: list[str] = []
    split: dict[str, None] = {}
    images = frozenset(layout.image)
    current: str | None = None
    sample = _Sample()
    for member in members:
        names = split_name(member.name)
        if names is None:
            stray.append(member.name)
            continue
        key, extension = names
        if key != current:
            known = samples.get(key)
            if known is not None:
                split[key] = None
            sample = samples[key] = known or _Sample()
            current = key
        if extension not in images:
            earlier = sample.others.setdefault(extension, member)
        elif sample.image is None:
            earlier = sample.image = member
        else:
            earlier = sample.image
        if earlier is not member:
            raise _twice(key, earlier, member, uri)
    return samples, stray, split


def _last_key(listing: Listing) -> str | None:
    for member in reversed(listing.members):
        names = split_name(member.name)
        if names is not None:
            return names[0]
    return None


def _twice(key: str, first: Member, second: Member, uri: str) -> SourceError:
    if first.name.lower() == second.name.lower():
        return SourceError(
            f"{uri!r} has {second.name!r} twice, at bytes {first.offset} and {second.offset}: a later one takes the "
            "place of an earlier when the archive is unpacked. Pack it anew with one of them",
            uri=uri,
        )
    return SourceError(
        f"{uri!r} has two images for the sample {key!r}: {first.name!r} at byte {first.offset} and {second.name!r} at "
        f"byte {second.offset}. Say which it is by its extension: image='{first.name.rpartition('.')[2].lower()}'",
        uri=uri,
    )


def _warn(warnings: dict[str, list[Any]], what: str, names: Iterable[str]) -> None:
    names = list(names)
    if names:
        warnings[what] = [len(names), names[0]]


def _hashes(keys: Iterable[str]) -> npt.NDArray[np.uint64]:
    """64 bits of each key, to find the ones that several shards have without holding them all as strings."""
    digests = (hashlib.blake2b(key.encode("utf-8", "surrogateescape"), digest_size=8).digest() for key in keys)
    return np.frombuffer(b"".join(digests), "<u8").astype(np.uint64)


def _shapes(images: list[Member], data: memoryview) -> npt.NDArray[np.int32]:
    shapes = np.zeros((len(images), 2), np.int32)
    for row, image in enumerate(images):
        try:
            header = scan(data[image.offset : image.offset + image.size])
        except DecodeError:
            continue  # whoever reads it will be told
        shapes[row] = header.height, header.width
    return shapes


# --- labels ---


def _labels(
    samples: list[tuple[str, dict[str, Member]]], data: memoryview, layout: Layout, uri: str
) -> npt.NDArray[Any] | None:
    extension = layout.label_extension
    if extension is None:
        return None
    without = [key for key, others in samples if extension not in others]
    if without:
        raise SourceError(
            f"{uri!r} has {len(without)} of {len(samples)} samples without a label, that is without a file "
            f".{extension}: {shorten(without)}. Say where the labels are, such as label='json:class_id', or open it "
            "with label=None, which is without labels",
            uri=uri,
        )
    values = []
    for key, others in samples:
        member = others[extension]
        text = bytes(data[member.offset : member.offset + member.size])
        try:
            values.append(parse_label(text, layout.label_path))
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise SourceError(
                f"{uri!r} has no label that is a number, or a list of numbers, for the sample {key!r}: {member.name!r} "
                f"at byte {member.offset} is {text[:60]!r}, and label={layout.label!r}"
                + (f" ({error})" if layout.label_path else ""),
                uri=uri,
            ) from error
    return labels_array(values, uri)


def labels_array(values: list[Any], uri: str) -> npt.NDArray[Any]:
    """Labels as one array, as `stacked` makes it.

    Args:
        values: One for each record: a number, or a list of numbers.
        uri: Where they come from, for messages.

    Raises:
        SourceError: They are not of one length, not finite, or too large.
    """
    try:
        return stacked(values) if values else np.zeros(0, np.int64)
    except (ValueError, OverflowError) as error:
        raise SourceError(
            f"{uri!r} has labels that make no array ({error}): they must all be numbers, or all lists of the same "
            "length, and fit into 64 bits",
            uri=uri,
        ) from error


def shorten(names: list[str]) -> str:
    """The first of these names, for messages.

    >>> shorten(["a", "b", "c", "d"])
    "'a', 'b', 'c', ..."
    """
    return ", ".join(map(repr, names[:NAMED_AT_MOST])) + (", ..." if len(names) > NAMED_AT_MOST else "")
