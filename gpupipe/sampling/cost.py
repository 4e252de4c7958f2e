"""Batches of nearly equal cost: the same samples in an epoch, put together so that no batch is all large images.

A batch takes as long as its bytes (reading), pixels (decoding) or whatever else one image costs, and all ranks wait
for the slowest.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal, Protocol, cast

import numpy as np
import numpy.typing as npt

from gpupipe.checks import check_integer
from gpupipe.errors import ConfigError, RecordError
from gpupipe.headers import scan_record
from gpupipe.records import Record
from gpupipe.sampling.batched import BatchedOrdering
from gpupipe.sampling.orders import I64, Definition, digest
from gpupipe.sampling.samplers import check_one_each, numbers

F64 = npt.NDArray[np.float64]
Cost = Literal["bytes", "pixels"]


class Records(Protocol):
    """What is needed of a data set here."""

    def __len__(self) -> int:
        """How many records there are."""

    def __getitem__(self, index: int) -> Record:
        """One of them."""


# Costs are multiplied by a number from 1 - BLUR to 1 + BLUR when samples are sorted by them. Sorted exactly, the same
# two samples can meet in every epoch; blurred, no more often than in plain shuffling (benchmarks/bench_cost.py), and
# the batches, which sum the exact costs, stay as equal. No logarithm or exponential is in it: those may differ in the
# last bit between two machines, and the order must not.
BLUR = 0.75
# Reading waits for disks and networks, so there are more of these than cores.
READERS = 8
INDICES_A_TASK = 64
# Windows are worked on in blocks of about this many samples, to bound the memory beside the order itself.
BLOCK_ROWS = 1 << 20


@dataclass(frozen=True, slots=True, eq=False)
class CostAware:
    """Shuffle so that each batch's cost is near the mean: hand it to a Loader as ``sampler=``.

    The epoch begins from the same permutation as ``shuffle=True``. Windows of it, of `window` batches each, keep their
    samples, and share them out among their batches: roughly the largest first, each to the batch that has least so
    far. So every epoch holds every sample once, batches are of the same size, and the order is the same on every rank.
    Two samples meet in a batch as often as in plain shuffling, give or take a tenth; only the largest percent of them
    meet each other less, as they must (0.3 times as often on log-normal sizes: benchmarks/bench_cost.py).

    The order depends on batch_size and world_size. A state from the middle of an epoch brings the old ones along,
    until that epoch is over.

    Args:
        cost: "bytes" or "pixels" of each image, for which every record is read once when the Loader is made, unless
            the source knows them (tar shards and packs do); or numbers (n,), one for each sample, not negative:
            `measure_costs` makes such an array, to be kept in a file.
        window: Batches among which samples are exchanged. More make the batches more equal; fewer stay closer to
            plain shuffling.

    Source:
        Graham, "Bounds on multiprocessing timing anomalies", 1969: longest processing time first.
    """

    cost: Cost | npt.ArrayLike = "bytes"
    window: int = 32

    def __post_init__(self) -> None:
        if isinstance(self.cost, str):
            if self.cost not in ("bytes", "pixels"):
                raise ConfigError(
                    f"cost={self.cost!r} is not valid: it must be 'bytes', 'pixels' or one number for each sample",
                    field="cost",
                    value=self.cost,
                    allowed=("bytes", "pixels", "numbers >= 0"),
                )
        else:
            object.__setattr__(self, "cost", numbers("cost", self.cost))
        object.__setattr__(self, "window", check_integer("window", self.window, 1))


class CostOrdering(BatchedOrdering):
    """The orders of a `CostAware`.

    Args:
        config: Checked already.
        source: The data set, whose records are read if the cost is not given.
        seed: seed + epoch is what torch's generator gets.
        batch_size, world_size: Of what batches, and how many of them at a time.
    """

    def __init__(self, config: CostAware, source: Records, *, seed: int, batch_size: int, world_size: int) -> None:
        cost = config.cost
        if isinstance(cost, str):
            cost = measure_costs(source, cast("Cost", cost))
        self._costs = np.asarray(cost, np.float64)
        check_one_each("cost", len(self._costs), len(source))
        self._seed = seed
        super().__init__(
            {
                "kind": "cost",
                "costs": digest(self._costs),
                "window": config.window,
                "batch_size": batch_size,
                "world_size": world_size,
            },
            samples=len(self._costs),
            what="costs",
        )

    def order(self, epoch: int, made_from: Definition) -> I64:
        """See `BatchedOrdering.order`."""
        return balanced_order(
            self._costs,
            seed=self._seed + epoch,
            batch_size=made_from["batch_size"],
            world_size=made_from["world_size"],
            window=made_from["window"],
        )


def balanced_order(costs: F64, *, seed: int, batch_size: int, world_size: int, window: int) -> I64:
    """The global order of an epoch of `CostAware`.

    Args:
        costs: float64 (n,).
        seed: Of torch's generator.
        batch_size, world_size: Each run of batch_size x world_size of the order is a batch for every rank.
        window: See `CostAware`.

    Returns:
        int64 (n,): a permutation. What does not fill a batch on every rank stands at its end, as plain shuffling
        left it.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    order: I64 = torch.randperm(len(costs), generator=generator).numpy()
    batches = len(order) // (batch_size * world_size) * world_size
    if not batches:
        return order
    # Windows of nearly equal size, rather than a last one that may be too small to balance anything.
    windows = max(1, round(batches / window))
    small, larger = divmod(batches, windows)
    first = 0
    for count, size in ((larger, small + 1), (windows - larger, small)):
        step = max(1, BLOCK_ROWS // (size * batch_size))
        for done in range(0, count, step):
            rows = min(step, count - done) * size * batch_size
            block = order[first : first + rows].reshape(-1, size, batch_size)
            blur = 1 + BLUR * (2 * torch.rand(block.shape, generator=generator, dtype=torch.float64).numpy() - 1)
            shared = _share_out(block, costs, blur.reshape(len(block), -1))
            # In a batch the rows are shuffled, too: a resume with other batches cuts these ones up.
            keys = torch.rand(block.shape, generator=generator).numpy()
            block[:] = np.take_along_axis(shared, keys.argsort(axis=2, kind="stable"), axis=2)
            first += rows
    whole = order[:first].reshape(-1, world_size, batch_size)
    whole[:] = whole.transpose(0, 2, 1).reshape(whole.shape)  # dealing takes every world_size th
    return order


def _share_out(block: I64, costs: F64, blur: F64) -> I64:
    """The samples of each window, shared out among its batches; (windows, batches, rows).

    In rounds that vectorise over windows: each round gives every batch one sample, the largest of them to the batch
    that has least. Which samples a round has depends on their blurred costs.

    Args:
        block: int64 (windows, batches, rows).
        costs: float64 (n,), of the whole data set.
        blur: float64 (windows, batches x rows): a factor for each cost.
    """
    windows, batches, rows = block.shape
    samples = block.reshape(windows, -1)
    by_cost = (-costs[samples] * blur).argsort(axis=1, kind="stable")
    rounds = np.take_along_axis(samples, by_cost, axis=1).reshape(windows, rows, batches)
    in_round = (-costs[rounds]).argsort(axis=2, kind="stable")
    rounds = np.take_along_axis(rounds, in_round, axis=2)
    out = np.empty((windows, rows, batches), np.int64)
    sums = np.zeros((windows, batches))
    for number in range(rows):
        least_first = sums.argsort(axis=1, kind="stable")
        np.put_along_axis(out[:, number], least_first, rounds[:, number], axis=1)
        sums += costs[out[:, number]]
    return out.transpose(0, 2, 1)


def measure_costs(source: Records, what: Cost) -> F64:
    """What each image of a data set costs, for `CostAware`.

    Reads every record once, several at a time; a source that has ``sizes_bytes`` (n,), or ``shapes_px`` (n, 2), is
    asked for these instead.

    Args:
        source: The data set.
        what: "bytes" of the file, or "pixels" of the image (height x width), by its header.

    Returns:
        float64 (n,). A record that cannot be read costs 0: whoever loads it will be told.
    """
    known = getattr(source, "sizes_bytes" if what == "bytes" else "shapes_px", None)
    if known is not None:
        costs = np.array(known, np.float64)
        return costs if what == "bytes" else costs.prod(axis=1)

    def measure(first: int) -> list[float]:
        return [_cost(source, index, what) for index in range(first, min(first + INDICES_A_TASK, len(source)))]

    with ThreadPoolExecutor(READERS, thread_name_prefix="gpupipe-measure") as pool:
        found = [cost for some in pool.map(measure, range(0, len(source), INDICES_A_TASK)) for cost in some]
    return np.array(found, np.float64)


def _cost(source: Records, index: int, what: Cost) -> float:
    try:
        record = source[index]
        if what == "bytes":
            return record.size_bytes
        header = scan_record(record)
    except RecordError:
        return 0.0
    return header.height * header.width
