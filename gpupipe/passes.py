"""One pass over (the rest of) an epoch on one rank: what it consists of, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpupipe.backends.base import Applied, Backend
from gpupipe.errors import RecordError
from gpupipe.faults import BadSamples, OnError
from gpupipe.headers import upright_size
from gpupipe.plan import Draws, resolve
from gpupipe.reading import Row
from gpupipe.recipe import Recipe
from gpupipe.records import Plan, Record
from gpupipe.sampling.orders import EpochOrder
from gpupipe.sampling.samplers import RankRows
from gpupipe.sources.base import Source

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What an `Iteration` goes over: (the rest of) an epoch, on one rank.

    Attributes:
        source, recipe, backend: Where records come from, what is done to them, and by whom.
        order: The global order of the epoch.
        rows: This rank's part of it.
        seed, epoch: For the plan.
        batch_size, drop_last: How rows become batches.
        prefetch: Batches in work or waiting ahead of the one handed out.
        on_error: What happens to bad samples.
        substitutes_valid: Whether a substitute counts as valid.
        bad: The list of them, which this pass goes on with.
    """

    source: Source
    recipe: Recipe
    backend: Backend
    order: EpochOrder
    rows: RankRows
    seed: int
    epoch: int
    batch_size: int
    drop_last: bool
    prefetch: int
    on_error: OnError
    substitutes_valid: bool
    bad: BadSamples

    @property
    def batches(self) -> int:
        return self.rows.batches(self.batch_size, drop_last=self.drop_last)

    def plan(self, rows: Sequence[Row], draws: Draws) -> Plan:
        """The plan that belongs to the sizes of these rows."""
        return resolve(self.recipe, draws, [upright_size(row.header, self.recipe.exif) for row in rows])

    def submit(self, rows: Sequence[Row], plan: Plan) -> Future[Applied]:
        """Hand rows to the backend, with their plan."""
        return self.backend.submit([row.record for row in rows], [row.header for row in rows], plan)


@dataclass(frozen=True, slots=True)
class BatchCost:
    """What a batch took to load.

    Attributes:
        bytes: Of its records as they are stored.
        pixels: Of its images before the crop.
    """

    bytes: int
    pixels: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A batch on its way.

    Attributes:
        records: One for each row.
        valid: bool (n,): False for rows that only pad.
        errors: Row -> why it could not be read, or is no image.
        unread: Rows of these whose record holds no more than a name.
        by_pillow: How many of them only Pillow decodes.
        cost: Of all of them.
        plan: What is done to them.
        future: The images to come.
    """

    records: list[Record]
    valid: npt.NDArray[np.bool_]
    errors: Mapping[int, RecordError]
    unread: frozenset[int]
    by_pillow: int
    cost: BatchCost
    plan: Plan
    future: Future[Applied]


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch to be delivered.

    Attributes:
        records: One for each row.
        valid: bool (n,): False for rows that only pad, and for those ignored.
        images: (n, 3, height, width).
        affines: float32 (n, 2, 3): from places in the original image to places in these.
        ignored: Rows that hold zeros instead of a bad sample.
        unread: Rows of these whose record holds no more than a name.
    """

    records: list[Record]
    valid: npt.NDArray[np.bool_]
    images: torch.Tensor
    affines: npt.NDArray[np.float32]
    ignored: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()
