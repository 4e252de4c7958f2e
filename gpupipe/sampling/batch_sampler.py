"""The orders of this package for a plain torch DataLoader: lists of indices, one for each batch of this rank."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from gpupipe.checks import check_integer
from gpupipe.errors import ConfigError
from gpupipe.rng import check_seed
from gpupipe.sampling.choose import choose_ordering
from gpupipe.sampling.cost import CostAware
from gpupipe.sampling.length import LengthBuckets
from gpupipe.sampling.orders import EpochOrder
from gpupipe.sampling.rank import find_ranks
from gpupipe.sampling.samplers import RankRows, Sharding, Weighted


class BatchSampler:
    """Batches of indices for data sets without images: hand it to a torch DataLoader as ``batch_sampler=``.

    The batches are those that a `Loader` with the same ``sampler=`` makes: every epoch holds every sample once over
    all ranks (but for padding or dropping at its end), and all ranks have equally many batches. An epoch that follows
    one of which a batch was taken is the next one, unless `set_epoch` was called in between. Where torch.distributed
    runs, the ranks compare their orders at each epoch's beginning, so all of them must begin it.

    Args:
        sampler: `LengthBuckets`, `Weighted`, or `CostAware` with numbers.
        batch_size: Samples in a batch on this rank.
        seed: In [0, 2**63).
        drop_last: Leave out the last batch of a rank if it is incomplete.
        sharding: How samples are dealt to processes; None: `Sharding()`, which finds the rank itself.

    >>> import gpupipe as gp
    >>> sampler = gp.BatchSampler(gp.LengthBuckets([9, 1, 8, 2], noise=0), batch_size=2)
    >>> sorted(sorted(batch) for batch in sampler)
    [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        sampler: LengthBuckets | CostAware | Weighted,
        *,
        batch_size: int,
        seed: int = 0,
        drop_last: bool = False,
        sharding: Sharding | None = None,
    ) -> None:
        self.batch_size, self.drop_last = check_integer("batch_size", batch_size, 1), bool(drop_last)
        self._sharding = sharding or Sharding()
        if self._sharding.pad == "mask":
            raise ConfigError(
                "sharding.pad='mask' marks padding by the field 'valid' of a Loader, which lists of indices have no "
                "place for: use 'repeat' or 'drop'",
                field="sharding.pad",
                value="mask",
                allowed=("repeat", "drop"),
            )
        self._ranks = find_ranks(self._sharding.rank, self._sharding.world_size)
        self._ordering = choose_ordering(
            sampler,
            range(_samples(sampler)),  # type: ignore[arg-type]  # only its length is asked for
            shuffle=False,
            seed=check_seed(seed),
            sharding=self._sharding,
            ranks=self._ranks,
            batch_size=self.batch_size,
        )
        self._epoch, self._start, self._begun = 0, 0, False

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Let the next iteration take this epoch.

        Args:
            epoch: Not negative.
            start: Batches to leave out at its beginning, because they were trained on before a run was resumed. Count
                the steps that were made, not the batches that a DataLoader has asked for ahead of them. Seed, batch
                size and number of ranks must be those of the run that was interrupted.
        """
        self._epoch, self._start = check_integer("epoch", epoch, 0), check_integer("start", start, 0)
        self._begun = False

    @property
    def epoch(self) -> int:
        """The epoch that is being iterated, or that the next iteration takes if none has begun."""
        return self._epoch

    def __len__(self) -> int:
        """Batches in a full epoch on this rank."""
        return self._rows().batches(self.batch_size, drop_last=self.drop_last)

    def __iter__(self) -> Iterator[list[int]]:
        """Begin an epoch, as the class says."""
        if self._begun:
            self._epoch, self._start, self._begun = self._epoch + 1, 0, False
        epoch = self._epoch
        order = self._ordering.agree(lambda: self._ordering.draw(epoch), self._ranks)
        return self._batches(order, self._start)

    def _batches(self, order: EpochOrder, start: int) -> Iterator[list[int]]:
        rows = self._rows()
        for number in range(start, len(self)):
            first = number * self.batch_size
            indices, _ = order.at(rows.positions(first, min(first + self.batch_size, rows.count)))
            self._begun = True
            yield indices.tolist()

    def _rows(self) -> RankRows:
        length = self._ordering.length(self._epoch)
        return RankRows.deal(
            length or 0,
            start=0,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            pad=self._sharding.pad,
            batch_size=self.batch_size,
        )


def _samples(sampler: object) -> int:
    values: object = None
    if isinstance(sampler, LengthBuckets):
        values = sampler.lengths
    elif isinstance(sampler, Weighted):
        values = sampler.weights
    elif isinstance(sampler, CostAware) and not isinstance(sampler.cost, str):
        values = sampler.cost
    if values is None:
        raise ConfigError(
            f"sampler={sampler!r} is not valid: it must be LengthBuckets, Weighted, or CostAware with numbers",
            field="sampler",
            value=sampler,
            allowed=("LengthBuckets", "Weighted", "CostAware"),
        )
    return len(np.asarray(values))
