"""Repeated augmentation: the order of torchvision's reference, and another crop each time."""

import numpy as np
import pytest
import torch

import gpupipe as gp
from gpupipe import backends
from gpupipe.errors import ConfigError, StateError
from tests.fakes import FakeBackend, MemorySource

RECIPE = gp.Recipe.train(size=16)


class ReferenceSampler(torch.utils.data.Sampler):
    """What torchvision's classification reference calls RASampler, by its description: of each rank's own."""

    def __init__(self, samples, rank, world_size, repeats, seed=0):
        self.samples, self.rank, self.world_size, self.repeats, self.seed = samples, rank, world_size, repeats, seed
        self.epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.samples // 256 * 256 // self.world_size

    def __iter__(self):
        shuffled = torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.seed + self.epoch))
        every = shuffled.repeat_interleave(self.repeats).tolist()
        total = -(-len(every) // self.world_size) * self.world_size
        every += every[: total - len(every)]
        return iter(every[self.rank : total : self.world_size][: len(self)])


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(backends, "create", lambda *_, **__: FakeBackend())


def seen(loader):
    """(index, occurrence, left side of the crop) of every row of an epoch, in order."""
    return [tuple(row) for images, _ in loader for row in images[:, :, 0, 0].long().tolist()]


def make(samples, sampler, rank, world_size, scope="global", **arguments):
    sharding = gp.Sharding(rank=rank, world_size=world_size, sampler_scope=scope)
    return gp.Loader(MemorySource(samples), RECIPE, batch_size=16, sampler=sampler, sharding=sharding, **arguments)


@pytest.mark.parametrize(("world_size", "repeats"), [(1, 3), (2, 3), (4, 4), (8, 4)])
def test_order_of_each_rank_is_that_of_the_reference(world_size, repeats):
    for rank in {0, world_size - 1}:
        reference = ReferenceSampler(700, rank, world_size, repeats, seed=5)
        with make(700, gp.Repeated(repeats, num_samples=512), rank, world_size, seed=5) as loader:
            for epoch in (0, 1):
                reference.set_epoch(epoch)
                assert [index for index, *_ in seen(loader)] == list(reference)


@pytest.mark.parametrize("own", [True, False])
def test_every_repeat_over_all_ranks_is_another_crop(own):
    rows = []
    for rank in range(4):
        sampler = gp.Repeated(4, num_samples=256) if own else ReferenceSampler(300, rank, 4, 4)
        with make(300, sampler, rank, 4, "global" if own else "rank") as loader:
            rows += seen(loader)
    assert len(rows) == 256
    assert len({index for index, *_ in rows}) == 64
    assert len({(index, occurrence) for index, occurrence, _ in rows}) == 256
    lefts = {index: {left for other, _, left in rows if other == index} for index, *_ in rows}
    assert np.mean([len(each) for each in lefts.values()]) > 3  # of 4 crops, two may begin in the same column


def test_resume_goes_on_where_it_stopped():
    with make(300, gp.Repeated(3), 0, 1) as loader:
        whole = seen(loader)
        assert len(whole) == 300
    with make(300, gp.Repeated(3), 0, 1) as loader:
        batches = iter(loader)
        begun = [next(batches)[0] for _ in range(4)]
        state = loader.state_dict()
    with make(300, gp.Repeated(3), 0, 1) as loader:
        loader.load_state_dict(state)
        assert seen(loader) == whole[sum(map(len, begun)) :]
    with make(300, gp.Repeated(4), 0, 1) as loader, pytest.raises(StateError, match="repeats was 3 and is 4"):
        loader.load_state_dict(state)


@pytest.mark.parametrize("arguments", [{"repeats": 0}, {"repeats": 2.5}, {"num_samples": 0}])
def test_arguments_that_cannot_work_are_refused(arguments):
    with pytest.raises(ConfigError, match="must be an integer"):
        gp.Repeated(**arguments)


def test_more_rows_than_repeats_make_are_refused():
    with pytest.raises(ConfigError, match="num_samples=31 is more than 10 samples with 3 repeats"):
        make(10, gp.Repeated(3, num_samples=31), 0, 1)
