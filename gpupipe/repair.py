"""A finished batch with bad rows, made whole as `OnError` says."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from gpupipe.errors import RecordError, SourceError
from gpupipe.geometry import affines
from gpupipe.passes import Finished, Pass, Planned
from gpupipe.reading import Row, read_row
from gpupipe.rng import Op, first_counter_word, uniforms

if TYPE_CHECKING:
    import torch

# Where one file in ten is bad, eight others are all bad once in 100 million times.
TRIES = 8

Errors = Mapping[int, RecordError]


def repaired(what: Pass, batch: Planned, views: tuple[torch.Tensor, ...], errors: Errors) -> Finished:
    """The batch without its bad rows.

    Args:
        what: The pass it belongs to; its list of bad samples is added to.
        batch: As it was planned.
        views: (n, 3, height, width) for each view, which are written to.
        errors: Row -> what is wrong with it; not empty.

    Raises:
        RecordError: That of the first bad row, if that is what the policy says; or there is no substitute.
        SourceError: There are too many bad samples.
    """
    for row in sorted(errors):
        what.bad.add(batch.records[row].index, errors[row])
    policy = what.on_error.policy
    if policy == "raise":
        raise errors[min(errors)]
    _check_number(what, what.bad.rows + len(batch.records), errors[max(errors)])
    finished = replace(batch.finished(views), records=list(batch.records), valid=batch.valid.copy())
    if policy == "ignore":
        return _ignore(finished, batch, errors)
    _substitute(what, finished, batch, errors)
    _check_number(what, what.bad.rows + len(batch.records), errors[max(errors)])
    return finished


def _check_number(what: Pass, rows: int, last: RecordError) -> None:
    bad = what.bad
    if what.on_error.too_many(len(bad), rows):
        raise SourceError(
            f"{len(bad)} bad samples among {rows} rows of epoch {bad.epoch} are more than "
            f"on_error.max_bad={what.on_error.max_bad} allows: {bad.names()}. See loader.errors for what is wrong with "
            f"each; the last one: {last.message}",
            uri=what.source.uri,
        ) from last


def _ignore(finished: Finished, batch: Planned, errors: Errors) -> Finished:
    rows = sorted(errors)
    for images in finished.views:
        images[rows] = 0
    finished.valid[rows] = False
    return replace(finished, ignored=frozenset(rows), unread=batch.unread)


def _substitute(what: Pass, finished: Finished, batch: Planned, errors: Errors) -> None:
    """Put the first good sample of its probe sequence in the place of each bad one."""
    waiting = {row: _probes(what, batch.records[row].index) for row in sorted(errors)}
    for attempt in range(TRIES):
        tried = {row: probes[attempt] for row, probes in waiting.items() if attempt < len(probes)}
        for row in _replace(what, finished, batch, tried):
            del waiting[row]
        if not waiting:
            return
    row = min(waiting)
    if not waiting[row]:
        raise errors[row]
    raise RecordError(
        f"no substitute for record {batch.records[row].index}: {len(waiting[row])} others were tried, and all are bad. "
        f"The record itself: {errors[row].message}",
        **{name: value for name, value in errors[row].facts.items() if name in RecordError.FACTS},
    ) from errors[row]


def _probes(what: Pass, index: int) -> list[int]:
    """The samples that may take the place of one, in the order in which they are tried."""
    pool = what.order.candidates(index)
    place = bisect_left(pool, index)
    within = place < len(pool) and pool[place] == index
    others = len(pool) - within
    if not others:
        return []
    words = [first_counter_word(Op.SUBSTITUTE, 0, block) for block in range(TRIES // 4)]
    numbers = uniforms(what.seed, what.epoch, np.array([index]), np.array([0]), words).ravel()
    found = (numbers * others).astype(np.int64)
    found += within & (found >= place)
    return [int(pool[number]) for number in found.tolist()]


def _replace(what: Pass, finished: Finished, batch: Planned, tried: Mapping[int, int]) -> list[int]:
    """Put samples into rows of the batch; which of them were good."""
    read: dict[int, Row] = {}
    for row, index in tried.items():
        found = read_row(what.source, index, what.on_error.max_pixels)
        if found.error is None:
            read[row] = found
        else:
            what.bad.add(index, found.error)
    if not read:
        return []
    rows = list(read)
    earlier = batch.plans[0].occurrence
    draws = what.draw(
        indices=[tried[row] for row in rows],
        occurrences=[_occurrence(batch.records[row].index, int(earlier[row])) for row in rows],
    )
    plans = what.plan(list(read.values()), draws)
    applied, moves = what.submit(list(read.values()), plans).result(), [affines(plan) for plan in plans]
    good = []
    for number, row in enumerate(rows):
        if number in applied.errors:
            what.bad.add(tried[row], applied.errors[number])
            continue
        for view, images in enumerate(applied.views):
            finished.views[view][row], finished.affines[view][row] = images[number], moves[view][number]
        finished.records[row] = read[row].record
        finished.valid[row] &= not what.mask
        what.bad.replaced(batch.records[row].index, tried[row])
        good.append(row)
    return good


def _occurrence(index: int, occurrence: int) -> int:
    """For the plan of a substitute: one that the epoch itself never has, so that it is not the same crop once more."""
    return (index % (1 << 30) + 1 << 32) + occurrence
