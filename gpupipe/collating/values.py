"""From one column's Python values, arrays and tensors to tensors of one dtype; what cannot be is named exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np
import torch

from gpupipe.errors import SourceError

# torch has these, but hardly an operator for them.
_WIDER = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
# What rows without a dtype of their own become: lists and numbers of Python.
_OF_PYTHON = {torch.float64: torch.float32}
NAMED_AT_MOST = 4
_SAY_DTYPE = "Say which dtype the batch has: dtype='float32', for example"


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """One column of a batch, before it is collated.

    Attributes:
        name: For messages.
        values: One for each row.
        absent: Rows of which nothing could be read, and which are to be blank.
        named: What a row is called in messages.
    """

    name: str
    values: Sequence[Any]
    absent: frozenset[int] = frozenset()
    named: Callable[[int], str] = "row {}".format

    def error(self, what: str, rows: Sequence[int], remedy: str) -> SourceError:
        """The error for values that make no tensor.

        Args:
            what: What is wrong, to follow the column's name; the first "{}" in it becomes the names of the rows.
            rows: Which rows are meant.
            remedy: What to do.
        """
        names = ", ".join(self.named(row) for row in rows[:NAMED_AT_MOST])
        more = f" and {len(rows) - NAMED_AT_MOST} more" if len(rows) > NAMED_AT_MOST else ""
        return SourceError(
            f"column {self.name!r} cannot be collated: {what.replace('{}', names + more, 1)}. {remedy}",
            column=self.name,
            rows=tuple(rows),
        )


class Row(NamedTuple):
    """One value as a tensor.

    Attributes:
        tensor: Its values.
        weak: Whether the dtype is only what Python's numbers came as, or that of an array without values.
    """

    tensor: torch.Tensor
    weak: bool


def row_of(column: Column, number: int) -> Row:
    """The value of a row as a tensor, not copied where that can be.

    Raises:
        SourceError: It is no number, array, tensor, bytes, or list of numbers.
    """
    value = column.values[number]
    if isinstance(value, torch.Tensor):
        if value.layout != torch.strided or value.is_nested:
            raise column.error(f"{{}} is a tensor of layout {value.layout}", [number], "Use gpupipe.Keep()")
        return Row(value.detach() if value.requires_grad else value, weak=not value.numel())
    weak = not isinstance(value, np.ndarray | np.generic)
    found = _array(column, number)
    if found.dtype.kind not in "biufc":
        raise column.error(
            f"{{}} is {_shown(value)}",
            [number],
            "Turn it into numbers, a list of them, an array or a tensor first, or keep it as it is with gpupipe.Keep()",
        )
    try:
        tensor = torch.from_numpy(found)
    except TypeError as error:  # complex256, float128
        raise column.error(f"{{}} is an array of {found.dtype}", [number], "torch has no such dtype") from error
    return Row(_without_odd_dtype(column, number, tensor), weak=(weak and found.dtype != np.uint8) or not found.size)


def _array(column: Column, number: int) -> np.ndarray[Any, np.dtype[Any]]:
    value = column.values[number]
    if value is None:
        raise column.error(
            "{} is None", [number], "Give every record a value; or missing='empty', where a column has sequences"
        )
    if isinstance(value, np.ma.MaskedArray):
        raise column.error(
            "{} is a masked array", [number], "Its mask would be lost: fill it, or give the mask as a column of its own"
        )
    if isinstance(value, bytes | bytearray | memoryview):
        return np.frombuffer(value, np.uint8).copy()
    try:
        found = np.asarray(value)
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise column.error(
            f"{{}} is {_shown(value)}, which is no array ({error})",
            [number],
            "A sequence may vary in its first dimension only",
        ) from error
    # torch takes neither arrays that are read only nor ones of the other byte order or negative strides.
    if not found.flags.writeable or not found.dtype.isnative or any(stride < 0 for stride in found.strides):
        found = found.astype(found.dtype.newbyteorder("="))
    return found


def _without_odd_dtype(column: Column, number: int, tensor: torch.Tensor) -> torch.Tensor:
    wider = _WIDER.get(tensor.dtype)
    if wider is None:
        return tensor
    as_wide = tensor.to(wider)
    if tensor.dtype == torch.uint64 and tensor.numel() and int(as_wide.min()) < 0:
        raise column.error("{} has numbers above 2**63 - 1", [number], "They do not fit into int64")
    return as_wide


def _shown(value: object) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"


def in_one_dtype(column: Column, rows: Sequence[Row], wanted: torch.dtype | None) -> list[torch.Tensor]:
    """The rows in one dtype: the one that they have; else, where they have several, the one that is wanted.

    Raises:
        SourceError: They have several and none is wanted; or the one that is wanted cannot hold a number.
    """
    dtypes = {row.tensor.dtype for row in rows if row.tensor.numel()}
    if wanted is None:
        common = _common_dtype(column, rows)
    elif len(dtypes) <= 1:
        common = dtypes.pop() if dtypes else wanted
    else:
        return [converted(column, row.tensor, wanted, partial(_always, number)) for number, row in enumerate(rows)]
    return [row.tensor if row.tensor.dtype == common else row.tensor.to(common) for row in rows]


def _always(number: int, position: int) -> int:
    del position
    return number


def _common_dtype(column: Column, rows: Sequence[Row]) -> torch.dtype:
    strong = {row.tensor.dtype: number for number, row in reversed(list(enumerate(rows))) if not row.weak}
    if len(strong) > 1:
        numbers = sorted(strong.values())
        named = ", ".join(f"{column.named(at)} has {_name(rows[at].tensor.dtype)}" for at in numbers[:NAMED_AT_MOST])
        raise column.error(f"its dtypes differ: {named}", numbers, _SAY_DTYPE)
    filled = [row.tensor.dtype for row in rows if row.weak and row.tensor.numel()]
    if strong:
        found = next(iter(strong))
        for number, row in enumerate(rows):
            if row.weak and row.tensor.numel() and _rank(row.tensor.dtype) > _rank(found):
                kind = "floats" if row.tensor.dtype.is_floating_point else "integers"
                raise column.error(f"{{}} has {kind} beside arrays of {_name(found)}", [number], _SAY_DTYPE)
        return found
    # Python's numbers; or no values at all, and then whatever the empty ones are of.
    found = reduce(torch.promote_types, filled or [row.tensor.dtype for row in rows])
    return _OF_PYTHON.get(found, found)


def _rank(dtype: torch.dtype) -> int:
    if dtype == torch.bool:
        return 0
    return 2 if dtype.is_floating_point or dtype.is_complex else 1


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def converted(column: Column, tensor: torch.Tensor, dtype: torch.dtype, row_at: Callable[[int], int]) -> torch.Tensor:
    """A tensor in another dtype, if that keeps its values (floats to the dtype's precision).

    Args:
        column: Where the values come from.
        tensor: (m, ...).
        dtype: That is wanted. Of bool, everything but 0 is True.
        row_at: From a position in the first dimension to a row of the batch.

    Raises:
        SourceError: A number is too large for the dtype, or has a fraction that it cannot hold.
    """
    if tensor.dtype == dtype:
        return tensor
    if not tensor.numel() or torch.bool in (dtype, tensor.dtype):
        return tensor.to(dtype)
    if tensor.is_complex():
        raise column.error("{} has complex numbers", [row_at(0)], f"{_name(dtype)} has none")
    found = tensor.to(dtype)
    if dtype.is_floating_point:
        wrong = ~torch.isfinite(found) & torch.isfinite(tensor)
    elif tensor.dtype.is_floating_point:
        wrong = found.to(tensor.dtype) != tensor
    else:
        limits, wide = torch.iinfo(dtype), tensor.to(torch.int64)
        wrong = (wide < limits.min) | (wide > limits.max)
    if wrong.any():
        first = int(wrong.reshape(-1).nonzero()[0])
        raise column.error(
            f"{{}} has a {tensor.reshape(-1)[first].item()!r}, which {_name(dtype)} cannot hold",
            [row_at(first // math.prod(tensor.shape[1:]))],
            "Use a wider dtype",
        )
    return found


def stacked(column: Column, dtype: torch.dtype | None) -> torch.Tensor:
    """Values of one shape as one tensor (n, ...).

    Raises:
        SourceError: Their shapes differ, or their dtypes.
    """
    rows = [row_of(column, number) for number in range(len(column.values))]
    shapes = {tuple(row.tensor.shape): number for number, row in reversed(list(enumerate(rows)))}
    if len(shapes) > 1:
        numbers = sorted(shapes.values())
        named = ", ".join(f"{column.named(at)} has {tuple(rows[at].tensor.shape)}" for at in numbers[:NAMED_AT_MOST])
        only_first = len({shape[1:] for shape in shapes}) == 1 and all(shapes)
        raise column.error(
            f"its shapes differ: {named}",
            numbers,
            "Use gpupipe.Pad() or gpupipe.Ragged() for it"
            if only_first
            else "Bring them to one shape, or use gpupipe.Keep(), which leaves a list",
        )
    tensor = torch.stack(in_one_dtype(column, rows, dtype))
    return tensor if dtype is None else converted(column, tensor, dtype, _itself)


def _itself(position: int) -> int:
    return position
