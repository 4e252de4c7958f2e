"""From a finished batch of records and images to what a Loader hands out: the fields that were asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from gpupipe.collating.columns import IGNORED, collated, filled
from gpupipe.collating.kinds import OFFSETS, Collate, Kind, Ragged, check_parts, path_of
from gpupipe.collating.samples import inside
from gpupipe.collating.values import Column
from gpupipe.errors import ConfigError
from gpupipe.mixing import check_labels, soft_labels
from gpupipe.passes import Finished
from gpupipe.sources.base import Source
from gpupipe.trees import map_tensors

FIELDS = ("image", "label", "index", "key", "path", "valid", "affine")
# Tensors already, whatever the records hold.
_MADE = ("image", "valid", "affine")

Samples = list[tuple[Any, ...]]
Function = Callable[[Samples], Any]


class Fields:
    """Makes what a Loader hands out of finished batches.

    Args:
        names: What was asked for, in this order.
        source: Which columns there are.
        collate: What becomes of them; see `Loader`.
        device: Of the tensors.
        several_views: Whether "image" and "affine" are tuples, of one entry for each view.
        num_classes: Makes labels soft, as mixed batches need them; None: they stay as they are.

    Raises:
        ConfigError: A field that neither the source nor the specification has.
    """

    def __init__(
        self,
        names: Sequence[str],
        source: Source,
        collate: Collate | Function | None,
        device: torch.device,
        *,
        several_views: bool = False,
        num_classes: int | None = None,
    ) -> None:
        if collate is not None and not callable(collate):
            raise ConfigError(
                f"collate={collate!r} is not valid: it must be gpupipe.Collate(...), a function that takes a list of "
                "tuples, or None",
                field="collate",
                value=collate,
                allowed="Collate, a function or None",
            )
        spec = collate if isinstance(collate, Collate) else Collate(columns={})
        self._function = None if isinstance(collate, Collate) else collate
        self._kinds: dict[str, Kind] = dict(spec.columns)
        self._default = None if isinstance(spec.default, str) else spec.default
        if self._default is not None:
            self._kinds |= {name: self._default for name in source.columns if name not in self._kinds}
        _check_columns(self._kinds, source)
        self._owners = check_parts(self._kinds, (*FIELDS, *source.columns))
        self.names = _check_names(names, self._owners, self._kinds)
        if num_classes is not None and "label" in self._kinds:
            raise ConfigError(
                "collate has a way for 'label', which becomes soft where batches are mixed: give the plain labels "
                "another name, as in Stack(column='label'), or leave it out",
                field="collate.columns",
                value="label",
                allowed="another name",
            )
        self._source, self._device = source, device
        self._several_views, self._num_classes = several_views, num_classes

    def __call__(self, batch: Finished) -> Any:
        """A tuple with one entry for each field, or what the user's function makes of the samples.

        Raises:
            SourceError: A column that cannot be collated.
        """
        if self._function is not None:
            samples = list(zip(*(self._values(name, batch) for name in self.names), strict=True))
            return map_tensors(self._function(samples), self._moved)
        made: dict[str, Any] = {}
        for name in self.names:
            if name not in made:
                made |= self._made(self._owners[name], batch)
        return tuple(made[name] for name in self.names)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def _made(self, name: str, batch: Finished) -> dict[str, Any]:
        if name == "image":
            return {name: self._of_views(batch.views)}
        if name == "valid":
            return {name: torch.from_numpy(batch.valid).to(self._device)}
        if name == "affine":
            return {name: self._of_views([torch.from_numpy(moves).to(self._device) for moves in batch.affines])}
        if name == "label" and self._num_classes is not None:
            return {name: self._soft_labels(batch, self._num_classes)}
        if name in ("key", "path") and name not in self._kinds:
            return {name: self._values(name, batch)}
        return collated(self._column(name, batch), self._kinds.get(name), self._device)

    def _values(self, name: str, batch: Finished) -> list[Any]:
        """One value for each row, as the records have them."""
        if name == "image":
            return self._rows(batch.views)
        if name == "valid":
            return cast("list[Any]", batch.valid.tolist())
        if name == "affine":
            return self._rows([torch.from_numpy(moves) for moves in batch.affines])
        if name == "label" and self._num_classes is not None:
            return list(self._soft_labels(batch, self._num_classes).unbind())
        return list(filled(self._column(name, batch)))

    def _of_views(self, views: Sequence[torch.Tensor]) -> Any:
        return tuple(views) if self._several_views else views[0]

    def _rows(self, views: Sequence[torch.Tensor]) -> list[Any]:
        return list(zip(*views, strict=True)) if self._several_views else list(views[0].unbind())

    def _soft_labels(self, batch: Finished, num_classes: int) -> torch.Tensor:
        """float32 (n, num_classes).

        Raises:
            ConfigError: Labels that are no numbers of classes.
        """
        made = collated(self._column("label", batch), None, torch.device("cpu"))["label"]
        labels = check_labels(made, batch.usable, num_classes)
        return soft_labels(labels.to(self._device), batch.mixture, batch.usable, num_classes)

    def _column(self, name: str, batch: Finished) -> Column:
        records = batch.records
        kind = self._kinds.get(name)
        origin, path = (name, ()) if kind is None else path_of(name, kind)
        values: list[Any]
        absent: frozenset[int] = frozenset()
        if origin == "label":
            values, absent = self._labels(batch)
        elif origin in ("index", "key", "path"):
            values = [getattr(record, origin) for record in records]
        else:
            absent = batch.unread
            values = [None if row in absent else record.columns[origin] for row, record in enumerate(records)]

        def named(row: int) -> str:
            return f"row {row} (record {records[row].index}, {records[row].key!r})"

        column = Column(name=name, values=values, absent=absent, named=named)
        return inside(column, path) if path else column

    def _labels(self, batch: Finished) -> tuple[list[Any], frozenset[int]]:
        """A label for each row, and the rows that have none."""
        labels = [record.label for record in batch.records]
        known = self._source.labels if batch.unread else None
        for row in batch.unread if known is not None else ():
            labels[row] = known[batch.records[row].index]  # type: ignore[index]
        absent = batch.unread if known is None else frozenset()
        for row, label in enumerate(labels):
            if isinstance(label, np.ndarray | torch.Tensor) and label.ndim == 0 and isinstance(label.item(), int):
                label = label.item()
            if isinstance(label, int | np.integer | np.bool_):  # bool is an int
                labels[row] = IGNORED if row in batch.ignored else int(label)
        return labels, absent


def _check_columns(kinds: dict[str, Kind], source: Source) -> None:
    allowed = (*(name for name in FIELDS if name not in _MADE), *source.columns)
    for name, kind in kinds.items():
        origin, _ = path_of(name, kind)
        if origin not in allowed:
            raise ConfigError(
                f"collate: {name!r} is to be made of the column {origin!r}, which {source.uri} does not have: it has "
                f"{', '.join(allowed)}",
                field="collate.columns",
                value=origin,
                allowed=allowed,
            )


def _check_names(names: Sequence[str], owners: dict[str, str], kinds: dict[str, Kind]) -> tuple[str, ...]:
    if (
        isinstance(names, str)
        or not isinstance(names, Sequence)
        or not names
        or any(name not in owners for name in names)
    ):
        raise ConfigError(
            f"fields={names!r} is not valid: it must be a sequence of {', '.join(owners)}",
            field="fields",
            value=names,
            allowed=tuple(owners),
        )
    for name in names:
        kind = kinds.get(name)
        if isinstance(kind, Ragged) and kind.layout == "offsets" and f"{name}_{OFFSETS}" not in names:
            raise ConfigError(
                f"fields has {name!r} without '{name}_{OFFSETS}', which says where each row's values begin: add it, or "
                "use Ragged(layout='nested')",
                field="fields",
                value=tuple(names),
                allowed=f"{name}_{OFFSETS} too",
            )
    return tuple(names)
