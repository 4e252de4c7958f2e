"""Tar shards one after another: no sample lost, none twice, whatever the shards, lanes, ranks and batches are."""

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpupipe as gp
from gpupipe import backends
from gpupipe.errors import ConfigError, SourceError
from gpupipe.rng import KEY_DOMAIN, Op
from gpupipe.sampling import shard_order
from gpupipe.sampling.samplers import RankRows
from gpupipe.sampling.shard_order import LaneOrder, ShardOrdering, lanes_in_turn, shard_starts_of, shuffled_lanes
from tests.fakes import FakeBackend, ShardedSource

RECIPE = gp.Recipe.train(size=16)
SIZES = st.lists(st.integers(0, 12), min_size=1, max_size=12).filter(sum)
LANES = st.integers(1, 12)
WINDOW = st.integers(1, 30)
PAD = st.sampled_from(["repeat", "drop", "mask"])


@st.composite
def lanes_and_worlds(draw):
    """Lanes, and two world sizes that can share them."""
    lanes = draw(LANES)
    world = st.sampled_from([size for size in range(1, lanes + 1) if lanes % size == 0])
    return lanes, draw(world), draw(world)


def starts_of(sizes):
    return np.cumsum([0, *sizes])


def words(op, seed, epoch, number, count):
    """NumPy's Philox, which counts up before it draws."""
    counter = np.array([(int(op) << 32) - 1, epoch, number, 0], np.uint64)
    return np.random.Philox(counter=counter, key=np.array([seed, KEY_DOMAIN], np.uint64)).random_raw(count).tolist()


def plainly(sizes, lanes, window, seed, epoch):
    """The definition, sample by sample: lanes as lists of windows, which are lists of samples."""
    starts = starts_of(sizes).tolist()
    shards = [list(range(first, last)) for first, last in itertools.pairwise(starts)]
    keys = words(Op.SHARDS, seed, epoch, 0, len(shards))
    sequence = [sample for shard in sorted(range(len(shards)), key=keys.__getitem__) for sample in shards[shard]]
    found, count = [], len(sequence)
    for lane in range(lanes):
        rows = len(range(lane, count, lanes))
        samples, sequence = sequence[:rows], sequence[rows:]
        cut, *keys = words(Op.WINDOWS, seed, epoch, lane, rows + 1)
        first = rows if window >= rows else cut % window or window  # rows of the first window
        ends = [*range(first, rows, window), rows]
        windows = []
        for begin, end in itertools.pairwise([0, *ends]):
            bits = (end - begin - 1).bit_length()
            windows.append(sorted(range(begin, end), key=lambda row, bits=bits: (keys[row] >> bits, row)))
        found.append([[samples[row] for row in each] for each in windows if each])
    return found


def in_turn(lanes):
    """One sample of each lane in turn."""
    rows = [[sample for window in windows for sample in window] for windows in lanes]
    return [lane[row] for row in range(max(map(len, rows))) for lane in rows if row < len(lane)]


@given(sizes=SIZES, lanes=LANES, window=WINDOW, seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 2**63 - 1))
def test_shuffled_lanes_of_any_shards_are_as_defined(sizes, lanes, window, seed, epoch):
    found = shuffled_lanes(starts_of(sizes), gp.ShardOrder(lanes=lanes, window=window), seed=seed, epoch=epoch)
    assert found.tolist() == in_turn(plainly(sizes, lanes, window, seed, epoch))


@given(sizes=SIZES, lanes=LANES, window=WINDOW, block=st.integers(1, 20))
def test_shuffled_lanes_do_not_depend_on_the_blocks_they_are_made_in(sizes, lanes, window, block):
    config = gp.ShardOrder(lanes=lanes, window=window)
    whole = shuffled_lanes(starts_of(sizes), config, seed=1, epoch=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard_order, "BLOCK_ROWS", block)
        assert shuffled_lanes(starts_of(sizes), config, seed=1, epoch=2).tolist() == whole.tolist()


def test_shuffled_lanes_stay_the_same_for_ever():
    """Checkpoints of an older version resume: these numbers must not change, on no machine."""
    found = shuffled_lanes(starts_of([4, 0, 7, 1, 3]), gp.ShardOrder(lanes=4, window=3), seed=1, epoch=0)
    assert found.tolist() == [5, 9, 13, 3, 4, 8, 14, 1, 6, 10, 0, 2, 7, 12, 11]


def test_shuffled_lanes_differ_between_seeds_and_epochs_that_sum_to_the_same():
    config, starts = gp.ShardOrder(), starts_of([20] * 20)
    orders = [shuffled_lanes(starts, config, seed=s, epoch=e).tolist() for s, e in ((0, 5), (5, 0), (1, 4), (0, 4))]
    assert len({tuple(order) for order in orders}) == 4


def test_shuffled_lanes_put_every_sample_of_a_window_anywhere_in_it_equally_often():
    """One shard, one lane, one window: a chi-square test of where each sample comes; 99.9 % point of 81 degrees."""
    counts = np.zeros((10, 10))
    for epoch in range(5000):
        found = shuffled_lanes(np.array([0, 10]), gp.ShardOrder(lanes=1, window=10), seed=0, epoch=epoch)
        counts[np.arange(10), found] += 1
    assert ((counts - 500) ** 2 / 500).sum() < 126.1


def test_windows_of_equal_shards_have_other_samples_in_each_epoch():
    """Without the random cut, samples 0 to 3 of a shard of 8 would be together in every epoch."""
    together = set()
    for epoch in range(50):
        found = shuffled_lanes(np.arange(0, 65, 8), gp.ShardOrder(lanes=1, window=4), seed=0, epoch=epoch)
        position = found.argsort()
        together |= {int(abs(position[3] - position[4]) <= 3)}
    assert together == {0, 1}


@given(sizes=SIZES, lanes=LANES)
def test_order_without_shuffling_has_the_samples_of_each_lane_in_storage_order(sizes, lanes):
    ordering = ShardOrdering(gp.ShardOrder(lanes=lanes), starts_of(sizes), shuffle=False, seed=0, world_size=1)
    found = ordering.draw(3).at(np.arange(sum(sizes)))[0]
    assert np.concatenate([found[lane::lanes] for lane in range(lanes)]).tolist() == list(range(sum(sizes)))


@given(sizes=SIZES, lanes=lanes_and_worlds(), window=WINDOW)
def test_lane_is_a_run_of_shards_of_which_it_shares_only_the_first_and_the_last(sizes, lanes, window):
    lanes, world_size, _ = lanes
    starts = starts_of(sizes)
    ordering = ShardOrdering(
        gp.ShardOrder(lanes=lanes, window=window), starts, shuffle=True, seed=0, world_size=world_size
    )
    order = ordering.draw(0).at(np.arange(sum(sizes)))[0]
    shards = [np.searchsorted(starts, order[lane::lanes], side="right") - 1 for lane in range(lanes)]
    rows = [len(lane) for lane in shards]
    assert max(rows) - min(rows) <= 1
    # A cut between two lanes goes through one shard at most.
    assert sum(len(set(lane.tolist())) for lane in shards) <= np.count_nonzero(sizes) + lanes - 1


@given(sizes=st.lists(st.integers(3, 12), min_size=1, max_size=12), lanes=LANES, window=WINDOW)
def test_lane_needs_only_the_shards_that_a_window_is_spread_over(sizes, lanes, window):
    starts = starts_of(sizes)
    order = shuffled_lanes(starts, gp.ShardOrder(lanes=lanes, window=window), seed=0, epoch=0)
    most = math.ceil((window - 1) / min(sizes)) + 1
    for lane in range(lanes):
        shards = (np.searchsorted(starts, order[lane::lanes], side="right") - 1).tolist()
        assert max(open_at_once([shard] for shard in shards), default=0) <= most


def open_at_once(batches):
    """How many shards were begun and not done with, at each step."""
    batches = [set(batch) for batch in batches]
    first = {shard: step for step, batch in reversed(list(enumerate(batches))) for shard in batch}
    last = {shard: step for step, batch in enumerate(batches) for shard in batch}
    return [sum(first[shard] <= step <= last[shard] for shard in first) for step in range(len(batches))]


# --- Dealt to ranks ---


@given(sizes=SIZES, lanes=lanes_and_worlds(), batch=st.integers(1, 6), pad=PAD, start=st.integers(0, 1 << 30))
def test_rank_has_lanes_of_its_own_to_the_last_row(sizes, lanes, batch, pad, start):
    """Also from within an epoch that other numbers of ranks began; and what pads it comes from its own lanes, too."""
    lanes, world_size, _ = lanes
    length = sum(sizes)
    config = gp.ShardOrder(lanes=lanes, window=4)
    order = ShardOrdering(config, starts_of(sizes), shuffle=True, seed=0, world_size=world_size).draw(0)
    whole = order.at(np.arange(length))[0].tolist()
    own = []
    for rank in range(world_size):
        rows = RankRows.deal(length, start=start % length, rank=rank, world_size=world_size, pad=pad, batch_size=batch)
        found = order.at(rows.positions(0, rows.count))[0].tolist()
        own.append({whole.index(sample) % lanes for sample in found})
    if length >= lanes:
        assert sum(map(len, own)) == len(set().union(*own))
        assert all(len(lanes_of) <= lanes // world_size for lanes_of in own)


@given(values=st.integers(1, 40), lanes=LANES, more=st.integers(0, 60))
def test_lane_order_behind_its_end_repeats_the_ends_of_the_lanes_and_counts_on(values, lanes, more):
    indices = np.random.default_rng(0).permutation(values)
    order = LaneOrder(indices, {}, lanes=lanes, shard_starts=np.array([0, values]))
    expected = indices.tolist()
    for _ in range(more):
        expected.append(expected[-min(lanes, values)])
    found, occurrences = order.at(np.arange(values + more))
    assert found.tolist() == expected
    assert occurrences.tolist() == [expected[:place].count(value) for place, value in enumerate(expected)]


@pytest.fixture
def fake_backend(monkeypatch):
    monkeypatch.setattr(backends, "create", lambda *_, **__: FakeBackend())


def make(sizes, config, *, rank=0, world_size=1, pad="repeat", batch_size=4, **arguments):
    return gp.Loader(
        ShardedSource(sizes),
        RECIPE,
        batch_size=batch_size,
        seed=3,
        shuffle=True,
        fields=("image", "index", "valid"),
        backend="torchvision",
        sharding=gp.Sharding(rank=rank, world_size=world_size, pad=pad, order=config),
        **arguments,
    )


def rows(batch):
    """(index, occurrence, left of the crop, valid) of each row."""
    image, _, valid = batch
    return [(*map(int, row), bool(good)) for row, good in zip(image[:, :, 0, 0].tolist(), valid, strict=True)]


@settings(max_examples=60)
@given(
    sizes=SIZES, lanes=lanes_and_worlds(), window=WINDOW, batch_size=st.integers(1, 6), pad=PAD, drop_last=st.booleans()
)
def test_epoch_over_all_ranks_is_the_data_set(sizes, lanes, window, batch_size, pad, drop_last):
    lanes, world_size, _ = lanes
    drop_last &= pad != "mask"
    ranks = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "create", lambda *_, **__: FakeBackend())
        for rank in range(world_size):
            with make(
                sizes,
                gp.ShardOrder(lanes=lanes, window=window),
                rank=rank,
                world_size=world_size,
                pad=pad,
                batch_size=batch_size,
                drop_last=drop_last,
            ) as loader:
                ranks.append([rows(batch) for batch in loader])
                assert len(ranks[-1]) == len(loader)
    assert [[len(batch) for batch in rank] for rank in ranks] == world_size * [[len(batch) for batch in ranks[0]]]
    every = [row for rank in ranks for batch in rank for row in batch]
    assert len({row[:2] for row in every}) == len(every)  # what comes again has another crop
    found, count = [row[0] for row in every if row[3]], sum(sizes)
    assert len(set(found)) == len(found)
    if pad == "drop" or drop_last:
        per_rank = count // world_size if pad == "drop" else -(-count // world_size)
        per_rank = per_rank // batch_size * batch_size if drop_last else per_rank
        assert len(found) == min(count, per_rank * world_size)
    else:
        assert sorted(found) == list(range(count))


@settings(max_examples=60)
@given(
    sizes=SIZES,
    lanes=lanes_and_worlds(),
    batch_sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    pad=PAD,
    stop=st.integers(0, 20),
)
def test_resume_anywhere_delivers_what_was_left_on_any_ranks(sizes, lanes, batch_sizes, pad, stop):
    lanes, *worlds = lanes
    config = gp.ShardOrder(lanes=lanes, window=5)
    before, straight, state = [], [], None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "create", lambda *_, **__: FakeBackend())
        old = {"world_size": worlds[0], "batch_size": batch_sizes[0], "pad": pad}
        for rank in range(worlds[0]):
            with make(sizes, config, rank=rank, **old) as loader:
                stop = min(stop, max(0, len(loader) - 1))
                batches = iter(loader)
                before += [row for _ in range(stop) for row in rows(next(batches))]
                state = state or loader.state_dict()
                straight.append([rows(batch) for batch in batches])
        resumed = []
        for rank in range(worlds[0]):
            with make(sizes, config, rank=rank, **old) as loader:
                loader.load_state_dict(state)
                resumed.append([rows(batch) for batch in loader] if loader.remaining else [])
        rest = []
        for rank in range(worlds[1]):
            with make(sizes, config, rank=rank, world_size=worlds[1], batch_size=batch_sizes[1], pad=pad) as loader:
                loader.load_state_dict(state)
                rest += [row for batch in loader for row in rows(batch)]
    assert resumed == straight
    crops = {row[:2]: row[2] for row in before}
    crops |= {row[:2]: row[2] for rank in straight for batch in rank for row in batch}
    assert all(crops.get(row[:2], row[2]) == row[2] for row in rest)
    delivered, after = ([row[0] for row in part if row[3]] for part in (before, rest))
    assert len(set(delivered + after)) == len(delivered + after)
    missing = sum(sizes) - len(delivered + after)
    assert missing == 0 if pad != "drop" else missing < worlds[1]


@pytest.mark.usefixtures("fake_backend")
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_loader_reads_one_shard_after_another_on_each_rank(world_size):
    """With 30 shards of at least 20 samples and windows of 25, at most three shards in each lane are in use."""
    sizes, lanes, batch_size = [20 + 3 * (number % 7) for number in range(30)], 4, 8
    config = gp.ShardOrder(lanes=lanes, window=25)
    starts = starts_of(sizes)
    for order, most in ((config, 3 * lanes // world_size), ("global", None)):
        with make(sizes, order, world_size=world_size, batch_size=batch_size) as loader:
            list(loader)
            read = np.searchsorted(starts, loader.dataset.read, side="right") - 1
        used = open_at_once(np.array_split(read, range(batch_size, len(read), batch_size)))
        # A batch may straddle two windows, and so need one shard more in each lane.
        assert max(used) > 25 if most is None else max(used) <= most + lanes // world_size
        if most is not None:
            assert len(set(read.tolist())) <= len(sizes) / world_size + 2 * lanes


def test_substitutes_come_from_the_same_shard():
    order = LaneOrder(np.arange(11), {}, lanes=1, shard_starts=starts_of([0, 4, 0, 0, 1, 6, 0]))
    # The one that is alone in its shard may be replaced by any other: a bad file must not end the run.
    shards = [range(4)] * 4 + [range(11)] + [range(5, 11)] * 6
    assert [order.candidates(index) for index in range(11)] == shards


# --- What cannot work ---


@pytest.mark.parametrize(("lanes", "world_size"), [(16, 3), (16, 32), (1, 2), (6, 4)])
def test_world_size_that_cannot_share_the_lanes_raises_naming_those_that_can(lanes, world_size):
    with pytest.raises(ConfigError) as raised:
        make([9, 9], gp.ShardOrder(lanes=lanes), world_size=world_size)
    assert raised.value.field == "sharding.order.lanes"
    can = ", ".join(str(size) for size in range(1, lanes + 1) if lanes % size == 0)
    assert f"{world_size} processes cannot share {lanes} lanes evenly; {can} can." in str(raised.value)
    suggested = int(str(raised.value).split("lanes=")[-1].rstrip(")"))
    assert suggested % world_size == 0
    make([9, 9], gp.ShardOrder(lanes=suggested), world_size=world_size).close()


@pytest.mark.parametrize("field", ["lanes", "window"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, "4", None, 1 << 63])
def test_shard_order_that_is_no_positive_integer_raises(field, value):
    with pytest.raises(ConfigError, match=f"{field}=") as raised:
        gp.ShardOrder(**{field: value})
    assert raised.value.field == f"sharding.order.{field}"


@pytest.mark.parametrize("order", ["shard", None, 3, gp.Sharding()])
def test_sharding_of_no_such_order_raises(order):
    with pytest.raises(ConfigError, match=r"sharding\.order=") as raised:
        gp.Sharding(order=order)
    assert raised.value.allowed == ("global", "shards")


def test_sharding_of_the_word_shards_is_the_default_shard_order():
    assert gp.Sharding(order="shards").shard_order == gp.ShardOrder()
    assert gp.Sharding().shard_order is None
    assert pickle.loads(pickle.dumps(gp.Sharding(order=gp.ShardOrder(lanes=2)))).shard_order.lanes == 2


def test_source_without_shards_raises_naming_the_remedy(image_folder):
    with pytest.raises(ConfigError, match="gpupipe pack SRC DST --format tar") as raised:
        gp.Loader(image_folder, RECIPE, batch_size=2, backend="torchvision", sharding=gp.Sharding(order="shards"))
    assert raised.value.field == "sharding.order"
    assert str(image_folder) in str(raised.value)


@pytest.mark.parametrize(
    "starts", [[], [0], [18], [0, 17], [1, 18], [0, 9, 8, 18], [0.0, 18.0], [[0, 18]], ["0", "18"], [0, 2**63]]
)
def test_shard_starts_that_cannot_be_raise(starts):
    source = ShardedSource([9, 9])
    source.shard_starts = np.array(starts)
    with pytest.raises(SourceError, match="memory of 18 has shard_starts"):
        shard_starts_of(source)


def test_shard_starts_of_small_unsigned_integers_are_taken():
    source = ShardedSource([9, 0, 9])
    source.shard_starts = np.array([0, 9, 9, 18], np.uint8)
    found = shard_starts_of(source)
    assert (found.tolist(), found.dtype) == ([0, 9, 9, 18], np.int64)


def test_lanes_and_windows_far_larger_than_the_data_set_are_one_lane_for_each_sample():
    found = shuffled_lanes(starts_of([2, 0, 3]), gp.ShardOrder(lanes=1 << 16, window=(1 << 63) - 1), seed=0, epoch=0)
    assert sorted(found.tolist()) == list(range(5))


def test_lanes_in_turn_of_fewer_elements_than_lanes_keeps_them():
    assert lanes_in_turn(np.arange(3), 5).tolist() == [0, 1, 2]
