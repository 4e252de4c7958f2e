"""Repeated augmentation: each sample several times in a row, so that one step sees several versions of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gpupipe.checks import check_integer
from gpupipe.errors import ConfigError
from gpupipe.sampling.orders import ArrayOrder
from gpupipe.sampling.samplers import SeededOrdering, permutation

MAX_ROWS = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Repeated:
    """Repeated augmentation: hand it to a Loader as ``sampler=``.

    The samples are shuffled anew each epoch, and each comes several times in a row, every time with another crop. The
    order is dealt out like every other, so with as many ranks as repeats each rank has its own version of the same
    samples. An epoch ends after as many rows as were asked for, so each sees a part of the samples only.

    Args:
        repeats: How often a sample comes; 3 and 4 are usual.
        num_samples: Rows of an epoch, over all ranks; None: as many as there are samples.

    Parity:
        Index for index the RASampler of torchvision's classification reference with the same seed; that one keeps
        ``num_samples=len(source) // 256 * 256``.

    Source: Hoffer et al., "Augment your batch: improving generalization through instance repetition", CVPR 2020;
    torchvision, references/classification/sampler.py.

    >>> Repeated(4).repeats
    4
    """

    repeats: int = 3
    num_samples: int | None = None

    def __post_init__(self) -> None:
        check_integer("repeats", self.repeats, 1, MAX_ROWS)
        if self.num_samples is not None:
            check_integer("num_samples", self.num_samples, 1, MAX_ROWS)


class RepeatedOrdering(SeededOrdering):
    """The orders of a `Repeated`.

    Args:
        config: Checked already.
        samples: In the data set.
        seed: seed + epoch is what torch's generator gets.

    Raises:
        ConfigError: More rows than there are with all repeats.
    """

    def __init__(self, config: Repeated, samples: int, *, seed: int) -> None:
        self._rows = samples if config.num_samples is None else config.num_samples
        if self._rows > samples * config.repeats:
            raise ConfigError(
                f"num_samples={self._rows} is more than {samples} samples with {config.repeats} repeats each make",
                field="num_samples",
                value=self._rows,
                allowed=f"at most {samples * config.repeats}",
            )
        self._samples, self._repeats, self._seed = samples, config.repeats, seed
        super().__init__({"kind": "repeated", "repeats": config.repeats, "num_samples": self._rows})

    def length(self, epoch: int) -> int:
        """See `Ordering.length`."""
        del epoch
        return self._rows

    def draw(self, epoch: int) -> ArrayOrder:
        """See `Ordering.draw`."""
        first = permutation(self._samples, self._seed + epoch)[: -(-self._rows // self._repeats)]
        indices = np.repeat(first, self._repeats)[: self._rows]
        return ArrayOrder(indices, length=self._rows, made_from=self._made_from, repeats=True)
