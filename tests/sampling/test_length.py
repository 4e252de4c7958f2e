"""Batches of similar length: exact epochs, little padding, ranks in step, and the same in a torch DataLoader."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, DistributedSampler, WeightedRandomSampler

import gpupipe as gp
from gpupipe import backends
from gpupipe.errors import ConfigError, StateError
from gpupipe.sampling.length import LengthOrdering, bucketed_order
from tests.fakes import FakeBackend, MemorySource

LENGTHS = np.random.default_rng(0).lognormal(3.5, 0.7, 4096).astype(np.int64) + 1


def ordering(lengths=LENGTHS, batch_size=4, world_size=1, **config):
    made = gp.LengthBuckets(lengths, **({"window": 8} | config))
    return LengthOrdering(made, len(lengths), seed=0, batch_size=batch_size, world_size=world_size)


def steps_of(order, batch_size, world_size):
    """(steps, world_size, batch_size): whole batches of all ranks, dealt as the loader deals them."""
    steps = len(order) // (batch_size * world_size)
    return order[: steps * batch_size * world_size].reshape(steps, batch_size, world_size).transpose(0, 2, 1)


def padding(lengths, batches):
    """Share of a padded batch's values that are padding, over all batches."""
    lengths = lengths[batches]
    return 1 - lengths.sum() / (lengths.max(axis=-1) * lengths.shape[-1]).sum()


@given(
    lengths=st.lists(st.integers(0, 50), min_size=1, max_size=200),
    batch_size=st.integers(1, 9),
    world_size=st.integers(1, 5),
    window=st.integers(1, 40),
    seed=st.integers(0, 100),
    noise=st.sampled_from([0.0, 0.1, 0.9]),
)
def test_bucketed_order_of_any_lengths_holds_each_sample_once(lengths, batch_size, world_size, window, seed, noise):
    arguments = {"seed": seed, "batch_size": batch_size, "world_size": world_size, "window": window, "noise": noise}
    order = bucketed_order(np.array(lengths, np.float64), **arguments)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    assert order.tolist() == bucketed_order(np.array(lengths, np.float64), **arguments).tolist()
    plain = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(seed)).numpy()
    whole = len(lengths) // (batch_size * world_size) * batch_size * world_size
    assert order[whole:].tolist() == plain[whole:].tolist()


@pytest.mark.parametrize("world_size", [1, 8])
def test_bucketed_order_has_little_padding_and_ranks_of_similar_length(world_size):
    plain = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(1)).numpy()
    found = bucketed_order(LENGTHS.astype(float), seed=1, batch_size=32, world_size=world_size, window=64)
    before, after = (steps_of(order, 32, world_size) for order in (plain, found))
    assert padding(LENGTHS, after) < padding(LENGTHS, before) / 5
    # A step lasts as long as its longest batch: with the padding that the ranks wait for, too.
    before, after = (steps.reshape(len(steps), -1) for steps in (before, after))
    assert padding(LENGTHS, after) < padding(LENGTHS, before) / 2


def test_bucketed_order_shuffles_steps_ranks_and_rows():
    steps = steps_of(bucketed_order(LENGTHS.astype(float), seed=1, batch_size=32, world_size=4, window=64), 32, 4)
    longest = LENGTHS[steps].max(axis=2)
    assert abs(np.corrcoef(np.arange(len(steps)), longest.max(axis=1))[0, 1]) < 0.5
    assert set(longest.argmax(axis=1)) == {0, 1, 2, 3}
    differences = np.diff(LENGTHS[steps], axis=2)
    assert 0.4 < (differences > 0).sum() / (differences != 0).sum() < 0.6


def test_noise_lets_samples_of_one_window_meet_others_each_epoch():
    """One window holds all samples: sorted exactly, the same ones meet for ever."""
    lengths = np.arange(1, 257, dtype=float)

    def batches(seed, noise):
        order = bucketed_order(lengths, seed=seed, batch_size=16, world_size=1, window=64, noise=noise)
        return {frozenset(batch) for batch in order.reshape(-1, 16).tolist()}

    assert batches(0, 0.0) == batches(1, 0.0)
    assert not batches(0, 0.1) & batches(1, 0.1)


def test_window_of_one_batch_is_plain_shuffling():
    order = bucketed_order(LENGTHS.astype(float), seed=3, batch_size=16, world_size=1, window=1)
    plain = torch.randperm(len(LENGTHS), generator=torch.Generator().manual_seed(3)).numpy()
    assert {frozenset(b) for b in order.reshape(-1, 16).tolist()} == {
        frozenset(b) for b in plain.reshape(-1, 16).tolist()
    }


def test_length_ordering_restored_in_mid_epoch_keeps_the_old_batches():
    old, new = ordering(batch_size=4, world_size=2), ordering(batch_size=16)
    order = new.restore(old.draw(3).definition(), 3, begun=True)
    assert order.indices.tolist() == old.draw(3).indices.tolist()
    assert order.definition() == old.definition()
    assert new.restore(old.draw(3).definition(), 3, begun=False) is None
    with pytest.raises(StateError, match="lengths was"):
        ordering(LENGTHS + 1).restore(old.definition(), 0, begun=False)
    with pytest.raises(StateError, match=r"noise was 0.1 and is 0.2 here"):
        ordering(noise=0.2).restore(old.definition(), 0, begun=False)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"lengths": [1, -2]}, "lengths"),
        ({"lengths": [[1]]}, "lengths"),
        ({"lengths": [1], "window": 0}, "window"),
        ({"lengths": [1], "window": 2.0}, "window"),
        ({"lengths": [1], "noise": 1}, "noise"),
        ({"lengths": [1], "noise": -0.1}, "noise"),
        ({"lengths": [1], "noise": True}, "noise"),
    ],
)
def test_length_buckets_with_impossible_values_raises_naming_them(arguments, field):
    with pytest.raises(ConfigError, match=field) as raised:
        gp.LengthBuckets(**arguments)
    assert raised.value.field == field


def test_loader_with_length_buckets_delivers_each_sample_once_over_ranks(monkeypatch):
    monkeypatch.setattr(backends, "create", lambda *_, **__: FakeBackend())
    lengths = LENGTHS[:40]
    steps = []
    for rank in range(2):
        with gp.Loader(
            MemorySource(40),
            gp.Recipe.train(size=16),
            batch_size=5,
            sampler=gp.LengthBuckets(lengths, window=4),
            fields=("index",),
            backend="torchvision",
            sharding=gp.Sharding(rank=rank, world_size=2),
        ) as loader:
            steps.append([batch[0].tolist() for batch in loader])
    assert sorted(index for rank in steps for batch in rank for index in batch) == list(range(40))
    made = ordering(lengths, batch_size=5, world_size=2, window=4).draw(0).indices
    assert steps_of(made, 5, 2).transpose(1, 0, 2).tolist() == steps


# --- BatchSampler ---


@dataclass
class Sentences:
    lengths: np.ndarray

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        return {"index": index, "tokens": torch.ones(self.lengths[index], dtype=torch.int64)}


@pytest.mark.parametrize("pad", ["repeat", "drop"])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", [1, 3])
def test_batch_sampler_covers_the_data_set_over_ranks(pad, drop_last, world_size):
    lengths = LENGTHS[:50]
    samplers = [
        gp.BatchSampler(
            gp.LengthBuckets(lengths, window=4),
            batch_size=4,
            seed=7,
            drop_last=drop_last,
            sharding=gp.Sharding(rank=rank, world_size=world_size, pad=pad),
        )
        for rank in range(world_size)
    ]
    torchs = DistributedSampler(range(50), world_size, 0, drop_last=pad == "drop")
    for epoch in range(2):
        found = [list(sampler) for sampler in samplers]
        assert {sampler.epoch for sampler in samplers} == {epoch}
        assert {len(batches) for batches in found} == {len(samplers[0])}
        rows = len(torchs) // 4 * 4 if drop_last else len(torchs)
        assert {sum(map(len, batches)) for batches in found} == {rows}
        indices = [index for batches in found for batch in batches for index in batch]
        if not drop_last and pad == "repeat":
            assert set(indices) == set(range(50))
        if pad == "drop":
            assert len(set(indices)) == len(indices)
    assert found[0] != list(samplers[0])  # the next epoch
    samplers[0].set_epoch(1)
    assert found[0] == list(samplers[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_batch_sampler_in_a_dataloader_resumes_where_it_was(workers):
    data = Sentences(LENGTHS[:60])

    def loader():
        sampler = gp.BatchSampler(gp.LengthBuckets(data.lengths, window=4), batch_size=4, seed=1)
        spec = gp.Collate(columns={"tokens": gp.Pad(multiple=8)})
        return sampler, DataLoader(data, batch_sampler=sampler, collate_fn=spec, num_workers=workers)

    _, whole = loader()
    straight = [batch["index"].tolist() for _ in range(2) for batch in whole]
    assert len(straight) == 2 * len(whole) == 30
    sampler, resumed = loader()
    sampler.set_epoch(0, start=4)
    found = [batch["index"].tolist() for batch in resumed]
    found += [batch["index"].tolist() for batch in resumed]
    assert found == straight[4:]
    sampler.set_epoch(1, start=14)
    assert [batch["index"].tolist() for batch in resumed] == straight[-1:]


def test_batch_sampler_that_was_begun_and_left_takes_the_next_epoch():
    sampler = gp.BatchSampler(gp.LengthBuckets(LENGTHS), batch_size=64)
    first = next(iter(sampler))
    iter(sampler)  # nothing was taken from it
    assert next(iter(sampler)) != first
    assert sampler.epoch == 1 or sampler.epoch == 2
    sampler.set_epoch(0)
    assert next(iter(sampler)) == first


def test_batch_sampler_takes_the_other_orders():
    weights = np.arange(1, 21)
    found = list(gp.BatchSampler(gp.Weighted(weights), batch_size=8, seed=5))
    expected = list(WeightedRandomSampler(weights, 20, generator=torch.Generator().manual_seed(5)))
    assert [index for batch in found for index in batch] == expected
    found = list(gp.BatchSampler(gp.CostAware(weights), batch_size=8))
    assert sorted(index for batch in found for index in batch) == list(range(20))


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 1.0}, "batch_size"),
        ({"sampler": [1, 2]}, "sampler"),
        ({"sampler": gp.CostAware("bytes")}, "sampler"),
        ({"sharding": gp.Sharding(pad="mask")}, "sharding.pad"),
        ({"seed": -1}, "seed"),
    ],
    ids=str,
)
def test_batch_sampler_with_impossible_values_raises_naming_them(arguments, field):
    with pytest.raises(ConfigError) as raised:
        gp.BatchSampler(**({"sampler": gp.LengthBuckets([1, 2]), "batch_size": 1} | arguments))
    assert raised.value.field == field


@pytest.mark.parametrize(("epoch", "start", "field"), [(-1, 0, "epoch"), (True, 0, "epoch"), (0, 1.5, "start")])
def test_batch_sampler_set_epoch_with_wrong_values_raises(epoch, start, field):
    with pytest.raises(ConfigError, match=field):
        gp.BatchSampler(gp.LengthBuckets([1, 2]), batch_size=1).set_epoch(epoch, start)
