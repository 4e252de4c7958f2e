"""`gpupipe.collate`: samples as datasets give them, dicts or tuples, to one batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gpupipe.collating.columns import collated
from gpupipe.collating.kinds import Collate, Kind, path_of
from gpupipe.collating.values import Column
from gpupipe.errors import ConfigError

_CPU = torch.device("cpu")
_INFER = Collate(columns={})


def collate(samples: Sequence[Any], spec: Collate | None = None) -> Any:
    """Make one batch of samples, as ``collate_fn`` of a torch DataLoader does.

    Args:
        samples: At least one; all dicts with the same names, all tuples (or lists) of the same length, or all named
            tuples.
        spec: What becomes of each column; None: what their values suggest, see `Collate`.

    Returns:
        A dict, with the names that the kinds of the columns make, and tensors on the CPU. A tuple, where the samples
        are plain tuples and `spec` has no names for their entries.

    Raises:
        ConfigError: Samples that are neither, or without a column that the specification names.
        SourceError: A column that cannot be collated; the message names it, and the rows and shapes in the way.
            Its attributes: column, rows.

    Parity: What `torch.utils.data.default_collate` gives for dicts and tuples of numbers, strings, and arrays or
        tensors of one shape, but that Python's floats become float32, not float64, and that lists stay lists.

    >>> import gpupipe as gp
    >>> spec = gp.Collate(columns={"boxes": gp.Ragged(item=(4,), dtype="float32")})
    >>> batch = gp.collate([{"boxes": [[0, 0, 9, 9]], "id": 7}, {"boxes": [], "id": 8}], spec)
    >>> batch["boxes"].shape, batch["boxes_offsets"].tolist(), batch["id"].tolist()
    (torch.Size([1, 4]), [0, 1, 1], [7, 8])
    """
    spec = _INFER if spec is None else spec
    if not isinstance(spec, Collate):
        raise ConfigError(
            f"spec={spec!r} is not valid: it must be gpupipe.Collate(...) or None",
            field="spec",
            value=spec,
            allowed="Collate or None",
        )
    samples = list(samples)
    if not samples:
        raise ConfigError("samples is empty: a batch has at least one", field="samples", value=[], allowed="1 or more")
    named = _named(samples, spec)
    if named is None:
        return _plain(samples, spec)
    made: dict[str, Any] = {}
    for name, kind in spec.columns.items():
        made |= collated(_column(named, name, kind), kind, _CPU)
    if spec.default == "drop":
        return made
    default = None if isinstance(spec.default, str) else spec.default
    used = {path_of(name, kind)[0] for name, kind in spec.columns.items()}
    others: dict[str, Any] = {}
    for name in named[0]:
        if name not in used:
            others |= collated(_column(named, name, None), default, _CPU)
    both = sorted(made.keys() & others.keys())
    if both:
        raise ConfigError(
            f"collate: {both[0]!r} is a column, and comes out of another one, too: rename that one",
            field="collate.columns",
            value=both[0],
            allowed="names that differ",
        )
    return others | made


def inside(column: Column, path: Sequence[str]) -> Column:
    """The column of what a path leads to in the nested dicts and lists that a column holds.

    Args:
        column: With dicts or lists as values. What is None, or has a None on the way, stays None.
        path: Names, or places in lists.

    Raises:
        SourceError: A value without that.

    >>> inside(Column(name="box", values=[{"boxes": [[1, 2, 3, 4]]}, None]), ("boxes", "0")).values
    [[1, 2, 3, 4], None]
    """
    found = [
        None if row in column.absent else _reached(column, row, value, path) for row, value in enumerate(column.values)
    ]
    return replace(column, values=found)


def _reached(column: Column, row: int, value: Any, path: Sequence[str]) -> Any:
    for step in path:
        if value is None:
            return None
        try:
            value = value[int(step)] if isinstance(value, list | tuple) else value[step]
        except (KeyError, IndexError, TypeError, ValueError) as error:
            has = ", ".join(map(repr, value)) if isinstance(value, Mapping) else f"a {type(value).__name__}"
            raise column.error(
                f"{{}} has no {'.'.join(path)!r}: where {step!r} should be, it has {has}",
                [row],
                "Correct column=, or give a None where the value is missing",
            ) from error
    return value


def _column(samples: Sequence[Mapping[str, Any]], name: str, kind: Kind | None) -> Column:
    column, path = (name, ()) if kind is None else path_of(name, kind)
    for row, sample in enumerate(samples):
        if column not in sample:
            raise ConfigError(
                f"column {name!r}: row {row} has no {column!r}, only {', '.join(map(repr, sample)) or 'nothing'}. All "
                "samples must have the same names; a value that is missing is None",
                field=f"collate.columns[{name!r}]",
                value=column,
                allowed=tuple(sample),
            )
    found = Column(name=name, values=[sample[column] for sample in samples])
    return inside(found, path) if path else found


def _named(samples: Sequence[Any], spec: Collate) -> list[Mapping[str, Any]] | None:
    """The samples as dicts; None: they are plain tuples."""
    if all(isinstance(sample, Mapping) for sample in samples):
        return list(samples)
    if not all(isinstance(sample, tuple | list) for sample in samples):
        kinds = sorted({type(sample).__name__ for sample in samples})
        raise ConfigError(
            f"samples of type {', '.join(kinds)} cannot be collated: they must all be dicts, or all tuples",
            field="samples",
            value=kinds,
            allowed="dicts or tuples",
        )
    lengths = {len(sample): row for row, sample in reversed(list(enumerate(samples)))}
    if len(lengths) > 1:
        found = ", ".join(f"row {row} has {length}" for length, row in sorted(lengths.items()))
        raise ConfigError(
            f"samples of different lengths cannot be collated: {found}",
            field="samples",
            value=sorted(lengths),
            allowed="tuples of one length",
        )
    names: Sequence[str] | None = spec.names or getattr(samples[0], "_fields", None)
    if names is None:
        if spec.columns:
            raise ConfigError(
                "columns are named, but the samples are tuples: say what their entries are, as in "
                "Collate(columns=..., names=('image', 'tokens'))",
                field="collate.names",
                value=None,
                allowed="one name for each entry",
            )
        return None
    if len(names) != len(samples[0]):
        raise ConfigError(
            f"names has {len(names)} entries and the samples have {len(samples[0])}: give one for each",
            field="collate.names",
            value=tuple(names),
            allowed=len(samples[0]),
        )
    return [dict(zip(names, sample, strict=True)) for sample in samples]


def _plain(samples: Sequence[Any], spec: Collate) -> tuple[Any, ...]:
    kind: Kind | None = None if isinstance(spec.default, str) else spec.default
    made: list[Any] = []
    for place, values in enumerate(zip(*samples, strict=True)):
        made += collated(Column(name=str(place), values=values), kind, _CPU).values()
    return tuple(made)
