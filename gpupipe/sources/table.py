"""What is known of many records without reading them, as a few arrays: no Python object for each."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from gpupipe.errors import SourceError
from gpupipe.files import replacing
from gpupipe.sources.base import fingerprint_of
from gpupipe.sources.values import NPZ_DAMAGE

VERSION = 1
_AT_ONCE = 4096  # strings that are made in one go when all are gone through
# NumPy parses the header of each array as Python, and in Python 3.11 several threads that parse at once can end in
# "SystemError: AST constructor recursion depth mismatch" (CPython issue 106905).
_PARSING = threading.Lock()
_ARRAYS = ("labels", "offsets", "sizes_bytes", "shapes_px")


class Strings(Sequence[str]):
    """Many strings as one block of bytes, each followed by a zero byte, and the positions of those.

    Held like this, a million keys cost their characters and 8 bytes each, and forked processes copy nothing.

    Args:
        block: UTF-8; bytes that are no UTF-8 are kept by surrogates, as `os.fsdecode` does.
        ends: int64 (n,): where in the block the zero byte behind each string stands.

    >>> names = Strings.of(["a/1", "a/2"])
    >>> len(names), names[1], list(names)
    (2, 'a/2', ['a/1', 'a/2'])
    """

    def __init__(self, block: bytes, ends: npt.NDArray[np.int64]) -> None:
        self.block, self.ends = block, ends

    @classmethod
    def of(cls, strings: Iterable[str]) -> Strings:
        """Pack strings."""
        texts = list(strings)
        block = "\0".join([*texts, ""]).encode("utf-8", "surrogateescape")
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == 0)
        if len(ends) != len(texts):  # there are zero characters in them
            lengths = (len(text.encode("utf-8", "surrogateescape")) + 1 for text in texts)
            ends = np.fromiter(lengths, np.int64, len(texts)).cumsum() - 1
        return cls(block, ends)

    @classmethod
    def joined(cls, parts: Sequence[Strings]) -> Strings:
        """One after another."""
        starts = np.cumsum([0, *(len(part.block) for part in parts)])
        ends = [part.ends + start for part, start in zip(parts, starts, strict=False)]
        return cls(b"".join(part.block for part in parts), np.concatenate(ends) if ends else np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.ends)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        start = int(self.ends[index - 1]) + 1 if index else 0
        return self.block[start : int(self.ends[index])].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        if self.block.count(0) != len(self):  # there are zero characters in them
            yield from (self[index] for index in range(len(self)))
            return
        start = 0
        for end in (*self.ends[_AT_ONCE - 1 :: _AT_ONCE].tolist(), len(self.block) - 1):
            if start <= end:
                yield from self.block[start:end].decode("utf-8", "surrogateescape").split("\0")
            start = end + 1


@dataclass(frozen=True, kw_only=True)
class Table:
    """The records of a data set, or of one file of it.

    Attributes:
        keys: Their names.
        labels: (n, ...) of any number type; None where they are not known.
        offsets: int64 (n,): where each record's image begins in its file; None where it is a file of its own.
        sizes_bytes: int64 (n,): of each image file; None if not known.
        shapes_px: int32 (n, 2): height, width of each image by its header, 0 where it has none that can be read; None
            if not known.
        extra: Arrays that only one format has, by name.
        meta: Whatever else belongs to them, as JSON has it.
    """

    keys: Strings
    labels: npt.NDArray[Any] | None = None
    offsets: npt.NDArray[np.int64] | None = None
    sizes_bytes: npt.NDArray[np.int64] | None = None
    shapes_px: npt.NDArray[np.int32] | None = None
    extra: Mapping[str, npt.NDArray[Any]] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def fingerprint(self) -> str:
        """That of a source with these keys and labels."""
        return fingerprint_of([self.keys.block], self.labels)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to an ``.npz`` file, which is there wholly or not at all.

        Raises:
            SourceError: It cannot be written; a full disk, most likely.
        """
        arrays = {name: array for name in _ARRAYS if (array := getattr(self, name)) is not None}
        arrays |= {f"extra.{name}": array for name, array in self.extra.items()}
        head = {
            "gpupipe_table": VERSION,
            "records": len(self),
            "arrays": sorted(arrays),
            "meta": dict(self.meta),
        }
        try:
            with replacing(path) as part, open(part, "wb") as file:
                np.savez(
                    file,
                    head=np.frombuffer(json.dumps(head).encode(), np.uint8),
                    keys=np.frombuffer(self.keys.block, np.uint8),
                    key_ends=self.keys.ends,
                    **arrays,
                )
        except OSError as error:
            raise SourceError(
                f"{os.fspath(path)!r} cannot be written: {error.strerror or error}", uri=os.fspath(path)
            ) from error

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Table:
        """Read what `save` wrote. Nothing is unpickled.

        Raises:
            SourceError: It cannot be read, is damaged, or was written by a later version.
        """
        path = os.fspath(path)
        try:
            # np.load leaves a file open that it opened itself and that turns out to be no archive.
            with _PARSING, open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
                found = {name: file[name] for name in file.files}
            head = json.loads(found.pop("head").tobytes())
            version = head["gpupipe_table"]
            if version != VERSION:
                raise SourceError(
                    f"{path!r} is of version {version}, and this gpupipe reads version {VERSION}: make it anew",
                    uri=path,
                )
            if sorted(found.keys() - {"keys", "key_ends"}) != head["arrays"]:  # a ZIP's list of names has no checksum
                raise ValueError(f"it holds {', '.join(found)}")
            table = cls(
                keys=Strings(found.pop("keys").tobytes(), found.pop("key_ends")),
                extra={name[6:]: array for name, array in found.items() if name.startswith("extra.")},
                meta=head["meta"],
                **{name: found.get(name) for name in _ARRAYS},
            )
            table._check(head["records"])
        except SourceError:
            raise
        except NPZ_DAMAGE as error:
            raise SourceError(
                f"{path!r} is no table of records, or damaged ({error}): make it anew", uri=path
            ) from error
        return table

    def _check(self, records: int) -> None:
        """ValueError unless the arrays fit each other."""
        if not isinstance(self.meta, dict):
            raise ValueError(f"meta is {type(self.meta).__name__}")
        ends = self.keys.ends
        if ends.dtype != np.int64 or ends.ndim != 1 or len(ends) != records:
            raise ValueError(f"{records} records with keys of shape {ends.shape}")
        if records and (ends[0] < 0 or ends[-1] != len(self.keys.block) - 1 or (np.diff(ends) < 1).any()):
            raise ValueError("the keys do not fit their positions")
        if np.frombuffer(self.keys.block, np.uint8)[ends].any():
            raise ValueError("the keys do not end where it says")
        for name in _ARRAYS:
            array = getattr(self, name)
            if array is not None and len(array) != records:
                raise ValueError(f"{records} records with {name} of shape {array.shape}")
        for name, shape in (("offsets", ()), ("sizes_bytes", ()), ("shapes_px", (2,))):
            array = getattr(self, name)
            if array is not None and (array.shape[1:] != shape or array.dtype.kind != "i"):
                raise ValueError(f"{name} of {array.dtype} and shape {array.shape}")
