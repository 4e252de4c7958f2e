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
from gpupipe.geometry import affines
from gpupipe.headers import upright_size
from gpupipe.mixing import Mixture
from gpupipe.plan import Draws, draw, resolve
from gpupipe.reading import Row
from gpupipe.recipe import Recipe
from gpupipe.records import Plan, Record
from gpupipe.sampling.orders import EpochOrder
from gpupipe.sampling.samplers import RankRows
from gpupipe.sources.base import Source
from gpupipe.views import Views, recipes_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """What an `Iteration` goes over: (the rest of) an epoch, on one rank.

    Attributes:
        source, recipe, backend: Where records come from, what is done to them, and by whom.
        order: The global order of the epoch.
        rows: This rank's part of it.
        device: Of the batches.
        seed, epoch: For the plan.
        batch_size, drop_last: How rows become batches.
        prefetch: Batches in work or waiting ahead of the one handed out.
        on_error: What happens to bad samples.
        mask: Whether rows that only pad, and substitutes, do not count: pad="mask".
        bad: The list of them, which this pass goes on with.
    """

    source: Source
    recipe: Recipe | Views
    backend: Backend
    order: EpochOrder
    rows: RankRows
    device: torch.device
    seed: int
    epoch: int
    batch_size: int
    drop_last: bool
    prefetch: int
    on_error: OnError
    mask: bool
    bad: BadSamples

    @property
    def batches(self) -> int:
        return self.rows.batches(self.batch_size, drop_last=self.drop_last)

    @property
    def views(self) -> tuple[Recipe, ...]:
        """The recipe of each view; one, as a rule."""
        return recipes_of(self.recipe)

    @property
    def has_last_steps(self) -> bool:
        """Whether anything is done to a batch behind the backend."""
        return any(recipe.functions or recipe.mix is not None for recipe in self.views)

    def draw(self, indices: npt.ArrayLike, occurrences: npt.ArrayLike) -> tuple[Draws, ...]:
        """The random numbers of some samples, for each view."""
        return tuple(
            draw(recipe, seed=self.seed, epoch=self.epoch, indices=indices, occurrences=occurrences, view=view)
            for view, recipe in enumerate(self.views)
        )

    def plan(self, rows: Sequence[Row], draws: Sequence[Draws]) -> tuple[Plan, ...]:
        """The plans of each view that belong to the sizes of these rows."""
        sizes = [upright_size(row.header, self.recipe.exif) for row in rows]
        return tuple(resolve(recipe, each, sizes) for recipe, each in zip(self.views, draws, strict=True))

    def submit(self, rows: Sequence[Row], plans: tuple[Plan, ...]) -> Future[Applied]:
        """Hand rows to the backend, with their plans."""
        plan = plans if isinstance(self.recipe, Views) else plans[0]
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
        plans: What is done to them, for each view.
        mixture: How the batch is mixed, if it is.
        mask: See `Pass`.
        future: The images to come.
    """

    records: list[Record]
    valid: npt.NDArray[np.bool_]
    errors: Mapping[int, RecordError]
    unread: frozenset[int]
    by_pillow: int
    cost: BatchCost
    plans: tuple[Plan, ...]
    mixture: Mixture | None
    mask: bool
    future: Future[Applied]

    def finished(self, views: tuple[torch.Tensor, ...]) -> Finished:
        """With its images, as if all of them were good."""
        moves = tuple(affines(plan) for plan in self.plans)
        return Finished(self.records, self.valid, views, moves, self.mask, self.mixture)


@dataclass(frozen=True, slots=True)
class Finished:
    """A batch to be delivered.

    Attributes:
        records: One for each row.
        valid: bool (n,): False for rows that only pad, and for those ignored.
        views: (n, 3, height, width) for each view; of another shape behind functions of the recipe.
        affines: float32 (n, 2, 3) for each view: from places in the original image to places in these.
        mask: See `Pass`.
        mixture: How it is mixed, if it is.
        ignored: Rows that hold zeros instead of a bad sample.
        unread: Rows of these whose record holds no more than a name.
    """

    records: list[Record]
    valid: npt.NDArray[np.bool_]
    views: tuple[torch.Tensor, ...]
    affines: tuple[npt.NDArray[np.float32], ...]
    mask: bool
    mixture: Mixture | None
    ignored: frozenset[int] = frozenset()
    unread: frozenset[int] = frozenset()

    @property
    def usable(self) -> npt.NDArray[np.bool_]:
        """bool (n,): rows that may be mixed: not those ignored, nor those that do not count."""
        found = self.valid.copy() if self.mask else np.ones(len(self.valid), np.bool_)
        found[list(self.ignored)] = False
        return found
