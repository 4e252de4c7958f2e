"""The order of an epoch in which tar shards are read one after another: see `samplers.ShardOrder`."""

from __future__ import annotations

from collections.abc import Callable, Sized

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError, SourceError
from gpupipe.rng import Op, stream
from gpupipe.sampling.orders import I64, ArrayOrder, Definition, EpochOrder, digest
from gpupipe.sampling.rank import Ranks
from gpupipe.sampling.samplers import SeededOrdering, ShardOrder, agree_on

U64 = npt.NDArray[np.uint64]

# Lanes are worked on in blocks of about this many samples, to bound the memory beside the order itself.
BLOCK_ROWS = 1 << 20


class ShardOrdering(SeededOrdering):
    """The orders of a `ShardOrder`.

    Args:
        config: Checked already.
        shard_starts: int64 (shards + 1,), as `shard_starts_of` returns it.
        shuffle: As in `Loader`.
        seed: For the permutation of the shards and the shuffling in windows.
        world_size: Of the processes that share the lanes.

    Raises:
        ConfigError: They cannot share them evenly.
    """

    def __init__(self, config: ShardOrder, shard_starts: I64, *, shuffle: bool, seed: int, world_size: int) -> None:
        _check_world(config.lanes, world_size)
        self._config, self._starts, self._shuffle, self._seed = config, shard_starts, shuffle, seed
        super().__init__(
            {
                "kind": "shards",
                "shuffle": shuffle,
                "lanes": config.lanes,
                "window": config.window,
                "shards": digest(shard_starts),
            }
        )

    def length(self, epoch: int) -> int:
        """See `Ordering.length`."""
        del epoch
        return int(self._starts[-1])

    def draw(self, epoch: int) -> LaneOrder:
        """See `Ordering.draw`."""
        if self._shuffle:
            order = shuffled_lanes(self._starts, self._config, seed=self._seed, epoch=epoch)
        else:
            order = lanes_in_turn(np.arange(self._starts[-1]), self._config.lanes)
        return LaneOrder(order, self._made_from, lanes=self._config.lanes, shard_starts=self._starts)

    def agree(self, held: Callable[[], EpochOrder], ranks: Ranks) -> EpochOrder:
        """See `Ordering.agree`: compared, because each machine may have found other shards."""
        return agree_on("the shards of the source, or the seed, and the order made from them", held, ranks)


class LaneOrder(ArrayOrder):
    """An order that takes one sample from each lane in turn.

    Args:
        indices: int64 (n,): a permutation of the data set, of which position p belongs to lane ``p % lanes``.
        made_from: Its definition.
        lanes: How many.
        shard_starts: int64 (shards + 1,).
    """

    def __init__(self, indices: I64, made_from: Definition, *, lanes: int, shard_starts: I64) -> None:
        super().__init__(indices, length=len(indices), made_from=made_from)
        self._turn, self._starts = min(lanes, len(indices)), shard_starts

    def at(self, positions: I64) -> tuple[I64, I64]:
        """See `EpochOrder.at`; but behind the end, the end of each lane comes again.

        The samples there were the last to be read, while those at the beginning may be far away again.
        """
        assert self.indices is not None
        times = np.maximum((positions - self._length) // self._turn + 1, 0)
        return self.indices[positions - times * self._turn], times

    @property
    def hash(self) -> str:
        """Of the indices in their order, and of the shards, which substitutes are taken from."""
        return digest(np.frombuffer(f"{super().hash} {digest(self._starts)}".encode(), np.uint8))

    def candidates(self, index: int) -> range:
        """See `EpochOrder.candidates`: every sample of the same shard, which is being read anyway, if it has others."""
        shard = int(np.searchsorted(self._starts, index, side="right")) - 1
        first, end = self._starts[shard : shard + 2].tolist()
        return range(first, end) if end - first > 1 else range(self._length)


def shard_starts_of(source: Sized) -> I64:
    """Where each shard of a source begins.

    Args:
        source: A source, which has `shard_starts` if it is made of shards.

    Returns:
        int64 (shards + 1,), from 0 to the number of samples. Shards may be empty.

    Raises:
        ConfigError: It is not made of shards.
        SourceError: What it has cannot be that.
    """
    found = getattr(source, "shard_starts", None)
    uri = str(getattr(source, "uri", type(source).__name__))
    if found is None:
        raise ConfigError(
            f"sharding.order='shards' reads tar shards one after another, but {uri} is not made of shards (it has no "
            "shard_starts): pack it into some (gpupipe pack SRC DST --format tar) and open those, or leave out order=",
            field="sharding.order",
            value="shards",
            allowed="global",
        )
    starts = np.asarray(found)
    samples = len(source)
    whole = starts.ndim == 1 and len(starts) > 1 and starts.dtype.kind in "iu"
    if not whole or starts[0] != 0 or starts[-1] != samples or (np.diff(starts.astype(np.int64)) < 0).any():
        raise SourceError(
            f"{uri} has shard_starts of {starts.dtype} and shape {starts.shape} that do not go from 0 up to its "
            f"{samples} samples: it must be an array of integers (shards + 1,), the first record of each shard and the "
            "number of records",
            uri=uri,
        )
    return starts.astype(np.int64)


def shuffled_lanes(shard_starts: I64, config: ShardOrder, *, seed: int, epoch: int) -> I64:
    """The global order of a shuffled epoch: the same on every machine, at any world size.

    Args:
        shard_starts: int64 (shards + 1,).
        config: Lanes and window.
        seed, epoch: In [0, 2**63).

    Returns:
        int64 (n,): a permutation; position p belongs to lane ``p % config.lanes``.
    """
    begins, sizes = shard_starts[:-1], np.diff(shard_starts)
    turn = stream(Op.SHARDS, seed=seed, epoch=epoch, number=0).random_raw(len(begins)).argsort(kind="stable")
    begins, bounds = begins[turn], np.append(0, np.cumsum(sizes[turn]))
    samples = int(shard_starts[-1])
    found = np.empty(samples, np.int64)
    first = 0
    for lane in range(min(config.lanes, samples)):
        rows = found[lane :: config.lanes]
        words = stream(Op.WINDOWS, seed=seed, epoch=epoch, number=lane)
        cuts = _cuts(len(rows), config.window, int(words.random_raw()))
        for start, stop, window in cuts:
            block = _stretch(begins, bounds, first + start, first + stop)
            rows[start:stop] = _shuffled(block.reshape(-1, window), words.random_raw(stop - start)).ravel()
        first += len(rows)
    return found


def lanes_in_turn(sequence: I64, lanes: int) -> I64:
    """A sequence cut into equal lanes, of which one element each is taken in turn.

    >>> lanes_in_turn(np.arange(7), 3).tolist()
    [0, 3, 5, 1, 4, 6, 2]
    """
    found = np.empty_like(sequence)
    first = 0
    for lane in range(min(lanes, len(sequence))):
        rows = found[lane::lanes]
        rows[:] = sequence[first : first + len(rows)]
        first += len(rows)
    return found


def _cuts(rows: int, window: int, word: int) -> list[tuple[int, int, int]]:
    """How a lane falls into windows: (start, stop, window) of blocks that hold whole windows.

    Where the first one ends differs from epoch to epoch: else shards of equal size, which windows divide, would have
    the same samples in one window every time.

    Args:
        rows: In the lane.
        window: Samples in a window.
        word: A random one.
    """
    if window >= rows:
        return [(0, rows, rows)]
    done = word % window
    found = [(0, done, done)] if done else []
    step = max(1, BLOCK_ROWS // window) * window
    while rows - done >= window:
        stop = done + min(step, (rows - done) // window * window)
        found.append((done, stop, window))
        done = stop
    if done < rows:
        found.append((done, rows, rows - done))
    return found


def _stretch(begins: I64, bounds: I64, first: int, last: int) -> I64:
    """Samples `first` to `last` - 1 of the shards one after another; int64 (last - first,).

    Args:
        begins: int64 (shards,): the first sample of each, in that sequence.
        bounds: int64 (shards + 1,): how many samples come before each, and in all.
        first, last: At least one sample.
    """
    low, high = np.searchsorted(bounds, first, side="right") - 1, np.searchsorted(bounds, last, side="left")
    edges = bounds[low : high + 1].clip(first, last)
    return np.arange(first, last) + np.repeat(begins[low:high] - bounds[low:high], edges[1:] - edges[:-1])


def _shuffled(windows: I64, words: U64) -> I64:
    """Each window in the order of its random words, the position deciding between equal ones.

    The position is put into the lowest bits of the word, so that no two are equal and any sort gives the same; sorting
    positions by words takes twice as long.

    Args:
        windows: int64 (windows, samples).
        words: uint64 (windows x samples,), which is overwritten.
    """
    bits = np.uint64((windows.shape[1] - 1).bit_length())
    keys = words.reshape(windows.shape)
    keys >>= bits
    keys <<= bits
    keys |= np.arange(windows.shape[1], dtype=np.uint64)
    keys.sort(axis=1)
    keys &= (np.uint64(1) << bits) - np.uint64(1)
    return np.take_along_axis(windows, keys.view(np.int64), axis=1)


def _check_world(lanes: int, world_size: int) -> None:
    if lanes % world_size:
        can = [size for size in range(1, lanes + 1) if lanes % size == 0]
        more = -(-lanes // world_size) * world_size
        raise ConfigError(
            f"sharding.order: {world_size} processes cannot share {lanes} lanes evenly; {', '.join(map(str, can))} "
            f"can. Use one of those, or ShardOrder(lanes={more})",
            field="sharding.order.lanes",
            value=lanes,
            allowed=f"a multiple of the world size, {world_size}",
        )
