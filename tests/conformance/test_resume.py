"""One battery over every order: a run that was interrupted ends as one that was not. A new order is one entry.

Most of it runs on a backend that puts into the image what the plan says, so that equal images mean equal plans; that
equal plans mean equal pixels is shown at the end, with every backend there is.
"""

import io
import json
import shutil
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

import gpupipe as gp
from gpupipe import backends
from gpupipe.errors import ConfigError, StateError
from tests import available
from tests.fakes import FakeBackend, MemorySource, ShardedSource
from tests.samplers import EpochSampler, ForgetfulSampler, RASampler, StatefulSampler

RECIPE = gp.Recipe.train(size=16)
SHARD_SIZES = (10, 0, 1, 20, 6)
LENGTH = sum(SHARD_SIZES)
SHARDS = gp.ShardOrder(lanes=12, window=5)  # any number of processes up to four can share these lanes


def generator():
    return torch.Generator().manual_seed(7)


# Name -> arguments of the Loader, made anew for each, as a script that is started again does.
ORDERS = {
    "sequential": dict,
    "shuffle": lambda: {"shuffle": True},
    "weighted": lambda: {"sampler": gp.Weighted(np.arange(1, LENGTH + 1), num_samples=50)},
    "weighted without replacement": lambda: {
        "sampler": gp.Weighted(np.arange(1, LENGTH + 1), num_samples=30, replacement=False)
    },
    "indices": lambda: {"sampler": [5, 3, 3, 8, 5, 5, *range(20), 3]},
    "random": lambda: {"sampler": RandomSampler(range(LENGTH), generator=generator())},
    "subset": lambda: {"sampler": SubsetRandomSampler(range(0, LENGTH, 2), generator=generator())},
    "weighted of torch": lambda: {"sampler": WeightedRandomSampler(range(1, LENGTH + 1), 50, generator=generator())},
    "set_epoch": lambda: {"sampler": EpochSampler(LENGTH)},
    "own state": lambda: {"sampler": StatefulSampler(LENGTH)},
    "cost": lambda: {"sampler": gp.CostAware(np.arange(LENGTH) ** 2, window=3)},
    "length": lambda: {"sampler": gp.LengthBuckets(np.arange(LENGTH) % 11, window=3)},
    "shards": lambda: {"shuffle": True, "order": SHARDS},
    "shards in turn": lambda: {"order": SHARDS},
}
each_order = pytest.mark.parametrize("order", ORDERS)


@pytest.fixture(autouse=True, scope="module")
def fake_backend():
    """In place of every backend that is asked for as "torchvision" while no test takes it away."""
    with pytest.MonkeyPatch.context() as patch:
        real = backends.create
        patch.setattr(
            backends,
            "create",
            lambda name, recipe, **rest: FakeBackend() if recipe == RECIPE else real(name, recipe, **rest),
        )
        yield


def make(order, *, rank=0, world_size=1, pad="repeat", batch_size=4, **arguments):
    ordered_by = ORDERS[order]()
    shards = ordered_by.pop("order", "global")
    return gp.Loader(
        ShardedSource(SHARD_SIZES),
        RECIPE,
        batch_size=batch_size,
        seed=3,
        fields=("image", "index", "valid"),
        backend="torchvision",
        sharding=gp.Sharding(rank=rank, world_size=world_size, pad=pad, order=shards),
        **ordered_by,
        **arguments,
    )


def rows(batch):
    """(index, occurrence, left of the crop, valid) of each row."""
    image, _, valid = batch
    return [(*map(int, row), bool(good)) for row, good in zip(image[:, :, 0, 0].tolist(), valid, strict=True)]


def saved(state):
    """The state after a checkpoint has been written and read."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)
    assert found == state == json.loads(json.dumps(state))
    return found


def epochs(loader, count):
    return [[rows(batch) for batch in loader] for _ in range(count)]


@each_order
@pytest.mark.parametrize("pad", ["repeat", "drop", "mask"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_resume_with_the_same_arguments_goes_on_as_if_nothing_had_happened(order, pad, world_size):
    arguments = {"world_size": world_size, "pad": pad}
    with make(order, **arguments) as first:  # rank 0 writes the checkpoint
        per_epoch = len(first)
    for rank in range(world_size):
        with make(order, rank=rank, **arguments) as loader:
            straight = [batch for epoch in epochs(loader, 3) for batch in epoch]
        assert len(straight) == 3 * per_epoch
        for stop in (0, 1, per_epoch - 1, per_epoch, per_epoch + 1, 2 * per_epoch):
            state = state_after(order, stop, rank=0, **arguments)
            assert (state["epoch"], state["delivered"] > 0) == (stop // per_epoch, stop % per_epoch > 0)
            with make(order, rank=rank, **arguments) as resumed:
                resumed.load_state_dict(state)
                assert resumed.epoch == stop // per_epoch
                assert resumed.remaining == per_epoch - stop % per_epoch
                assert len(resumed) == per_epoch
                found = []
                while len(found) < 3 * per_epoch - stop:
                    found += [rows(batch) for batch in resumed]
                assert found == straight[stop:]


def state_after(order, batches, **arguments):
    with make(order, **arguments) as loader:
        done = 0
        while done < batches:
            for _ in loader:
                done += 1
                if done == batches:
                    break
        return saved(loader.state_dict())


@each_order
def test_resume_twice_in_a_row_is_the_same(order):
    with make(order) as loader:
        straight = epochs(loader, 1)[0]
    found, state = [], None
    while len(found) < len(straight):
        with make(order) as loader:
            if state is not None:
                loader.load_state_dict(state)
                assert saved(loader.state_dict()) == state  # as it came, before anything is delivered
            loader.set_epoch(0)  # what scripts do; it keeps the position
            for batch in loader:
                found.append(rows(batch))
                if len(found) % 2 == 0:
                    break
            state = saved(loader.state_dict())
    assert found == straight
    assert (state["epoch"], state["delivered"]) == (1, 0)


@given(
    order=st.sampled_from(list(ORDERS)),
    pad=st.sampled_from(["repeat", "drop", "mask"]),
    worlds=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    batch_sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    stop=st.integers(0, 12),
)
def test_resume_with_another_world_and_batch_size_delivers_exactly_the_rest(order, pad, worlds, batch_sizes, stop):
    with make(order, pad="mask", batch_size=batch_sizes[0], world_size=worlds[0]) as oracle:
        length = oracle._agreed_order().length
        indices, occurrences = oracle._agreed_order().at(np.arange(length))
    whole = list(zip(indices.tolist(), occurrences.tolist(), strict=True))
    assert len(set(whole)) == length
    old = {"pad": pad, "world_size": worlds[0], "batch_size": batch_sizes[0]}
    new = {"pad": pad, "world_size": worlds[1], "batch_size": batch_sizes[1]}
    delivered, lefts, state = [], {}, None
    for rank in range(worlds[0]):
        with make(order, rank=rank, **old) as loader:
            batches = iter(loader)
            for _ in range(min(stop, len(loader) - 1)):
                delivered += rows(next(batches))
            state = state or saved(loader.state_dict())
    rest = []
    for rank in range(worlds[1]):
        with make(order, rank=rank, **new) as loader:
            loader.load_state_dict(state)
            expected = loader.remaining
            found = [rows(batch) for batch in loader]
            assert len(found) == expected
            rest += [row for batch in found for row in batch]
    assert len(rest) % worlds[1] == 0
    for index, occurrence, left, _ in delivered + rest:
        assert lefts.setdefault((index, occurrence), left) == left  # the same pixels, wherever it comes
    before = [row[:2] for row in delivered if row[3]]
    after = [row[:2] for row in rest if row[3]]
    assert len(set(before + after)) == len(before + after)
    missing = set(whole) - set(before + after)
    assert set(before + after) <= set(whole)
    assert not missing if pad != "drop" else len(missing) < worlds[1]


@each_order
def test_resume_reads_nothing_that_was_delivered(order, monkeypatch):
    read = []
    usual = MemorySource.__getitem__
    monkeypatch.setattr(MemorySource, "__getitem__", lambda self, index: read.append(index) or usual(self, index))
    with make(order) as loader:
        last = [rows(batch) for batch in loader][-1]
        count = len(loader)
    state = state_after(order, count - 1)
    with make(order) as loader:
        read.clear()
        loader.load_state_dict(state)
        assert [rows(batch) for batch in loader] == [last]
    assert sorted(read) == sorted(row[0] for row in last)


def test_cost_aware_epoch_keeps_its_batches_to_its_end_and_then_takes_new_ones():
    with make("cost", batch_size=4, world_size=2) as old:
        old_order = old._agreed_order()
    state = state_after("cost", 2, batch_size=4, world_size=2)
    with make("cost", batch_size=5) as loader:
        loader.load_state_dict(state)
        first = next(iter(loader))
        between = saved(loader.state_dict())
        assert between["order"] == state["order"]
        assert between["delivered"] == 16 + 5
    with make("cost", batch_size=7) as loader:  # a second change within the same epoch
        loader.load_state_dict(between)
        rest = [row[0] for batch in loader for row in rows(batch)]
        after = saved(loader.state_dict())
    assert [row[0] for row in rows(first)] + rest == old_order.at(np.arange(16, LENGTH))[0].tolist()
    assert after["order"]["batch_size"] == 7
    with make("cost", batch_size=7) as plain, make("cost", batch_size=7) as resumed:
        plain.set_epoch(1)
        resumed.load_state_dict(after)
        assert epochs(resumed, 1) == epochs(plain, 1)


@each_order
def test_resume_with_nothing_left_moves_on_to_the_next_epoch(order):
    """`drop_last` may leave no batch of a larger size: that epoch is over, and no loop waits for it for ever."""
    with make(order, batch_size=1) as loader:
        count = len(loader)
        for _, _ in zip(range(count - 1), loader, strict=False):
            pass
        state = saved(loader.state_dict())
    with make(order, batch_size=8, drop_last=True) as resumed:
        resumed.load_state_dict(state)
        assert resumed.remaining == 0
        assert list(resumed) == []
        assert resumed.state_dict()["epoch"] == 1
        assert len(list(resumed)) == len(resumed) > 0
        assert resumed.epoch == 1


@each_order
@pytest.mark.parametrize("drop_last", [False, True])
def test_len_is_what_is_yielded_in_three_epochs_and_after_breaks(order, drop_last):
    with make(order, drop_last=drop_last) as loader:
        for _ in range(3):
            assert len(list(loader)) == len(loader)
            for _ in loader:
                break
        assert len(list(loader)) == len(loader)


@each_order
def test_sampler_attribute_shows_the_coming_order(order):
    with make(order, world_size=2, rank=1) as loader:
        shown = list(loader.sampler)
        assert len(shown) == len(loader.sampler)
        assert [row[0] for batch in loader for row in rows(batch)] == shown


@dataclass(frozen=True)
class Change:
    order: str
    arguments: dict
    named: str


@pytest.mark.parametrize(
    "change",
    [
        Change("shuffle", {"sampler": gp.Weighted(np.ones(LENGTH))}, "kind was 'default' and is 'weighted' here"),
        Change("weighted", {"sampler": gp.Weighted(np.ones(LENGTH))}, "weights was .*num_samples was 50 and is 37"),
        Change("indices", {"sampler": [1, 2, 3]}, "order was"),
        Change("indices", {"sampler": ForgetfulSampler(LENGTH)}, "kind was 'indices' and is 'sampler' here"),
        Change("set_epoch", {"sampler": ForgetfulSampler(LENGTH)}, "does not yield again"),
        Change("random", {"sampler": RandomSampler(range(LENGTH))}, "had a generator of its own"),
        Change("own state", {"sampler": ForgetfulSampler(LENGTH)}, "had a state_dict of its own"),
        Change("cost", {"sampler": gp.CostAware(np.ones(LENGTH), window=3)}, "costs was"),
        Change("length", {"sampler": gp.LengthBuckets(np.ones(LENGTH), window=3)}, "lengths was"),
        Change("length", {"sampler": gp.LengthBuckets(np.arange(LENGTH) % 11)}, "window was 3 and is 64 here"),
        Change("shards", {"shuffle": True}, "kind was 'shards' and is 'default' here"),
        Change(
            "shuffle", {"shuffle": True, "sharding": gp.Sharding(order="shards")}, "kind was 'default' and is 'shar"
        ),
        Change("shards", {"sharding": gp.Sharding(order=SHARDS)}, "shuffle was True and is False here"),
        Change(
            "shards",
            {"sharding": gp.Sharding(order=gp.ShardOrder(lanes=6, window=4)), "shuffle": True},
            "lanes was 12 and is 6 here; window was 5 and is 4 here",
        ),
    ],
    ids=lambda change: f"{change.order} to {next(iter(change.arguments.values()))!r:.20}",
)
def test_state_of_another_order_raises_naming_what_differs(change):
    state = state_after(change.order, 2)
    source = ShardedSource(SHARD_SIZES)
    with (
        gp.Loader(source, RECIPE, batch_size=4, seed=3, backend="torchvision", **change.arguments) as it,
        pytest.raises(StateError, match=change.named),
    ):
        it.load_state_dict(state)


def test_state_of_a_data_set_cut_into_other_shards_is_refused():
    state = state_after("shards", 2)
    with (
        gp.Loader(
            ShardedSource(SHARD_SIZES[::-1]),
            RECIPE,
            batch_size=4,
            seed=3,
            shuffle=True,
            backend="torchvision",
            sharding=gp.Sharding(order=SHARDS),
        ) as loader,
        pytest.raises(StateError, match="shards was"),
    ):
        loader.load_state_dict(state)


def test_state_that_is_refused_leaves_the_loader_as_it_was():
    state = state_after("shuffle", 2)
    with make("shuffle") as loader:
        batches = iter(loader)
        seen = rows(next(batches))
        with pytest.raises(StateError):
            loader.load_state_dict(state | {"seed": 4})
        assert loader.state_dict()["delivered"] == len(seen)
        next(batches)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        ({"epoch": -1}, "epoch=-1"),
        ({"epoch": None}, "epoch=None"),
        ({"delivered": "3"}, "delivered='3'"),
        ({"delivered": 10**6}, "delivered was 1000000"),
        ({"order": None}, "order=None"),
        ({"order": {}}, "kind was None"),
        ({"seed": 4}, "seed was 4 and is 3 here"),
        ({"samples": 36}, "another data set than memory of 37: 36 samples there, 37 here"),
        ({"source": "x"}, "other names or labels"),
        ({"recipe": "x", "recipe_json": "x"}, "another recipe"),
    ],
)
def test_state_that_does_not_fit_says_what_is_wrong(damage, named):
    state = state_after("shuffle", 2)
    with make("shuffle") as loader, pytest.raises(StateError, match=named):
        loader.load_state_dict(state | damage)


def test_state_of_another_recipe_names_the_entry():
    state = state_after("shuffle", 2)
    with (
        gp.Loader(MemorySource(LENGTH), gp.Recipe.train(16, hflip=0.25), batch_size=4, shuffle=True, seed=3) as loader,
        pytest.raises(StateError, match=r"steps\[1\]\.p was 0\.5 and is 0\.25 here"),
    ):
        loader.load_state_dict(state)


def test_state_follows_the_conventions_of_stateful():
    from torch.distributed.checkpoint.stateful import Stateful

    with make("shuffle") as loader:
        assert isinstance(loader, Stateful)


@each_order
def test_state_taken_or_shown_on_one_rank_alone_moves_nothing(order):
    """What a rank does for logging must not change its order: len, repr, remaining, state_dict."""
    with make(order) as quiet, make(order) as curious:
        for _ in range(2):
            for one, other in zip(quiet, curious, strict=True):
                assert rows(one) == rows(other)
                repr(curious), len(curious), curious.remaining, curious.state_dict()


def test_set_epoch_reaches_the_sampler_before_it_is_asked():
    sampler = EpochSampler(LENGTH)
    with gp.Loader(MemorySource(LENGTH), RECIPE, batch_size=4, sampler=sampler, backend="torchvision") as loader:
        for epoch in (3, 9):
            loader.set_epoch(epoch)
            list(loader)
        list(loader)
    assert sampler.told == [3, 9, 10]


def test_repeats_of_any_sampler_get_different_crops():
    with gp.Loader(
        MemorySource(LENGTH),
        gp.Recipe.train(size=16),
        batch_size=4,
        sampler=RASampler(range(LENGTH), 1, 0, round_to=4),
        sharding=gp.Sharding(rank=0, world_size=1, sampler_scope="rank"),
        fields=("image", "index", "valid"),
        backend="torchvision",
    ) as loader:
        found = [row for batch in loader for row in rows(batch)]
    crops = {}
    for index, _, left, _ in found:
        crops.setdefault(index, []).append(left)
    assert max(map(len, crops.values())) == 3
    assert any(len(set(lefts)) > 1 for lefts in crops.values())
    assert len({row[:2] for row in found}) == len(found)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"shuffle": True, "sampler": [1]}, "shuffle"),
        ({"shuffle": True, "sampler": gp.CostAware(np.ones(LENGTH))}, "shuffle"),
        ({"sharding": gp.Sharding(sampler_scope="rank")}, "sharding.sampler_scope"),
        ({"sharding": gp.Sharding(sampler_scope="rank"), "sampler": gp.Weighted([1])}, "sharding.sampler_scope"),
        ({"sampler": gp.Weighted([1, 2])}, "weights"),
        ({"sampler": gp.CostAware([1, 2])}, "cost"),
        ({"sampler": gp.LengthBuckets([1, 2])}, "lengths"),
        ({"shuffle": True, "sampler": gp.LengthBuckets(np.ones(LENGTH))}, "shuffle"),
        ({"sampler": [LENGTH]}, "sampler"),
        ({"sampler": [1], "sharding": gp.Sharding(order="shards")}, "sharding.order"),
        ({"sharding": gp.Sharding(sampler_scope="rank", order="shards")}, "sharding.sampler_scope"),
        ({"sharding": gp.Sharding(order="shards")}, "sharding.order"),
    ],
)
def test_sampler_that_conflicts_raises_naming_the_argument(arguments, field):
    with pytest.raises(ConfigError) as raised:
        gp.Loader(MemorySource(LENGTH), RECIPE, batch_size=4, backend="torchvision", **arguments)
    assert raised.value.field == field


# --- Pixels, with every backend ---

REAL = gp.Recipe.train(size=24, jitter=(0.4, 0.4, 0.4, 0.1))


def pixels(loader):
    return {
        (int(index), epoch): image
        for epoch in range(2)
        for images, indices in loader
        for image, index in zip(images.clone(), indices, strict=True)
    }


@available.each_backend
@pytest.mark.parametrize("change", [{}, {"batch_size": 5}, {"options": gp.Options(threads=1, prefetch=1)}])
def test_resume_keeps_every_pixel(image_folder, backend, change):
    arguments = {"batch_size": 3, "shuffle": True, "fields": ("image", "index"), "options": gp.Options(threads=2)}
    with available.loader(image_folder, REAL, backend, **arguments) as loader:
        expected = pixels(loader)
    with available.loader(image_folder, REAL, backend, **arguments) as loader:
        batches = iter(loader)
        found = {(int(i), 0): image for _ in range(2) for image, i in zip(*next(batches), strict=True)}
        state = saved(loader.state_dict())
    with available.loader(image_folder, REAL, backend, **(arguments | change)) as loader:
        loader.load_state_dict(state)
        rest = pixels(loader)
    assert len(found) == 6
    assert not found.keys() & rest.keys()
    found |= rest
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@available.each_backend
def test_resume_on_another_backend_keeps_pixels_within_parity(image_folder, backend):
    arguments = {"batch_size": 4, "shuffle": True, "fields": ("image", "index")}
    with available.loader(image_folder, REAL, "torchvision", **arguments) as loader:
        expected = pixels(loader)
        next(iter(loader))  # epoch 2
        loader.set_epoch(0)
        next(iter(loader))
        state = saved(loader.state_dict())
    with available.loader(image_folder, REAL, backend, **arguments) as loader:
        loader.load_state_dict(state)
        found = {(int(i), 0): image for images, indices in loader for image, i in zip(images, indices, strict=True)}
    assert len(found) == len({key for key in expected if key[1] == 0}) - 4
    # 0.05 LSB (PARITY: whole chain; jitter factors up to 1.4 here) over the smallest std, plus float32 rounding.
    worst = max(float((found[key] - expected[key]).abs().max()) for key in found)
    assert worst <= 0.05 / 255 / min(REAL.normalize.std) + 1e-5


def test_resume_with_the_data_set_moved_elsewhere_goes_on(image_folder, tmp_path):
    arguments = {"batch_size": 3, "shuffle": True, "backend": "torchvision", "fields": ("key",)}
    with gp.Loader(image_folder, REAL, **arguments) as loader:
        batches = iter(loader)
        seen = [key for _ in range(2) for key in next(batches)[0]]
        state = saved(loader.state_dict())
        rest = [key for batch in batches for key in batch[0]]
    moved = shutil.copytree(image_folder, tmp_path / "elsewhere" / "data")
    with gp.Loader(moved, REAL, **arguments) as loader:
        loader.load_state_dict(state)
        assert [key for batch in loader for key in batch[0]] == rest
    assert len(set(seen + rest)) == len(seen + rest)
    next(moved.rglob("*.JPEG")).unlink()
    with (
        gp.Loader(moved, REAL, **arguments) as loader,
        pytest.raises(StateError, match=f"another data set than {moved}"),
    ):
        loader.load_state_dict(state)
