"""What sources have in common that know their records from one table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.sources.base import check_index
from gpupipe.sources.table import Table


class TabledSource:
    """The part of a `gpupipe.sources.base.Source` that reads no record; who derives from it sets all attributes.

    Attributes:
        path: Absolute path.
    """

    path: str
    _table: Table
    _columns: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self._table)

    def key(self, index: int) -> str:
        """The key of a record, without reading it."""
        return self._table.keys[check_index(index, len(self))]

    @property
    def uri(self) -> str:
        """The absolute path of the data set."""
        return self.path

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns."""
        return tuple(self._columns)

    @property
    def labels(self) -> npt.NDArray[Any] | None:
        """The labels, (n, ...), in a new array; None where there are none."""
        return None if self._table.labels is None else self._table.labels.copy()

    @property
    def sizes_bytes(self) -> npt.NDArray[np.int64] | None:
        """Bytes of each image, int64 (n,)."""
        return self._table.sizes_bytes

    @property
    def shapes_px(self) -> npt.NDArray[np.int32] | None:
        """Height and width of each image, int32 (n, 2), as far as the packer knew them."""
        return self._table.shapes_px

    @property
    def fingerprint(self) -> str:
        """A hash of the keys and labels in their order."""
        return self._table.fingerprint
