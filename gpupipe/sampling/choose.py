"""From what a Loader was given to the `Ordering` that it uses."""

from __future__ import annotations

from gpupipe.errors import ConfigError
from gpupipe.sampling.cost import CostAware, CostOrdering, Records
from gpupipe.sampling.handed_in import HandedOrdering
from gpupipe.sampling.length import LengthBuckets, LengthOrdering
from gpupipe.sampling.orders import Ordering
from gpupipe.sampling.rank import Ranks
from gpupipe.sampling.repeated import Repeated, RepeatedOrdering
from gpupipe.sampling.samplers import DefaultOrdering, Sharding, Weighted, WeightedOrdering
from gpupipe.sampling.shard_order import ShardOrdering, shard_starts_of


def choose_ordering(
    sampler: object,
    source: Records,
    *,
    shuffle: bool,
    seed: int,
    sharding: Sharding,
    ranks: Ranks,
    batch_size: int,
) -> Ordering:
    """Settle what orders the epochs.

    Args:
        sampler: `Weighted`, `Repeated`, `CostAware`, `LengthBuckets`, indices, an iterable of indices, or None for the
            default order.
        source: The data set.
        shuffle, seed: As in `Loader`.
        sharding: Whose order a sampler yields ("rank" needs one that was handed in), or whether shards are read one
            after another.
        ranks: This process.
        batch_size: On each rank.

    Raises:
        ConfigError: Arguments that exclude each other, or a sampler that cannot work.
    """
    handed_in = sampler is not None and not isinstance(sampler, Weighted | Repeated | CostAware | LengthBuckets)
    if sampler is not None and shuffle:
        raise ConfigError(
            f"shuffle=True and sampler={type(sampler).__name__} exclude each other, because the sampler decides the "
            "order: leave shuffle out",
            field="shuffle",
            value=True,
            allowed=False,
        )
    scope, shards = sharding.sampler_scope, sharding.shard_order
    if sampler is not None and shards is not None:
        raise ConfigError(
            f"sharding.order='shards' and sampler={type(sampler).__name__} exclude each other, because the sampler "
            "decides the order: leave one of them out",
            field="sharding.order",
            value=sharding.order,
            allowed="global",
        )
    if scope == "rank" and not handed_in:
        raise ConfigError(
            "sharding.sampler_scope='rank' says that sampler= yields this rank's own part, but "
            + ("there is no sampler" if sampler is None else f"{type(sampler).__name__} orders the whole epoch")
            + ": leave it out",
            field="sharding.sampler_scope",
            value=scope,
            allowed="global",
        )
    if shards is not None:
        starts = shard_starts_of(source)
        return ShardOrdering(shards, starts, shuffle=shuffle, seed=seed, world_size=ranks.world_size)
    if sampler is None:
        return DefaultOrdering(len(source), shuffle=shuffle, seed=seed)
    if isinstance(sampler, Weighted):
        return WeightedOrdering(sampler, len(source), seed=seed)
    if isinstance(sampler, Repeated):
        return RepeatedOrdering(sampler, len(source), seed=seed)
    if isinstance(sampler, CostAware):
        return CostOrdering(sampler, source, seed=seed, batch_size=batch_size, world_size=ranks.world_size)
    if isinstance(sampler, LengthBuckets):
        return LengthOrdering(sampler, len(source), seed=seed, batch_size=batch_size, world_size=ranks.world_size)
    return HandedOrdering(sampler, len(source), scope=scope, ranks=ranks)
