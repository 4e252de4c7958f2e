"""The order of an epoch, and the part of it that belongs to one rank.

Index for index that of `torch.utils.data.DistributedSampler`, held as an array (or as none at all when nothing is
shuffled), so that ten million samples cost 80 MB and no Python objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError

I64 = npt.NDArray[np.int64]
Pad = Literal["repeat", "drop", "mask"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How an epoch is dealt out to processes.

    Args:
        rank, world_size: Both or neither; None asks torch.distributed, then the torchrun variables, else one process.
        pad: What happens when the samples do not divide evenly. "repeat": some come twice (DistributedSampler's
            default); "drop": the last ones are left out (its drop_last=True); "mask": for evaluation; every rank gets
            the same number of full batches, rows beyond the data set have ``valid`` False, and each sample is valid
            exactly once over all ranks.
    """

    rank: int | None = None
    world_size: int | None = None
    pad: Pad = "repeat"

    def __post_init__(self) -> None:
        if self.pad not in ("repeat", "drop", "mask"):
            raise ConfigError(
                f"sharding.pad={self.pad!r} is not valid: it must be 'repeat', 'drop' or 'mask'",
                field="sharding.pad",
                value=self.pad,
                allowed=("repeat", "drop", "mask"),
            )


class EpochOrder:
    """The global order of one epoch: the same on every rank.

    Args:
        length: Number of samples in the data set.
        shuffle: A seeded permutation, or 0, 1, 2, ...
        seed, epoch: Added, as DistributedSampler does: seed 0 in epoch 1 equals seed 1 in epoch 0.
    """

    def __init__(self, length: int, *, shuffle: bool, seed: int, epoch: int) -> None:
        self.length = length
        self._permutation: I64 | None = None
        if shuffle:
            import torch

            generator = torch.Generator()
            generator.manual_seed(seed + epoch)
            self._permutation = torch.randperm(length, generator=generator).numpy()

    def at(self, positions: I64) -> tuple[I64, I64]:
        """Indices and occurrences at positions of the order; behind its end it begins again, as padding does.

        Args:
            positions: int64 (n,), not negative.

        Returns:
            Two int64 (n,): positions in the data set, and how often each came before in this order.
        """
        occurrence, position = np.divmod(positions, self.length)
        return (position if self._permutation is None else self._permutation[position]), occurrence


@dataclass(frozen=True, slots=True)
class RankRows:
    """The positions of the global order that one rank takes, from the `start` th on.

    Attributes:
        length: Samples in the global order.
        start: Samples of it that all ranks together have delivered already.
        rank, world_size: This rank.
        count: Rows that this rank takes.
    """

    length: int
    start: int
    rank: int
    world_size: int
    count: int

    @classmethod
    def deal(cls, length: int, *, start: int, rank: int, world_size: int, pad: Pad, batch_size: int) -> RankRows:
        """As DistributedSampler deals: every world_size th, with the tail padded or dropped.

        With pad "mask" the count is filled up to whole batches, so that shapes stay.
        """
        left = max(0, length - start)
        if pad == "drop":
            count = left // world_size
        else:
            count = -(-left // world_size)
            if pad == "mask":
                count = -(-count // batch_size) * batch_size
        return cls(length, start, rank, world_size, count)

    def positions(self, first: int, last: int) -> I64:
        """Positions in the global order of this rank's rows `first` to `last` - 1; int64 (last - first,)."""
        return self.start + self.rank + self.world_size * np.arange(first, last, dtype=np.int64)

    def delivered(self, rows: int) -> int:
        """How much of the global order is delivered once every rank has delivered `rows` rows."""
        return min(self.length, self.start + self.world_size * rows)
