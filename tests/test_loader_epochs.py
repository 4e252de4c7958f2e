"""The rules of epochs, over arbitrary uses of a loader: a model that knows only the rules, and torch's sampler."""

from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch.utils.data import DistributedSampler

import gpupipe as gp
from gpupipe import backends
from gpupipe.errors import StateError
from tests.fakes import FakeBackend, MemorySource

RECIPE = gp.Recipe.train(size=16)
LENGTH, BATCH, WORLD, RANK, SEED = 23, 3, 2, 1, 5
BATCHES = 4  # of 12 rows on each rank


@pytest.fixture(autouse=True, scope="module")
def fake_backend():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "create", lambda *_, **__: FakeBackend())
        yield


def make(length=LENGTH, **arguments):
    defaults = {"batch_size": BATCH, "shuffle": True, "seed": SEED, "fields": ("index",), "backend": "torchvision"}
    return gp.Loader(MemorySource(length), RECIPE, **(defaults | arguments))


def expected(epoch):
    """The batches of an epoch, by torch."""
    sampler = DistributedSampler(range(LENGTH), num_replicas=WORLD, rank=RANK, seed=SEED)
    sampler.set_epoch(epoch)
    rows = list(sampler)
    return [rows[first : first + BATCH] for first in range(0, len(rows), BATCH)]


class Epochs(RuleBasedStateMachine):
    """`epoch` and `start` are where the next iter() begins unless `delivered` batches of one have moved it on."""

    def __init__(self):
        super().__init__()
        self.loader = self.new_loader()
        self.epoch, self.start, self.delivered = 0, 0, 0
        self.iterator = None

    def new_loader(self):
        return make(sharding=gp.Sharding(rank=RANK, world_size=WORLD))

    @rule()
    def begin(self):
        older = self.iterator
        self.iterator = iter(self.loader)
        if self.delivered:
            self.epoch, self.start, self.delivered = self.epoch + 1, 0, 0
        if older is not None:
            with pytest.raises((StateError, StopIteration)):
                next(older)

    @precondition(lambda self: self.iterator is not None)
    @rule(count=st.integers(1, BATCHES + 1))
    def take(self, count):
        batches = [batch[0].tolist() for batch in islice(self.iterator, count)]
        first = self.start + self.delivered
        assert batches == expected(self.epoch)[first : first + count]
        self.delivered += len(batches)

    @rule(epoch=st.integers(0, 3))
    def set_epoch(self, epoch):
        self.loader.set_epoch(epoch)
        if epoch != self.epoch or self.delivered:
            self.epoch, self.start, self.delivered, self.iterator = epoch, 0, 0, None

    @rule()
    def save_and_load_elsewhere(self):
        state = self.loader.state_dict()
        self.loader.close()
        self.loader = self.new_loader()
        self.loader.load_state_dict(state)
        self.start, self.delivered, self.iterator = self.start + self.delivered, 0, None
        if self.start == BATCHES:
            self.epoch, self.start = self.epoch + 1, 0

    @invariant()
    def says_where_it_is(self):
        assert self.loader.epoch == self.epoch
        assert self.loader.remaining == BATCHES - self.start - self.delivered
        assert len(self.loader) == BATCHES

    def teardown(self):
        self.loader.close()


TestEpochs = Epochs.TestCase


@given(
    length=st.integers(1, 30),
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 7),
    pad=st.sampled_from(["repeat", "drop", "mask"]),
    drop_last=st.booleans(),
    breaks=st.lists(st.integers(1, 4), max_size=3),
    weighted=st.booleans(),
)
def test_len_is_what_every_rank_yields(length, world_size, batch_size, pad, drop_last, breaks, weighted):
    drop_last = drop_last and pad != "mask"
    order = {"shuffle": False, "sampler": gp.Weighted(np.ones(length))} if weighted else {}
    counts = set()
    for rank in {0, world_size - 1}:
        sharding = gp.Sharding(rank=rank, world_size=world_size, pad=pad)
        with make(length, batch_size=batch_size, drop_last=drop_last, sharding=sharding, **order) as loader:
            for stop in breaks:
                list(islice(loader, stop))
            for _ in range(3):
                sizes = [len(batch[0]) for batch in loader]
                assert len(sizes) == len(loader)
                assert all(size == batch_size for size in (sizes if drop_last or pad == "mask" else sizes[:-1]))
                counts.add(tuple(sizes))
    assert len(counts) == 1


@given(
    length=st.integers(1, 40),
    world_size=st.integers(1, 12),
    batch_size=st.integers(1, 5),
    shuffle=st.booleans(),
)
def test_mask_over_all_ranks_makes_each_sample_valid_once(length, world_size, batch_size, shuffle):
    seen, counts = [], set()
    for rank in range(world_size):
        sharding = gp.Sharding(rank=rank, world_size=world_size, pad="mask")
        fields = ("index", "valid")
        with make(length, batch_size=batch_size, shuffle=shuffle, sharding=sharding, fields=fields) as loader:
            batches = list(loader)
        counts.add(len(batches))
        seen += [int(i) for index, valid in batches for i, good in zip(index, valid, strict=True) if good]
    assert sorted(seen) == list(range(length))
    assert len(counts) == 1
