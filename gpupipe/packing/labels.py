"""The labels of a pack: numbers of one kind and shape, or none at all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError, SourceError
from gpupipe.records import Record
from gpupipe.sources.base import Source

_KINDS = {"b": "boolean", "i": "integer", "u": "integer", "f": "float"}


@dataclass(frozen=True, slots=True)
class Labels:
    """What the labels of a source are.

    Attributes:
        known: All of them, (n, ...), where the source knows them without reading.
        dtype: None where records have no label.
        shape: Of each.
    """

    known: npt.NDArray[Any] | None
    dtype: np.dtype[Any] | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, source: Source, first: Record) -> Labels:
        """Those of a source, of which `first` is a record.

        Raises:
            ConfigError: They are no numbers.
        """
        known = source.labels
        if known is not None and len(known) != len(source):
            raise SourceError(f"{source.uri} has {len(known)} labels for {len(source)} records", uri=source.uri)
        if known is None and first.label is None:
            return cls(None, None, ())
        example = np.asarray(first.label) if known is None else known
        if example.dtype.kind not in _KINDS:
            raise ConfigError(
                f"labels of {source.uri} like {first.label!r} (record {first.index}) cannot be packed: they must be "
                "integers, floats, or arrays of these, all of one shape, or None",
                field="source",
                value=first.label,
                allowed="numbers, arrays of numbers, None",
            )
        shape = example.shape if known is None else known.shape[1:]
        return cls(known, example.dtype, tuple(shape))

    def value(self, record: Record) -> Any:
        """The label of a record as JSON has it.

        Raises:
            ConfigError: It is not like the others.
        """
        if self.known is not None:
            return self.known[record.index].tolist()
        if self.dtype is None and record.label is None:
            return None
        found = np.asarray(record.label)
        if self.dtype is None or found.shape != self.shape or found.dtype.kind not in _KINDS:
            fits = False
        else:
            fits = found.dtype.kind == self.dtype.kind and np.can_cast(found.dtype, self.dtype)
        if not fits:
            like = "None" if self.dtype is None else f"{self.kind} and of shape {self.shape}"
            raise ConfigError(
                f"record {record.index} ({record.key!r}) has the label {record.label!r}, where the first one is {like}"
                ": a pack holds labels of one kind and shape",
                field="source",
                value=record.label,
                allowed=like,
            )
        return found.astype(self.dtype).tolist()

    def array(self, values: list[Any]) -> npt.NDArray[Any] | None:
        """(n, ...) of these labels; None where records have none."""
        if self.dtype is None:
            return None
        return np.asarray(values, self.dtype).reshape(len(values), *self.shape)

    @property
    def kind(self) -> str:
        """One of integer, float, boolean, none."""
        return "none" if self.dtype is None else _KINDS[self.dtype.kind]

    def to_dict(self) -> dict[str, Any]:
        """As the manifest has it."""
        return {"kind": self.kind, "dtype": None if self.dtype is None else self.dtype.str, "shape": list(self.shape)}
