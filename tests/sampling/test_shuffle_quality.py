"""Figures of a shuffle, against their definitions in plain Python and against orders of which they are known."""

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpupipe as gp
from gpupipe.errors import ConfigError
from gpupipe.sampling.shard_order import shuffled_lanes


@st.composite
def cases(draw):
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=8).filter(lambda sizes: sum(sizes) >= 2))
    count = sum(sizes)
    order = draw(st.permutations(range(count)))[: draw(st.integers(2, count))]
    labels = draw(st.lists(st.integers(-3, 3), min_size=count, max_size=count))
    return sizes, order, labels, draw(st.integers(2, len(order)))


@given(cases())
def test_shuffle_quality_of_any_order_is_as_defined(case):
    sizes, order, labels, size = case
    shard_of = [shard for shard, count in enumerate(sizes) for _ in range(count)]
    found = gp.shuffle_quality(order, np.cumsum([0, *sizes]), batch_size=size, labels=labels)
    batches = [order[first : first + size] for first in range(0, len(order) - size + 1, size)]
    apart = [abs(order.index(i + 1) - order.index(i)) for i in order if i + 1 in order]
    expected = (len(order) + 1) / 3
    assert found.neighbour_distance == pytest.approx(np.mean(apart) / expected if apart else 1)
    shares = [max([shard_of[i] for i in batch].count(shard_of[j]) for j in batch) / size for batch in batches]
    assert found.largest_share == pytest.approx(np.mean(shares))
    for ours, values in ((found.same_shard, shard_of), (found.same_label, labels)):
        usual = np.mean([values[i] == values[j] for i, j in combinations(order, 2)])
        there = np.mean([values[i] == values[j] for batch in batches for i, j in combinations(batch, 2)])
        assert ours is None if usual == 0 else ours == pytest.approx(there / usual)


def test_shuffle_quality_of_a_global_shuffle_is_one():
    order = np.random.default_rng(0).permutation(100_000)
    found = gp.shuffle_quality(order, np.arange(0, 100_001, 1000), batch_size=250, labels=np.arange(100_000) // 500)
    assert found.neighbour_distance == pytest.approx(1, abs=0.01)
    assert found.same_shard == pytest.approx(1, abs=0.01)
    assert found.same_label == pytest.approx(1, abs=0.01)


def test_shuffle_quality_of_larger_windows_and_more_lanes_is_better():
    starts, labels = np.arange(0, 20_001, 200), np.arange(20_000) // 100

    def measure(lanes, window):
        config = gp.ShardOrder(lanes=lanes, window=window)
        order = shuffled_lanes(starts, config, seed=0, epoch=0)
        return gp.shuffle_quality(order, starts, batch_size=100, labels=labels)

    for sequence in ([measure(4, window) for window in (10, 100, 1000)], [measure(lanes, 200) for lanes in (1, 4, 16)]):
        for name, sign in (("neighbour_distance", 1), ("same_label", -1), ("same_shard", -1)):
            assert (np.diff([getattr(found, name) for found in sequence]) * sign > 0).all()


def test_shuffle_quality_without_labels_or_with_shards_of_one_says_none():
    found = gp.shuffle_quality([2, 0, 1], [0, 1, 2, 3], batch_size=2)
    assert (found.same_shard, found.same_label, found.largest_share) == (None, None, 0.5)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"order": [0, 1, 1]}, "order"),
        ({"order": [0, 1, 4]}, "order"),
        ({"order": [0, -1]}, "order"),
        ({"order": [[0, 1]]}, "order"),
        ({"batch_size": 1}, "batch_size"),
        ({"batch_size": 4}, "batch_size"),
        ({"order": []}, "batch_size"),
        ({"labels": [1, 2, 3]}, "labels"),
        ({"labels": np.zeros((4, 2))}, "labels"),
    ],
)
def test_shuffle_quality_of_what_cannot_be_measured_raises(arguments, field):
    usual = {"order": [0, 1, 2], "shard_starts": [0, 4], "batch_size": 2}
    with pytest.raises(ConfigError) as raised:
        gp.shuffle_quality(**(usual | arguments))
    assert raised.value.field == field
