"""The facts of the samples of a chunk, as they are gathered, and the index made of all chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.packing.items import DIGEST_BYTES, Item
from gpupipe.packing.labels import Labels
from gpupipe.packing.manifest import Skipped
from gpupipe.packing.stores import Placed
from gpupipe.sources.table import Strings, Table


@dataclass(slots=True)
class Rows:
    """One chunk."""

    names: list[str] = field(default_factory=list)
    items: list[tuple[int, int, tuple[int, int], Any, bytes]] = field(default_factory=list)
    places: list[Placed] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)
    changed: int = 0
    size_bytes: int = 0

    def __len__(self) -> int:
        return len(self.names)

    @property
    def consumed(self) -> int:
        """Records of the source, those that were skipped included."""
        return len(self.names) + len(self.skipped)

    def add(self, name: str, item: Item, place: Placed) -> None:
        self.names.append(name)
        self.items.append((item.index, item.size_bytes, item.shape_px, item.label, item.digest))
        self.places.append(place)
        self.changed += item.changed
        self.size_bytes += item.size_bytes

    def table(self, labels: Labels, columns: int, facts: dict[str, Any]) -> Table:
        """As the journal keeps it.

        Args:
            labels: Of the source.
            columns: How many have places; 0 where the format has none.
            facts: What the store needs to know the chunk again.
        """
        indices, sizes, shapes, values, digests = zip(*self.items, strict=True) if self.items else ((),) * 5
        extra: dict[str, npt.NDArray[Any]] = {
            "index": np.array(indices, np.int64),
            "digest": np.frombuffer(b"".join(digests), np.uint8).reshape(-1, DIGEST_BYTES),
            "columns": np.array([place.columns for place in self.places], np.int64).reshape(len(self), columns, 2),
        }
        return Table(
            keys=Strings.of(self.names),
            labels=labels.array(list(values)),
            offsets=np.array([place.offset for place in self.places], np.int64),
            sizes_bytes=np.array(sizes, np.int64),
            shapes_px=np.array(shapes, np.int32).reshape(-1, 2),
            extra=extra,
            meta={
                "consumed": self.consumed,
                "changed": self.changed,
                "skipped": [asdict(each) for each in self.skipped],
                "facts": facts,
            },
        )


def joined(tables: Sequence[Table]) -> Table:
    """One table of those of all chunks, without their meta.

    Args:
        tables: At least one.
    """
    labels = None if tables[0].labels is None else np.concatenate([table.labels for table in tables])
    return Table(
        keys=Strings.joined([table.keys for table in tables]),
        labels=labels,
        offsets=np.concatenate([table.offsets for table in tables]),
        sizes_bytes=np.concatenate([table.sizes_bytes for table in tables]),
        shapes_px=np.concatenate([table.shapes_px for table in tables]),
        extra={name: np.concatenate([table.extra[name] for table in tables]) for name in tables[0].extra},
    )
