"""From one column of a batch to what its kind makes of it, on the batch's device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gpupipe.collating import flat
from gpupipe.collating.kinds import LENGTHS, MASK, OFFSETS, Keep, Kind, Pad, Ragged, Stack
from gpupipe.collating.values import Column, converted, stacked
from gpupipe.errors import SourceError

# Marks rows of integers that nobody could read: what torch.nn.functional.cross_entropy passes over by default.
IGNORED = -100
# Types of numbers, and the dtype of a tensor of nothing else.
_NUMBERS: tuple[tuple[tuple[type, ...], torch.dtype], ...] = (
    ((bool, np.bool_), torch.bool),
    ((bool, np.bool_, int, np.integer), torch.int64),
    ((float, np.floating), torch.float32),
)
_ANY_NUMBER = (bool, int, float, np.generic)
_ARRAYS = (np.ndarray, torch.Tensor)


def collated(column: Column, kind: Kind | None, device: torch.device) -> dict[str, Any]:
    """What becomes of a column.

    Args:
        column: At least one row.
        kind: What is asked for; None: what its values suggest ("infer" of `Collate`).
        device: Of the tensors.

    Returns:
        Name -> tensor or list, for each name of ``kind.parts(column.name)``.

    Raises:
        SourceError: The values cannot be collated so; says which rows, and why.
    """
    if isinstance(kind, Pad):
        return _padded(column, kind, device)
    if isinstance(kind, Ragged):
        return _ragged(column, kind, device)
    whole = Column(name=column.name, values=filled(column), named=column.named)
    if isinstance(kind, Keep):
        return {column.name: list(whole.values)}
    found = stacked(whole, _dtype(kind)) if isinstance(kind, Stack) else _inferred(whole)
    return {column.name: found.to(device) if isinstance(found, torch.Tensor) else found}


def _padded(column: Column, kind: Pad, device: torch.device) -> dict[str, Any]:
    keep = None if kind.too_long == "raise" else kind.too_long.removeprefix("keep_")
    sequences = flat.flatten(column, _sequences(kind, kind.most, keep))
    value = _filling(column, kind.value, sequences.values.dtype)
    values, offsets = flat.moved([sequences.values, sequences.offsets], device)
    width = flat.width_of(sequences.lengths, to=None if kind.to == "longest" else int(kind.to), multiple=kind.multiple)
    padded, mask = flat.pad(values, offsets, width, value=value, left=kind.side == "left")
    found = {column.name: padded}
    if kind.mask:
        found[f"{column.name}_{MASK}"] = mask
    if kind.lengths:
        found[f"{column.name}_{LENGTHS}"] = offsets.diff()
    return found


def _ragged(column: Column, kind: Ragged, device: torch.device) -> dict[str, Any]:
    sequences = flat.flatten(column, _sequences(kind))
    values, offsets = flat.moved([sequences.values, sequences.offsets], device)
    if kind.layout == "offsets":
        return {column.name: values, f"{column.name}_{OFFSETS}": offsets}
    return {
        column.name: torch.nested.nested_tensor_from_jagged(
            values,
            offsets,
            min_seqlen=int(sequences.lengths.min()),  # else operators ask the device for them, and wait
            max_seqlen=int(sequences.lengths.max()),
        )
    }


def _sequences(kind: Pad | Ragged, most: int | None = None, keep: str | None = None) -> flat.Sequences:
    return flat.Sequences(
        item=None if kind.item is None else tuple(kind.item),
        dtype=_dtype(kind),
        missing_empty=kind.missing == "empty",
        most=most,
        keep=keep,
    )


def _dtype(kind: Stack | Pad | Ragged) -> torch.dtype | None:
    if kind.dtype is None:
        return None
    found: torch.dtype = getattr(torch, str(kind.dtype))
    return found


def _filling(column: Column, value: float, dtype: torch.dtype) -> float:
    """The padding value, if the dtype has it."""
    try:
        converted(column, torch.tensor([value]), dtype, int)
        if dtype == torch.bool and value not in (0, 1):
            raise ValueError
    except (SourceError, ValueError, RuntimeError):
        raise SourceError(
            f"column {column.name!r} cannot be padded with {value!r}, because it is {str(dtype).removeprefix('torch.')}"
            ", which has no such number. Use another value, or another dtype",
            column=column.name,
            rows=(),
        ) from None
    return value if dtype.is_floating_point or dtype.is_complex else math.trunc(value)


def _inferred(column: Column) -> Any:
    values: Sequence[Any] = column.values
    if not any(isinstance(value, _ANY_NUMBER + _ARRAYS) for value in values):
        return list(values)
    if all(isinstance(value, _ARRAYS) for value in values):
        return stacked(column, None)
    for types, dtype in _NUMBERS:
        if all(isinstance(value, types) for value in values):
            return _numbers(column, dtype)
    kinds = {_kind(value): number for number, value in reversed(list(enumerate(values)))}
    numbers = sorted(kinds.values())
    found = " and ".join(f"{column.named(number)} is {_kind(values[number])}" for number in numbers)
    raise column.error(
        f"its values are of several types: {found}",
        numbers,
        "Give values of one type, say what it is with gpupipe.Stack(dtype=...), or keep a list with gpupipe.Keep()",
    )


def _numbers(column: Column, dtype: torch.dtype) -> torch.Tensor:
    plain = [value.item() if isinstance(value, np.generic) else value for value in column.values]
    try:
        return torch.tensor(plain, dtype=dtype)
    except (RuntimeError, OverflowError, ValueError) as error:
        rows = [row for row, value in enumerate(plain) if not -(2**63) <= value < 2**63]
        raise column.error(
            f"{{}} has a number that {str(dtype).removeprefix('torch.')} cannot hold", rows, "Make it smaller"
        ) from error


def _kind(value: object) -> str:
    if isinstance(value, bool | int | np.integer | np.bool_):
        return "an integer"
    return "a float" if isinstance(value, float | np.floating) else f"of type {type(value).__name__}"


def filled(column: Column) -> Sequence[Any]:
    """The values of a column, with something of the others' kind in rows that nobody could read."""
    if not column.absent:
        return column.values
    there = (value for row, value in enumerate(column.values) if row not in column.absent)
    some = next(there, IGNORED)
    blank: Any = None
    if _kind(some) == "an integer" and not isinstance(some, bool | np.bool_):
        blank = IGNORED
    elif isinstance(some, bool | np.bool_):
        blank = False
    elif isinstance(some, float | np.floating):
        blank = 0.0
    elif isinstance(some, np.ndarray):
        blank = np.zeros_like(some)
    elif isinstance(some, torch.Tensor):
        blank = torch.zeros_like(some)
    elif isinstance(some, str | bytes):
        blank = type(some)()
    return [blank if row in column.absent else value for row, value in enumerate(column.values)]
