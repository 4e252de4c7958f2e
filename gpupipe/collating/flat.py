"""Sequences of different lengths as one flat tensor and offsets, and from there to padding, on any device.

Nothing here waits for a device: all that decides shapes is known on the host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from gpupipe.collating.values import Column, Row, converted, in_one_dtype, row_of

# The shape of an empty list, which says nothing of its items.
_EMPTY = torch.Size((0,))
# Of each tensor in the memory that several share on their way to the device.
ALIGNMENT_BYTES = 16


@dataclass(frozen=True, slots=True)
class Flat:
    """Sequences one after another.

    Attributes:
        values: (total, ...).
        lengths: int64 (n,), on the host.
    """

    values: torch.Tensor
    lengths: npt.NDArray[np.int64]

    @property
    def offsets(self) -> torch.Tensor:
        """Where each sequence begins, and the end of the last: int64 (n + 1,), on the host."""
        return torch.from_numpy(np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64))))


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """What sequences have to be.

    Attributes:
        item: Shape of an item; None: that of the batch's.
        dtype: That is wanted; None: that of the batch's.
        missing_empty: Whether None is an empty sequence.
        most, keep: The longest that is not too long, and what is kept of longer ones: "first", "last" or None, an
            error.
    """

    item: tuple[int, ...] | None
    dtype: torch.dtype | None
    missing_empty: bool
    most: int | None = None
    keep: str | None = None


def flatten(column: Column, wanted: Sequences) -> Flat:
    """The sequences of a column, flat.

    Raises:
        SourceError: A row that is no sequence, too long, or of another item shape or dtype than the others.
    """
    rows = _rows(column, wanted)
    item = _item(column, rows, wanted.item)
    if wanted.most is not None:
        rows = [Row(_shortened(column, number, row.tensor, wanted), row.weak) for number, row in enumerate(rows)]
    lengths = np.array([len(row.tensor) for row in rows], np.int64)
    one_dtype = in_one_dtype(column, rows, wanted.dtype)
    parts = [tensor for tensor in one_dtype if len(tensor)]
    values = torch.cat(parts) if parts else torch.empty((0, *item), dtype=one_dtype[0].dtype)
    if wanted.dtype is not None:
        ends = np.cumsum(lengths)
        values = converted(column, values, wanted.dtype, lambda at: int(np.searchsorted(ends, at, side="right")))
    return Flat(values, lengths)


def _rows(column: Column, wanted: Sequences) -> list[Row]:
    rows = []
    for number, value in enumerate(column.values):
        if number in column.absent or (value is None and wanted.missing_empty):
            rows.append(Row(torch.empty(0), weak=True))
            continue
        row = row_of(column, number)
        if row.tensor.ndim == 0:
            raise column.error(
                f"{{}} is the number {row.tensor.item()!r}, not a sequence", [number], "Use gpupipe.Stack() for it"
            )
        rows.append(row)
    return rows


def _item(column: Column, rows: Sequence[Row], wanted: tuple[int, ...] | None) -> tuple[int, ...]:
    """The shape that all items have."""
    shapes: dict[tuple[int, ...], int] = {}
    for number, row in enumerate(rows):
        if row.tensor.shape != _EMPTY:
            shapes.setdefault(row.tensor.shape[1:], number)
    if wanted is not None:
        wrong = [number for shape, number in shapes.items() if shape != wanted]
        if wrong:
            found = tuple(rows[wrong[0]].tensor.shape)
            raise column.error(
                f"{{}} has the shape {found}", wrong[:1], f"item={wanted} asks for ({'length, '}{_sides(wanted)})"
            )
        return wanted
    if len(shapes) > 1:
        numbers = sorted(shapes.values())
        named = ", ".join(f"{column.named(at)} has {tuple(rows[at].tensor.shape)}" for at in numbers[:4])
        raise column.error(
            f"its shapes differ in more than the first dimension: {named}",
            numbers,
            "Bring them to one shape, or use gpupipe.Keep(), which leaves a list",
        )
    return next(iter(shapes), ())


def _sides(shape: tuple[int, ...]) -> str:
    return ", ".join(map(str, shape))


def _shortened(column: Column, number: int, tensor: torch.Tensor, wanted: Sequences) -> torch.Tensor:
    if wanted.most is None or len(tensor) <= wanted.most:
        return tensor
    if wanted.keep is None:
        raise column.error(
            f"{{}} has {len(tensor)} items, and {wanted.most} is the limit",
            [number],
            "Raise it, or say too_long='keep_first' or 'keep_last'",
        )
    return tensor[: wanted.most] if wanted.keep == "first" else tensor[len(tensor) - wanted.most :]


def width_of(lengths: npt.NDArray[np.int64], *, to: int | None, multiple: int) -> int:
    """How wide a padded batch is.

    >>> width_of(np.array([3, 9]), to=None, multiple=8)
    16
    """
    return to if to is not None else -(-int(lengths.max(initial=0)) // multiple) * multiple


def pad(
    values: torch.Tensor, offsets: torch.Tensor, width: int, *, value: float, left: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Flat sequences as a padded tensor; on their device, which is not waited for.

    Args:
        values: (total, ...).
        offsets: int64 (n + 1,), on the same device; no sequence is longer than `width`.
        width: Of the result.
        value: What fills up.
        left: Whether the filling stands before the sequence.

    Returns:
        (n, width, ...), and its mask: bool (n, width), True where a value of the sequence is.
    """
    rows, item = len(offsets) - 1, values.shape[1:]
    begins, lengths = offsets[:-1], offsets.diff()
    first = width - lengths if left else torch.zeros_like(lengths)  # the place of each sequence's first value
    places = torch.arange(width, device=values.device)
    mask = places >= first[:, None] if left else places < lengths[:, None]
    # From a place in the flat values to one in the flat result.
    shift = torch.arange(rows, device=values.device) * width + first - begins
    to = shift.repeat_interleave(lengths, output_size=len(values)) + torch.arange(len(values), device=values.device)
    return values.new_full((rows * width, *item), value).index_copy_(0, to, values).view(rows, width, *item), mask


def moved(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """Tensors of the host on a device; to a CUDA device in one copy, which the host does not wait for."""
    if device.type == "cpu":
        return list(tensors)
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    # Pinning needs a CUDA context: that of the device, not of GPU 0. torch uses this memory again only when the copy
    # is done, and the copy stands in the stream that the caller's kernels go to.
    with torch.cuda.device(device):
        packed = pack(tensors, pinned=True)
        return unpack(packed.to(device, non_blocking=True), tensors)


def pack(tensors: Sequence[torch.Tensor], *, pinned: bool) -> torch.Tensor:
    """Tensors one after another as uint8 (bytes,), on the host."""
    packed = torch.empty(_places(tensors)[-1], dtype=torch.uint8, pin_memory=pinned)
    for view, tensor in zip(unpack(packed, tensors), tensors, strict=True):
        view.copy_(tensor)
    return packed


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what `pack` made, with the dtypes and shapes of what it was made of."""
    return [
        packed[start : start + tensor.numel() * tensor.element_size()].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(_places(like), like, strict=False)
    ]


def _places(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each begins, and the end."""
    places = [0]
    for tensor in tensors:
        used = math.ceil(tensor.numel() * tensor.element_size() / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        places.append(places[-1] + used)
    return places
