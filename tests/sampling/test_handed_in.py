from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from gpupipe.errors import ConfigError, StateError
from gpupipe.sampling.handed_in import HandedOrdering
from gpupipe.sampling.rank import Ranks
from gpupipe.sampling.samplers import RankRows
from tests.samplers import EpochSampler, ForgetfulSampler, RASampler, StatefulSampler

ALONE = Ranks(0, 1, 0, "test")


def handed(sampler, samples=20, scope="global", ranks=ALONE):
    return HandedOrdering(sampler, samples, scope=scope, ranks=ranks)


def indices_of(order):
    return order.at(np.arange(order.length))[0].tolist()


def generator(seed=7):
    return torch.Generator().manual_seed(seed)


@given(st.lists(st.integers(0, 19), min_size=1, max_size=50))
def test_sequence_of_any_kind_is_the_order_of_every_epoch(values):
    for given_as in (values, tuple(values), np.array(values), np.array(values, np.uint8), torch.tensor(values)):
        ordering = handed(given_as)
        assert ordering.length(0) == len(values)
        assert indices_of(ordering.draw(0)) == indices_of(ordering.draw(5)) == values
    assert indices_of(handed(range(20)).draw(0)) == list(range(20))


def test_sequence_changed_afterwards_changes_nothing():
    values = [3, 1, 2]
    ordering = handed(values)
    values[0] = 9
    assert indices_of(ordering.draw(0)) == [3, 1, 2]


TORCH_SAMPLERS = {
    "sequential": lambda: SequentialSampler(range(20)),
    "random": lambda: RandomSampler(range(20), generator=generator()),
    "random with replacement": lambda: RandomSampler(range(20), True, 37, generator=generator()),
    "subset": lambda: SubsetRandomSampler([3, 5, 7, 11, 13], generator=generator()),
    "weighted": lambda: WeightedRandomSampler([1.0, 2.0, 3.0], 30, generator=generator()),
    "distributed": lambda: DistributedSampler(range(20), num_replicas=1, rank=0, seed=3),
}


@pytest.mark.parametrize("make", TORCH_SAMPLERS.values(), ids=TORCH_SAMPLERS.keys())
def test_sampler_of_torch_gives_its_own_order_over_three_epochs(make):
    ordering, oracle = handed(make()), make()
    for epoch in range(3):
        if hasattr(oracle, "set_epoch"):
            oracle.set_epoch(epoch)
        order = ordering.draw(epoch)
        assert ordering.length(epoch) == order.length == len(oracle)
        assert indices_of(order) == list(oracle)


@pytest.mark.parametrize("make", [*TORCH_SAMPLERS.values(), lambda: EpochSampler(20), lambda: StatefulSampler(20)])
@pytest.mark.parametrize("begun", [False, True])
def test_sampler_restored_gives_the_same_orders_again(make, begun):
    ordering = handed(make())
    ordering.draw(0)
    saved = ordering.definition()
    second = ordering.draw(1)
    third = ordering.draw(2)
    if begun:
        saved = second.definition()
    fresh = handed(make())
    found = fresh.restore(saved, 1, begun=begun)
    assert (found is not None) == begun
    assert indices_of(found or fresh.draw(1)) == indices_of(second)
    assert indices_of(fresh.draw(2)) == indices_of(third)


@pytest.mark.parametrize("make", [lambda: ForgetfulSampler(20), lambda: RandomSampler(range(20))])
def test_sampler_that_cannot_repeat_itself_is_refused_within_an_epoch(make):
    ordering = handed(make())
    ordering.draw(0)
    saved = ordering.draw(1)
    with pytest.raises(StateError, match="set_epoch"):
        handed(make()).restore(saved.definition(), 1, begun=True)
    assert handed(make()).restore(ordering.definition(), 2, begun=False) is None


def test_sampler_without_the_generator_of_the_saved_run_is_refused():
    saved = handed(RandomSampler(range(20), generator=generator())).draw(0).definition()
    with pytest.raises(StateError, match="generator"):
        handed(RandomSampler(range(20))).restore(saved, 0, begun=True)


def test_other_indices_than_those_of_the_saved_run_are_refused():
    saved = handed([1, 2, 3]).definition()
    with pytest.raises(StateError, match="order was"):
        handed([1, 2, 4]).restore(saved, 0, begun=False)
    with pytest.raises(StateError, match="kind was 'indices' and is 'sampler'"):
        handed(SequentialSampler(range(3))).restore(saved, 0, begun=False)


@given(world_size=st.integers(1, 4), length=st.integers(4, 30), epoch=st.integers(0, 3))
def test_distributed_sampler_with_scope_rank_gives_each_rank_its_own(world_size, length, epoch):
    seen = set()
    for rank in range(world_size):
        ranks = Ranks(rank, world_size, rank, "test")
        sampler = DistributedSampler(range(length), num_replicas=world_size, rank=rank, seed=3)
        ordering = handed(sampler, length, "rank", ranks)
        order = ordering.agree(partial(ordering.draw, epoch), ranks)
        oracle = DistributedSampler(range(length), num_replicas=world_size, rank=rank, seed=3)
        oracle.set_epoch(epoch)
        assert ordering.length(epoch) == order.length
        rows = RankRows.deal(order.length, start=0, rank=rank, world_size=world_size, pad="repeat", batch_size=2)
        indices, occurrences = order.at(rows.positions(0, rows.count))
        assert indices.tolist() == list(oracle)
        pairs = set(zip(indices.tolist(), occurrences.tolist(), strict=True))
        assert not pairs & seen  # padding is the same sample on another rank, but not the same crop
        seen |= pairs


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_repeats_of_ra_sampler_have_different_occurrences_over_all_ranks(world_size):
    seen = []
    for rank in range(world_size):
        ranks = Ranks(rank, world_size, rank, "test")
        ordering = handed(RASampler(range(60), world_size, rank, round_to=4), 60, "rank", ranks)
        order = ordering.agree(partial(ordering.draw, 2), ranks)
        positions = np.arange(rank, order.length, world_size)
        indices, occurrences = order.at(positions)
        oracle = RASampler(range(60), world_size, rank, round_to=4)
        oracle.set_epoch(2)
        assert indices.tolist() == list(oracle)
        seen += zip(indices.tolist(), occurrences.tolist(), strict=True)
    assert len(set(seen)) == len(seen)
    assert len({index for index, _ in seen}) < len(seen) / 2


def test_scope_rank_in_mid_epoch_needs_the_same_world_size():
    def of(world_size):
        ranks = Ranks(0, world_size, 0, "test")
        return handed(DistributedSampler(range(20), num_replicas=world_size, rank=0), 20, "rank", ranks)

    saved = of(2).draw(0).definition()
    with pytest.raises(StateError, match="epoch of 2 processes"):
        of(4).restore(saved, 0, begun=True)
    assert of(4).restore(saved, 0, begun=False) is None
    again = of(2)
    order = again.agree(lambda: again.restore(saved, 0, begun=True), Ranks(0, 2, 0, "test"))
    assert order.definition() == saved


def test_scope_rank_with_another_order_than_saved_is_refused_by_agree():
    ranks = Ranks(0, 2, 0, "test")
    ordering = handed(ForgetfulSampler(20), 20, "rank", ranks)
    saved = ordering.draw(0).definition()
    order = ordering.restore(saved, 0, begun=True)
    with pytest.raises(StateError, match="does not yield again"):
        ordering.agree(lambda: order, ranks)
    order = ordering.restore(saved | {"counted": "global"}, 0, begun=True)
    with pytest.raises(StateError, match=r"with torch\.distributed"):
        ordering.agree(lambda: order, ranks)


def test_generators_with_scope_rank_are_each_ranks_own():
    def of(rank):
        return handed(RandomSampler(range(20), generator=generator(rank)), 20, "rank", Ranks(rank, 2, rank, "test"))

    saved = of(0).draw(0).definition()
    with pytest.raises(StateError, match="sampler of rank 0, and this is rank 1"):
        of(1).restore(saved, 0, begun=True)
    of(0).restore(saved, 0, begun=True)


class Lying:
    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(4))


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (7, "cannot be iterated over"),
        (iter([1, 2]), "spent after one epoch"),
        ((i for i in range(3)), "spent after one epoch"),
        ([], "no indices"),
        ([0, 20], "index 20, but the data set has 20"),
        ([0, -1], "index -1"),
        ([0.5, 1.0], "integers, not float64"),
        ([[0, 1]], r"shape \(1, 2\)"),
        ("abc", "integers"),
        ([True, False], "integers, not bool"),
        (torch.rand(3), "integers, not float32"),
    ],
)
def test_sequence_that_is_no_order_raises(sampler, why):
    with pytest.raises(ConfigError, match=why) as raised:
        handed(sampler)
    assert raised.value.field == "sampler"


@pytest.mark.parametrize(
    ("sampler", "why"),
    [
        (BatchSampler(SequentialSampler(range(20)), 4, drop_last=False), "sampler of batches"),
        (SequentialSampler(range(21)), "index 20, but the data set has 20"),
        (Lying(), r"yielded 4 indices, but its len\(\) is 5"),
        ({0.5}, "one integer at a time"),
        (RASampler(range(20), 1, 0), "RASampler rounds down"),
        ({2**70}, "beyond"),
    ],
)
def test_sampler_that_yields_no_order_raises(sampler, why):
    with pytest.raises(ConfigError, match=why):
        handed(sampler).draw(0)


def test_sampler_is_asked_once_an_epoch_and_not_before():
    sampler = StatefulSampler(20)
    ordering = handed(sampler)
    ordering.definition()
    assert sampler.round == 0
    assert ordering.length(0) is None
    ordering.draw(0)
    assert sampler.round == 1


def test_sampler_of_one_rank_is_not_taken_for_the_order_of_all():
    sampler = DistributedSampler(range(20), num_replicas=2, rank=1)
    with pytest.raises(ConfigError, match="sampler_scope='rank'"):
        handed(sampler, ranks=Ranks(1, 2, 1, "test"))
    with pytest.raises(ConfigError, match=r"part of rank 1 of 2, but this is rank 0 of 2 \(from test\)"):
        handed(sampler, scope="rank", ranks=Ranks(0, 2, 0, "test"))
    handed(sampler, scope="rank", ranks=Ranks(1, 2, 1, "test"))
    handed(DistributedSampler(range(20), num_replicas=1, rank=0), ranks=Ranks(1, 2, 1, "test"))
