"""Batches of samples of nearly the same length: the same samples in an epoch, with little padding in any batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpupipe.checks import check_integer
from gpupipe.errors import ConfigError
from gpupipe.sampling.batched import BatchedOrdering
from gpupipe.sampling.orders import I64, Definition, digest
from gpupipe.sampling.samplers import check_one_each, numbers

F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class LengthBuckets:
    """Shuffle so that samples of similar length share a batch: hand it to a Loader as ``sampler=``.

    The epoch begins from the same permutation as ``shuffle=True``. Windows of it, of `window` steps each, are sorted
    by length and cut into batches; batches that stand next to each other are one step of all ranks, so that these have
    similar lengths at the same time and none waits for another. Then the steps are shuffled over the whole epoch, and
    the rows within each batch. So every epoch holds every sample once, all batches are of the same size, and the order
    is the same on every rank. Buckets with fixed limits would leave an incomplete batch in each, and ranks with unequal
    counts; there are none here.

    What does not fill a batch on every rank stands at the end, as plain shuffling left it, so ``drop_last=True`` and
    ``pad="drop"`` favour no length. Samples of similar length meet more often than in plain shuffling, as they must.

    The order depends on batch_size and world_size. A state from the middle of an epoch brings the old ones along,
    until that epoch is over. For a torch DataLoader: `BatchSampler`.

    Args:
        lengths: Numbers (n,), one for each sample, not negative: tokens, frames, or the ratio of an image's sides.
        window: Steps whose batches, one for each rank, are sorted together. More leave less padding; fewer stay closer
            to plain shuffling.
        noise: Each length is multiplied by a number from 1 - noise to 1 + noise when it is sorted, another in every
            epoch. Without it, a data set of few windows is cut into the same batches again and again.

    Source:
        The windows: `transformers.trainer_pt_utils.get_length_grouped_indices`. The noise: AllenNLP's
        `BucketBatchSampler`, whose padding_noise is 0.1, too.
    """

    lengths: npt.ArrayLike
    window: int = 64
    noise: float = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", numbers("lengths", self.lengths))
        object.__setattr__(self, "window", check_integer("window", self.window, 1))
        if not isinstance(self.noise, int | float) or isinstance(self.noise, bool) or not 0 <= self.noise < 1:
            raise ConfigError(
                f"noise={self.noise!r} is not valid: it must be a number of at least 0 and below 1",
                field="noise",
                value=self.noise,
                allowed="0 <= noise < 1",
            )


class LengthOrdering(BatchedOrdering):
    """The orders of a `LengthBuckets`.

    Args:
        config: Checked already.
        samples: In the data set.
        seed: seed + epoch is what torch's generator gets.
        batch_size, world_size: Of what batches, and how many of them at a time.
    """

    def __init__(self, config: LengthBuckets, samples: int, *, seed: int, batch_size: int, world_size: int) -> None:
        self._lengths = np.asarray(config.lengths, np.float64)
        check_one_each("lengths", len(self._lengths), samples)
        self._seed = seed
        super().__init__(
            {
                "kind": "length",
                "lengths": digest(self._lengths),
                "window": config.window,
                "noise": float(config.noise),
                "batch_size": batch_size,
                "world_size": world_size,
            },
            samples=samples,
            what="lengths",
        )

    def order(self, epoch: int, made_from: Definition) -> I64:
        """See `BatchedOrdering.order`."""
        return bucketed_order(
            self._lengths,
            seed=self._seed + epoch,
            batch_size=made_from["batch_size"],
            world_size=made_from["world_size"],
            window=made_from["window"],
            noise=made_from["noise"],
        )


def bucketed_order(
    lengths: F64, *, seed: int, batch_size: int, world_size: int, window: int, noise: float = 0.0
) -> I64:
    """The global order of an epoch of `LengthBuckets`.

    Args:
        lengths: float64 (n,).
        seed: Of torch's generator.
        batch_size, world_size: Each run of batch_size x world_size of the order is a batch for every rank.
        window, noise: See `LengthBuckets`.

    Returns:
        int64 (n,): a permutation.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    order: I64 = torch.randperm(len(lengths), generator=generator).numpy()
    step = batch_size * world_size
    steps = len(order) // step
    if not steps:
        return order
    whole = order[: steps * step]
    # No logarithm or exponential is in it: those may differ in the last bit between two machines.
    blur = 1 + noise * (2 * torch.rand(len(whole), generator=generator, dtype=torch.float64).numpy() - 1)
    keys = lengths[whole] * blur
    # Windows of nearly equal size, rather than a last one that may be too small to sort anything.
    windows = max(1, min(steps, round(steps / window)))
    for first, last in _cuts(steps, windows):
        rows = slice(first * step, last * step)
        whole[rows] = whole[rows][keys[rows].argsort(kind="stable")]
    batches = whole.reshape(steps, world_size, batch_size)
    # Which rank gets the shortest of a step's batches changes from step to step.
    ranks = torch.rand((steps, world_size, 1), generator=generator).numpy().argsort(axis=1, kind="stable")
    batches = np.take_along_axis(batches, ranks, axis=1)
    # In a batch the rows are shuffled, too: a resume with other batches cuts these ones up.
    places = torch.rand(batches.shape, generator=generator).numpy().argsort(axis=2, kind="stable")
    batches = np.take_along_axis(batches, places, axis=2)
    shuffled = batches[torch.randperm(steps, generator=generator).numpy()]
    whole[:] = shuffled.transpose(0, 2, 1).reshape(-1)  # dealing takes every world_size th
    return order


def _cuts(steps: int, windows: int) -> list[tuple[int, int]]:
    """The first and last + 1 step of each window.

    >>> _cuts(7, 3)
    [(0, 2), (2, 4), (4, 7)]
    """
    bounds = [steps * number // windows for number in range(windows + 1)]
    return list(itertools.pairwise(bounds))
