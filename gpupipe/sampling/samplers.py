"""How an epoch is ordered and dealt to ranks.

By default index for index as `torch.utils.data.DistributedSampler` does it, held as an array (or as none at all when
nothing is shuffled), so that ten million samples cost 80 MB and no Python objects.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError
from gpupipe.sampling import peers
from gpupipe.sampling.orders import I64, ArrayOrder, Definition, EpochOrder, check_same, digest
from gpupipe.sampling.rank import Ranks

Pad = Literal["repeat", "drop", "mask"]
Scope = Literal["global", "rank"]
Order = Literal["global", "shards"]

# torch.multinomial counts categories in a float32.
MAX_WEIGHTS = 1 << 24
# A lane costs about 0.1 ms an epoch, whatever is in it.
MAX_LANES = 1 << 16
MAX_WINDOW = (1 << 63) - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardOrder:
    """The order of an epoch for tar shards that are far away, or too slow for random access.

    With ``shuffle=True`` the shards are permuted, and the samples in that sequence are cut into `lanes` equal parts,
    so that a lane is a run of shards, but that the first and the last of it may be shared with the lanes beside it.
    Inside a lane, windows of `window` samples are shuffled. With ``shuffle=False`` the shards stay in storage order and
    so do their samples. The epoch takes one sample from each lane in turn, and each rank has lanes of its own, which it
    reads one window after another: at any time a rank needs the shards that lanes / world_size windows lie in.

    Lanes and windows do not depend on the world size, so an epoch can be resumed with any that divides the lanes. Every
    epoch holds every sample once, however unequal the shards are, and fewer than lanes or ranks. What pads a rank at
    the end comes from the end of its own lanes, so no shard is opened again for it. The substitute of a bad sample
    (`gpupipe.OnError`) is of the same shard, and for one that is alone in its shard any other sample. Where
    torch.distributed runs, the ranks compare shards and order at each epoch's beginning, so all must call `iter()`.

    The defaults suit up to 16 processes, and shards of about a thousand images. On a data set like ImageNet, 86 of its
    1,281 shards are then in use at a time over all ranks, and what lies side by side in a shard comes 0.05 times as far
    apart as after shuffling the whole data set. More lanes and larger windows mix better and keep more in use;
    benchmarks/bench_shard_order.py has a table of both, and `gpupipe.shuffle_quality` measures any order. What it takes
    depends on the packing. Where samples were shuffled before they were packed, any window gives batches with as many
    classes as the global shuffle, and a window only keeps the same samples from meeting every time. Where classes lie
    together, two samples of a batch are of one class 11 times as often as they should, and with windows of 16,384 still
    3.6 times: pack anew, shuffled.

    Args:
        lanes: How many places of the data set are read at a time, over all ranks. A multiple of the world size.
        window: Samples of a lane that are shuffled among each other; 1 leaves them as the shards have them.
    """

    lanes: int = 16
    window: int = 4096

    def __post_init__(self) -> None:
        for name, value, most in (("lanes", self.lanes, MAX_LANES), ("window", self.window, MAX_WINDOW)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise ConfigError(
                    f"sharding.order: {name}={value!r} is not valid: it must be an integer from 1 to {most}",
                    field=f"sharding.order.{name}",
                    value=value,
                    allowed=f"an integer from 1 to {most}",
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Sharding:
    """How an epoch is dealt out to processes.

    Args:
        rank, world_size: Both or neither; None asks torch.distributed, then the torchrun variables, else one process.
        pad: What happens when the samples do not divide evenly. "repeat": some come twice (DistributedSampler's
            default); "drop": the last ones are left out (its drop_last=True); "mask": for evaluation; every rank gets
            the same number of full batches, rows beyond the data set have ``valid`` False, and each sample is valid
            exactly once over all ranks.
        sampler_scope: What a sampler handed to the Loader yields. "global": the order of the whole epoch, the same on
            every rank, which is then dealt out; "rank": this rank's own part (DistributedSampler, RASampler).
        order: "global": over the whole data set, as DistributedSampler has it; "shards": tar shards one after
            another, as a `ShardOrder` says, which may be given instead.
    """

    rank: int | None = None
    world_size: int | None = None
    pad: Pad = "repeat"
    sampler_scope: Scope = "global"
    order: Order | ShardOrder = "global"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("pad", self.pad, ("repeat", "drop", "mask")),
            ("sampler_scope", self.sampler_scope, ("global", "rank")),
            ("order", "shards" if isinstance(self.order, ShardOrder) else self.order, ("global", "shards")),
        ):
            if value not in allowed:
                raise ConfigError(
                    f"sharding.{name}={value!r} is not valid: it must be one of {', '.join(map(repr, allowed))}",
                    field=f"sharding.{name}",
                    value=value,
                    allowed=allowed,
                )

    @property
    def shard_order(self) -> ShardOrder | None:
        """What `order` says of shards; None for the global order."""
        if isinstance(self.order, ShardOrder):
            return self.order
        return ShardOrder() if self.order == "shards" else None


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

    def batches(self, batch_size: int, *, drop_last: bool) -> int:
        """How many batches the rows make, the last of which may be incomplete."""
        return self.count // batch_size if drop_last else -(-self.count // batch_size)

    def positions(self, first: int, last: int) -> I64:
        """Positions in the global order of this rank's rows `first` to `last` - 1; int64 (last - first,)."""
        return self.start + self.rank + self.world_size * np.arange(first, last, dtype=np.int64)

    def delivered(self, rows: int) -> int:
        """How much of the global order is delivered once every rank has delivered `rows` rows."""
        return min(self.length, self.start + self.world_size * rows)


class SeededOrdering:
    """What the orderings share that are a function of (definition, seed, epoch): nothing to remember but those."""

    def __init__(self, made_from: Definition) -> None:
        self._made_from = made_from

    def definition(self) -> dict[str, Any]:
        """See `Ordering.definition`."""
        return dict(self._made_from)

    def agree(self, held: Callable[[], EpochOrder], ranks: Ranks) -> EpochOrder:
        """See `Ordering.agree`: as it is, because every rank made the Loader with the same arguments."""
        del ranks
        return held()

    def restore(self, saved: Definition, epoch: int, *, begun: bool) -> EpochOrder | None:
        """See `Ordering.restore`."""
        del epoch, begun
        check_same(saved, self._made_from)
        return None


class DefaultOrdering(SeededOrdering):
    """The order of `torch.utils.data.DistributedSampler`.

    Args:
        samples: In the data set.
        shuffle: A seeded permutation each epoch, or 0, 1, 2, ...
        seed: seed + epoch is what torch's generator gets, as there: seed 0 in epoch 1 equals seed 1 in epoch 0.
    """

    def __init__(self, samples: int, *, shuffle: bool, seed: int) -> None:
        super().__init__({"kind": "default", "shuffle": shuffle})
        self._samples, self._shuffle, self._seed = samples, shuffle, seed

    def length(self, epoch: int) -> int:
        """See `Ordering.length`."""
        del epoch
        return self._samples

    def draw(self, epoch: int) -> ArrayOrder:
        """See `Ordering.draw`."""
        indices = permutation(self._samples, self._seed + epoch) if self._shuffle else None
        return ArrayOrder(indices, length=self._samples, made_from=self._made_from)


def permutation(length: int, seed: int) -> I64:
    """`torch.randperm` with a generator of this seed."""
    import torch

    found: I64 = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).numpy()
    return found


@dataclass(frozen=True, slots=True, eq=False)
class Weighted:
    """Draw samples in proportion to weights: hand it to a Loader as ``sampler=``.

    The order of an epoch equals `torch.utils.data.WeightedRandomSampler` with a generator of seed + epoch; it is the
    same on all ranks and dealt out like every other. A sample that is drawn several times gets another crop each time.

    Args:
        weights: Numbers (n,), one for each sample, not negative; they need not sum to one.
        num_samples: Rows of an epoch, over all ranks; None: as many as there are weights.
        replacement: Whether a sample can come more than once in an epoch.

    Source: torch.utils.data.WeightedRandomSampler
    """

    weights: npt.ArrayLike
    num_samples: int | None = None
    replacement: bool = True

    def __post_init__(self) -> None:
        weights = numbers("weights", self.weights, MAX_WEIGHTS)
        usable = int(np.count_nonzero(weights))
        object.__setattr__(self, "weights", weights)
        if usable == 0:
            raise ConfigError("weights are all 0: at least one must be positive", field="weights", value=0)
        rows = len(weights) if self.num_samples is None else self.num_samples
        allowed = "an integer of at least 1"
        if not self.replacement:
            allowed += f" and, without replacement, at most {usable}, the number of positive weights"
        whole = isinstance(rows, int) and not isinstance(rows, bool)
        if not whole or rows < 1 or (rows > usable and not self.replacement):
            raise ConfigError(
                f"num_samples={rows!r} is not valid: it must be {allowed}",
                field="num_samples",
                value=rows,
                allowed=allowed,
            )


class WeightedOrdering(SeededOrdering):
    """The orders of a `Weighted`.

    Args:
        config: Checked already.
        samples: In the data set.
        seed: seed + epoch is what torch's generator gets.
    """

    def __init__(self, config: Weighted, samples: int, *, seed: int) -> None:
        self._weights = np.asarray(config.weights, np.float64)
        check_one_each("weights", len(self._weights), samples)
        self._rows = config.num_samples or len(self._weights)
        self._replacement, self._seed = bool(config.replacement), seed
        super().__init__(
            {
                "kind": "weighted",
                "weights": digest(self._weights),
                "num_samples": self._rows,
                "replacement": self._replacement,
            }
        )

    def length(self, epoch: int) -> int:
        """See `Ordering.length`."""
        del epoch
        return self._rows

    def draw(self, epoch: int) -> ArrayOrder:
        """See `Ordering.draw`."""
        import torch

        generator = torch.Generator().manual_seed(self._seed + epoch)
        drawn = torch.multinomial(torch.from_numpy(self._weights), self._rows, self._replacement, generator=generator)
        return ArrayOrder(drawn.numpy(), length=self._rows, made_from=self._made_from, repeats=self._replacement)

    def agree(self, held: Callable[[], EpochOrder], ranks: Ranks) -> EpochOrder:
        """See `Ordering.agree`."""
        return agree_on("the weights and the order drawn by them", held, ranks)


def agree_on(what: str, held: Callable[[], EpochOrder], ranks: Ranks) -> EpochOrder:
    """`Ordering.agree`, by comparing hashes; without torch.distributed nothing is compared.

    Args:
        what: Must be the same everywhere, for the message.
        held: See `Ordering.agree`; gives an `ArrayOrder`.
        ranks: This process.
    """
    if not peers.connected(ranks):
        return held()
    with peers.telling_of_errors(ranks):
        order = held()
        own = peers.words(cast("ArrayOrder", order).hash)
    found = peers.compare(own, ranks)
    others = np.flatnonzero((found != found[0]).any(axis=1)).tolist()
    if others:
        raise ConfigError(
            f"{what} must be the same on every rank, but rank {', '.join(map(str, others))} of {ranks.world_size} has "
            "others than rank 0. Give each rank the same values, or a sampler the same seed or generator; a sampler "
            "that yields each rank's own part needs Sharding(sampler_scope='rank')",
            field="sampler",
            value=others,
            allowed="the same on every rank",
        )
    return order


def numbers(name: str, values: npt.ArrayLike, most: int | None = None) -> npt.NDArray[np.float64]:
    """Numbers (n,) of at least 0 as a float64 copy, or ConfigError."""
    try:
        found = np.array(values, np.float64)
    except (ValueError, TypeError):
        found = np.array(np.nan)
    if found.ndim != 1 or not found.size or not np.isfinite(found).all() or found.min() < 0:
        raise ConfigError(
            f"{name} must be one row of finite numbers of at least 0, one for each sample",
            field=name,
            value=values,
            allowed="finite numbers >= 0 of shape (n,)",
        )
    if most is not None and len(found) > most:
        raise ConfigError(
            f"{len(found)} {name} are more than the {most} that torch.multinomial takes: draw the indices yourself and "
            "hand them in as sampler=",
            field=name,
            value=len(found),
            allowed=most,
        )
    return found


def check_one_each(name: str, found: int, samples: int) -> None:
    """Raise ConfigError unless there is one for each sample."""
    if found != samples:
        raise ConfigError(
            f"{name} has {found} entries for a data set of {samples} samples: give one for each",
            field=name,
            value=found,
            allowed=samples,
        )
