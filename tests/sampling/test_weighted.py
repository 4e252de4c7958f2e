import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.data import WeightedRandomSampler

from gpupipe.errors import ConfigError, StateError
from gpupipe.sampling.samplers import MAX_WEIGHTS, RankRows, Weighted, WeightedOrdering


@given(
    weights=st.lists(st.floats(0, 1e6) | st.integers(0, 5), min_size=1, max_size=40),
    rows=st.none() | st.integers(1, 100),
    replacement=st.booleans(),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 1000),
)
def test_weighted_order_equals_weighted_random_sampler(weights, rows, replacement, seed, epoch):
    assume(sum(weights) > 1e-3)
    if not replacement:
        rows = min(rows or len(weights), sum(weight > 0 for weight in weights))
    config = Weighted(weights, num_samples=rows, replacement=replacement)
    ordering = WeightedOrdering(config, len(weights), seed=seed)
    sampler = WeightedRandomSampler(
        weights, rows or len(weights), replacement, generator=torch.Generator().manual_seed(seed + epoch)
    )
    order = ordering.draw(epoch)
    assert order.length == ordering.length(epoch) == len(sampler)
    indices, occurrences = order.at(np.arange(order.length))
    assert indices.tolist() == list(sampler)
    assert len(set(zip(indices.tolist(), occurrences.tolist(), strict=True))) == order.length


@given(world_size=st.integers(1, 7), rows=st.integers(1, 30), epoch=st.integers(0, 9))
def test_weighted_order_over_ranks_is_the_same_order(world_size, rows, epoch):
    config = Weighted(np.arange(1, 6), num_samples=rows)
    dealt = {}
    for rank in range(world_size):
        order = WeightedOrdering(config, 5, seed=1).draw(epoch)
        part = RankRows.deal(rows, start=0, rank=rank, world_size=world_size, pad="mask", batch_size=2)
        positions = part.positions(0, part.count)
        dealt |= dict(
            zip(positions.tolist(), zip(*map(np.ndarray.tolist, order.at(positions)), strict=True), strict=True)
        )
    alone = WeightedOrdering(config, 5, seed=1).draw(epoch).at(np.arange(len(dealt)))
    assert [dealt[position] for position in range(len(dealt))] == list(zip(*map(np.ndarray.tolist, alone), strict=True))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"weights": [1, -1]}, "weights"),
        ({"weights": [1, float("nan")]}, "weights"),
        ({"weights": [1, float("inf")]}, "weights"),
        ({"weights": []}, "weights"),
        ({"weights": [[1, 2]]}, "weights"),
        ({"weights": "abc"}, "weights"),
        ({"weights": [0, 0]}, "weights"),
        ({"weights": np.broadcast_to(1.0, MAX_WEIGHTS + 1)}, "weights"),
        ({"weights": [1], "num_samples": 0}, "num_samples"),
        ({"weights": [1], "num_samples": 1.5}, "num_samples"),
        ({"weights": [1, 0, 1], "num_samples": 3, "replacement": False}, "num_samples"),
    ],
)
def test_weighted_with_impossible_values_raises_naming_them(arguments, field):
    with pytest.raises(ConfigError, match=field) as raised:
        Weighted(**arguments)
    assert raised.value.field == field


def test_weighted_of_another_length_than_the_data_set_raises():
    with pytest.raises(ConfigError, match="weights has 3 entries for a data set of 4"):
        WeightedOrdering(Weighted([1, 2, 3]), 4, seed=0)


def test_weighted_state_with_other_weights_raises_naming_them():
    saved = WeightedOrdering(Weighted([1, 2]), 2, seed=0).definition()
    with pytest.raises(StateError, match="weights was"):
        WeightedOrdering(Weighted([1, 3]), 2, seed=0).restore(saved, 0, begun=False)
    assert WeightedOrdering(Weighted([1, 2]), 2, seed=0).restore(saved, 0, begun=True) is None
