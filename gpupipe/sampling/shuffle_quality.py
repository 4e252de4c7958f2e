"""How well an order is shuffled, in figures, next to shuffling the whole data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError
from gpupipe.sampling.orders import I64


@dataclass(frozen=True, kw_only=True, slots=True)
class ShuffleQuality:
    """Figures of one epoch's order.

    Attributes:
        neighbour_distance: How far apart samples that are neighbours in storage come in the epoch, on average, over
            the distance after shuffling the whole data set: 1 is as good as that, and 0 is no shuffling. It hardly
            depends on how the samples were packed, and does not say whether they need shuffling.
        largest_share: The share of a batch that is from one shard, that of which it has most; the mean over batches.
        same_shard: How often two samples in a batch are from one shard, over how often they are after shuffling the
            whole data set: 1 is as good as that. None where no shard has two samples.
        same_label: The same for their labels: what the gradient of a batch notices. None without labels, or where no
            two are equal.
    """

    neighbour_distance: float
    largest_share: float
    same_shard: float | None
    same_label: float | None


def shuffle_quality(
    order: npt.ArrayLike, shard_starts: npt.ArrayLike, *, batch_size: int, labels: npt.ArrayLike | None = None
) -> ShuffleQuality:
    """Measure an order, in order to choose the window and lanes of a `gpupipe.ShardOrder`.

    >>> import numpy as np
    >>> sequential = shuffle_quality(np.arange(1000), np.arange(0, 1001, 100), batch_size=50)
    >>> round(sequential.neighbour_distance, 3), sequential.largest_share, round(sequential.same_shard, 1)
    (0.003, 1.0, 10.1)

    Args:
        order: integers (n,): the indices of an epoch, each at most once: ``list(loader.sampler)`` of a Loader with one
            process; with several, of one rank.
        shard_starts: int64 (shards + 1,): `Source.shard_starts`.
        batch_size: Samples in a batch; what is left over at the end is not looked at.
        labels: (samples,), one for each sample of the data set: `Source.labels`.

    Returns:
        The figures; random ones scatter, by about 1 / sqrt(n) where they are near 1.

    Raises:
        ConfigError: Indices that come twice or do not exist, fewer than one batch of two, or labels that are not one
            for each sample.
    """
    starts = np.asarray(shard_starts, np.int64)
    indices = np.asarray(order, np.int64)
    position = _positions(indices, int(starts[-1]))
    size = int(batch_size)
    if size < 2 or len(indices) < size:
        raise ConfigError(
            f"batch_size={batch_size!r} for {len(indices)} indices is not valid: two samples in a batch are compared, "
            "so it must be from 2 to the number of indices",
            field="batch_size",
            value=batch_size,
            allowed="2 <= batch_size <= len(order)",
        )
    both = (position[1:] >= 0) & (position[:-1] >= 0)
    apart = np.abs(np.diff(position))[both]
    batches = indices[: len(indices) // size * size].reshape(-1, size)
    shards = np.searchsorted(starts, indices, side="right") - 1
    in_batches = shards[: batches.size].reshape(batches.shape)
    return ShuffleQuality(
        neighbour_distance=float(apart.mean() / ((len(indices) + 1) / 3)) if apart.size else 1.0,
        largest_share=_largest_share(in_batches),
        same_shard=_same(in_batches, shards),
        same_label=None if labels is None else _same_label(labels, batches, indices, len(position)),
    )


def _positions(indices: I64, samples: int) -> I64:
    """Where each sample comes in the order, int64 (samples,); -1 for those that do not."""
    if indices.ndim != 1 or (indices.size and not 0 <= indices.min() <= indices.max() < samples):
        raise _refused(f"it must be one row of indices from 0 to {samples - 1}")
    found = np.full(samples, -1, np.int64)
    found[indices] = np.arange(len(indices))
    if np.count_nonzero(found >= 0) != len(indices):
        raise _refused("some index comes twice, and then it has no one place in the epoch")
    return found


def _refused(why: str) -> ConfigError:
    return ConfigError(
        f"order is not valid: {why}. Give the indices of an epoch without its padding (Sharding(pad='drop'))",
        field="order",
        allowed="each index at most once",
    )


def _same_label(labels: npt.ArrayLike, batches: I64, indices: I64, samples: int) -> float | None:
    values = np.asarray(labels)
    if values.shape != (samples,):
        raise ConfigError(
            f"labels of shape {values.shape} for {samples} samples are not valid: give one for each; of several values "
            "for each sample choose one",
            field="labels",
            value=values.shape,
            allowed=(samples,),
        )
    _, classes = np.unique(values, return_inverse=True)
    return _same(classes[batches], classes[indices])


def _same(in_batches: npt.NDArray[Any], everywhere: npt.NDArray[Any]) -> float | None:
    """How often two of a batch are equal, over how often any two are; both numbered from 0."""
    total = np.bincount(everywhere)
    usual = (total * (total - 1.0)).sum() / (len(everywhere) * (len(everywhere) - 1.0))
    if not usual:
        return None
    _, counts = _counted(in_batches)
    size = in_batches.shape[1]
    return float((counts * (counts - 1.0)).sum() / (in_batches.size * (size - 1.0)) / usual)


def _largest_share(in_batches: npt.NDArray[Any]) -> float:
    batch, counts = _counted(in_batches)
    most = np.zeros(len(in_batches), np.int64)
    np.maximum.at(most, batch, counts)
    return float(most.mean() / in_batches.shape[1])


def _counted(in_batches: npt.NDArray[Any]) -> tuple[I64, I64]:
    """For each (batch, value) that occurs: the batch, and how often."""
    ordered = np.sort(in_batches, axis=1)
    begins = np.ones(ordered.shape, np.bool_)
    begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    places = np.flatnonzero(begins)
    return places // ordered.shape[1], np.diff(places, append=ordered.size)
