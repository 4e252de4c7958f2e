import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import gpupipe as gp
from gpupipe.errors import ConfigError, RecordError, StateError
from gpupipe.sampling.cost import CostAware, CostOrdering, balanced_order, measure_costs
from gpupipe.sampling.samplers import RankRows
from tests import images

HEAVY = np.random.default_rng(0).lognormal(11, 0.8, 4096)


class Sized:
    """A data set of which only the length counts."""

    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length


def ordering(costs, batch_size=4, world_size=1, window=8, seed=0):
    config = CostAware(costs, window=window)
    return CostOrdering(config, Sized(len(costs)), seed=seed, batch_size=batch_size, world_size=world_size)


def batches_of(order, batch_size, world_size):
    """The full batches of all ranks, as the loader deals them."""
    found = []
    for rank in range(world_size):
        rows = RankRows.deal(
            len(order), start=0, rank=rank, world_size=world_size, pad="drop", batch_size=batch_size
        ).positions(0, len(order) // (batch_size * world_size) * batch_size)
        found += list(order[rows].reshape(-1, batch_size))
    return found


@given(
    costs=st.lists(st.floats(0, 1e9), min_size=1, max_size=200),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    window=st.integers(1, 40),
    seed=st.integers(0, 100),
)
def test_balanced_order_of_any_costs_holds_each_sample_once(costs, batch_size, world_size, window, seed):
    arguments = {"seed": seed, "batch_size": batch_size, "world_size": world_size, "window": window}
    order = balanced_order(np.array(costs), **arguments)
    assert sorted(order.tolist()) == list(range(len(costs)))
    assert order.tolist() == balanced_order(np.array(costs), **arguments).tolist()


@given(length=st.integers(1, 200), batch_size=st.integers(1, 9), world_size=st.integers(1, 4), seed=st.integers(0, 99))
def test_balanced_order_with_window_1_makes_plain_batches(length, batch_size, world_size, seed):
    """Nothing to exchange: the same samples meet as with torch's permutation cut into batches."""
    order = balanced_order(np.ones(length), seed=seed, batch_size=batch_size, world_size=world_size, window=1)
    plain = torch.randperm(length, generator=torch.Generator().manual_seed(seed)).numpy()
    whole = length // (batch_size * world_size) * world_size
    expected = {frozenset(batch) for batch in plain[: whole * batch_size].reshape(-1, batch_size).tolist()}
    assert {frozenset(batch.tolist()) for batch in batches_of(order, batch_size, world_size)} == expected
    assert order[whole * batch_size :].tolist() == plain[whole * batch_size :].tolist()


@pytest.mark.parametrize("world_size", [1, 4])
def test_balanced_order_of_heavy_tails_has_batches_of_nearly_equal_cost(world_size):
    def spread(order):
        sums = [HEAVY[batch].sum() for batch in batches_of(order, 32, world_size)]
        return np.std(sums) / np.mean(sums)

    plain = torch.randperm(len(HEAVY), generator=torch.Generator().manual_seed(5)).numpy()
    balanced = balanced_order(HEAVY, seed=5, batch_size=32, world_size=world_size, window=32)
    assert spread(balanced) < spread(plain) / 4


def test_balanced_order_lets_two_samples_meet_as_often_as_plain_shuffling_does():
    costs, met = HEAVY[:512], np.zeros((512, 512), np.int64)
    for epoch in range(100):
        for batch in balanced_order(costs, seed=epoch, batch_size=16, world_size=1, window=32).reshape(-1, 16):
            met[np.ix_(batch, batch)] += 1
    pairs = met[np.triu_indices(512, 1)]
    assert pairs.mean() == pytest.approx(100 * 15 / 511)
    # Plain shuffling is binomial: variance / mean = 1 - 15 / 511. Without the blur it is above 2 here.
    assert pairs.var() / pairs.mean() < 1.1


def test_balanced_order_in_blocks_is_a_permutation(monkeypatch):
    monkeypatch.setattr("gpupipe.sampling.cost.BLOCK_ROWS", 100)
    order = balanced_order(HEAVY, seed=0, batch_size=8, world_size=2, window=5)
    assert sorted(order.tolist()) == list(range(len(HEAVY)))


def test_cost_ordering_draws_another_order_each_epoch():
    made = ordering(HEAVY)
    first, second = made.draw(0).indices, made.draw(1).indices
    assert first.tolist() != second.tolist()
    assert made.draw(0).indices.tolist() == first.tolist()


def test_cost_ordering_restored_in_mid_epoch_keeps_the_old_batches():
    old = ordering(HEAVY, batch_size=4, world_size=2)
    new = ordering(HEAVY, batch_size=16, world_size=1)
    order = new.restore(old.draw(3).definition(), 3, begun=True)
    assert order.indices.tolist() == old.draw(3).indices.tolist()
    assert order.definition() == old.definition()
    assert new.restore(old.draw(3).definition(), 3, begun=False) is None
    assert new.restore(new.definition(), 3, begun=True) is None


def test_cost_ordering_with_other_costs_or_window_raises_naming_them():
    saved = ordering(HEAVY).definition()
    with pytest.raises(StateError, match="costs was"):
        ordering(HEAVY + 1).restore(saved, 0, begun=False)
    with pytest.raises(StateError, match="window was 8 and is 9 here"):
        ordering(HEAVY, window=9).restore(saved, 0, begun=False)
    with pytest.raises(StateError, match="batch_size was 0"):
        ordering(HEAVY).restore(saved | {"batch_size": 0}, 0, begun=True)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"cost": "seconds"}, "cost"),
        ({"cost": [1, -2]}, "cost"),
        ({"cost": [[1]]}, "cost"),
        ({"window": 0}, "window"),
        ({"window": 2.0}, "window"),
        ({"window": True}, "window"),
    ],
)
def test_cost_aware_with_impossible_values_raises_naming_them(arguments, field):
    with pytest.raises(ConfigError, match=field) as raised:
        CostAware(**arguments)
    assert raised.value.field == field


def test_cost_ordering_with_another_number_of_costs_raises():
    with pytest.raises(ConfigError, match="cost has 3 entries for a data set of 4"):
        CostOrdering(CostAware([1, 2, 3]), Sized(4), seed=0, batch_size=1, world_size=1)


def test_measure_costs_are_the_files_sizes(image_folder):
    from PIL import Image

    source = gp.open_source(image_folder)
    paths = [image_folder / source.key(index) for index in range(len(source))]
    assert measure_costs(source, "bytes").tolist() == [path.stat().st_size for path in paths]
    sizes = []
    for path in paths:
        with Image.open(path) as image:
            sizes.append(image.width * image.height)
    assert measure_costs(source, "pixels").tolist() == sizes


def test_measure_costs_asks_a_source_that_knows_its_sizes():
    class Knows(Sized):
        sizes_bytes = np.array([3, 5])
        shapes_px = np.array([[100_000, 100_000], [0, 0]], np.int32)

        def __getitem__(self, index):
            raise AssertionError(index)

    assert measure_costs(Knows(2), "bytes").tolist() == [3, 5]
    assert measure_costs(Knows(2), "pixels").tolist() == [1e10, 0]


def test_measure_costs_of_pixels_are_their_bytes():
    class Pixels(Sized):
        def __getitem__(self, index):
            return gp.Record(np.zeros((4, 5, 3), np.uint8), 0, index, str(index))

    assert measure_costs(Pixels(2), "bytes").tolist() == [60, 60]
    assert measure_costs(Pixels(2), "pixels").tolist() == [20, 20]


def test_measure_costs_of_what_cannot_be_read_is_0(tmp_path):
    (tmp_path / "class").mkdir()
    for number, data in enumerate((images.jpeg(images.photo(20, 30)), b"no image", b"gone")):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(data)
    source = gp.open_source(tmp_path)
    (tmp_path / "class" / "2.jpg").unlink()
    with pytest.raises(RecordError):
        source[2]
    assert measure_costs(source, "pixels").tolist() == [600, 0, 0]
    assert measure_costs(source, "bytes").tolist()[1:] == [8, 0]
