"""Batches of any loader: how many samples they hold, and one epoch after another."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any

from gpupipe.errors import ConfigError


def samples_of(batch: Any) -> tuple[int | None, int]:
    """Rows of the first tensor in the batch, and the bytes of all of them."""
    from gpupipe.trees import map_tensors

    rows: list[int] = []
    sizes: list[int] = []

    def count(tensor: Any) -> Any:
        sizes.append(tensor.nbytes)
        if tensor.ndim:
            rows.append(len(tensor))
        return tensor

    map_tensors(batch, count)
    return rows[0] if rows else None, sum(sizes)


def rows_of(batch: Any) -> int:
    """Samples in a batch; of one without tensors, the length of its first part."""
    rows, _ = samples_of(batch)
    if rows is not None:
        return rows
    images = batch[0] if isinstance(batch, list | tuple) else batch
    return len(next(iter(images.values())) if isinstance(images, dict) else images)


def endless(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """Epoch after epoch.

    Raises:
        ConfigError: An epoch without batches.
    """
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise ConfigError("the loader gives no batches: there is nothing to measure", field="target")
