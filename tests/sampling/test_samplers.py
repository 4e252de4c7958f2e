import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DistributedSampler

from gpupipe.errors import ConfigError
from gpupipe.sampling.samplers import DefaultOrdering, RankRows, Sharding


def rank_indices(length, *, world_size, rank, pad, shuffle, seed, epoch):
    order = DefaultOrdering(length, shuffle=shuffle, seed=seed).draw(epoch)
    rows = RankRows.deal(length, start=0, rank=rank, world_size=world_size, pad=pad, batch_size=4)
    return order.at(rows.positions(0, rows.count))


def torch_indices(length, *, world_size, rank, pad, shuffle, seed, epoch):
    sampler = DistributedSampler(
        range(length), num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed, drop_last=pad == "drop"
    )
    sampler.set_epoch(epoch)
    return list(sampler)


@given(
    length=st.integers(1, 50),
    world_size=st.integers(1, 60),
    pad=st.sampled_from(["repeat", "drop"]),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**31),
    epoch=st.integers(0, 1000),
    data=st.data(),
)
def test_order_for_any_size_equals_distributed_sampler(length, world_size, pad, shuffle, seed, epoch, data):
    rank = data.draw(st.integers(0, world_size - 1))
    arguments = {
        "world_size": world_size, "rank": rank, "pad": pad, "shuffle": shuffle, "seed": seed, "epoch": epoch
    }  # fmt: skip
    indices, _ = rank_indices(length, **arguments)
    assert indices.tolist() == torch_indices(length, **arguments)


@pytest.mark.parametrize("pad", ["repeat", "drop"])
@pytest.mark.parametrize(("world_size", "rank"), [(1, 0), (8, 7), (7, 3)])
def test_order_of_imagenet_equals_distributed_sampler(pad, world_size, rank):
    arguments = {"world_size": world_size, "rank": rank, "pad": pad, "shuffle": True, "seed": 3, "epoch": 2}
    indices, _ = rank_indices(1_281_167, **arguments)
    np.testing.assert_array_equal(indices, torch_indices(1_281_167, **arguments))


def test_order_of_ten_million_equals_distributed_sampler():
    arguments = {"world_size": 8, "rank": 5, "pad": "repeat", "shuffle": True, "seed": 0, "epoch": 7}
    indices, _ = rank_indices(10_000_000, **arguments)
    np.testing.assert_array_equal(indices, torch_indices(10_000_000, **arguments))


@pytest.mark.skipif(sys.platform != "linux", reason="the peak is read from /proc")
def test_epoch_of_ten_million_takes_little_more_memory_than_its_array():
    """At most 100 MB above it, over three epochs and a state; torch's own sampler takes 400 MB for one epoch.

    In a process of its own, by the system's account: torch's memory does not show in tracemalloc.
    """
    script = """
        import pathlib
        import gpupipe as gp
        from gpupipe import backends
        from tests.fakes import FakeBackend, MemorySource

        def peak_bytes():
            lines = pathlib.Path("/proc/self/status").read_text().splitlines()
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

        def run(samples):
            arguments = {"batch_size": 64, "shuffle": True, "backend": "torchvision"}
            sharding = gp.Sharding(rank=0, world_size=8)
            with gp.Loader(MemorySource(samples), gp.Recipe.train(16), sharding=sharding, **arguments) as loader:
                for _ in range(3):
                    for _, _ in zip(range(3), loader):
                        loader.state_dict(), len(loader)

        backends.create = lambda *_, **__: FakeBackend()
        run(1000)
        before = peak_bytes()
        run(10_000_000)
        print(peak_bytes() - before - 80_000_000)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True, timeout=120,
        cwd=Path(__file__).parent.parent.parent,
    )  # fmt: skip
    assert int(done.stdout) < 100e6


@given(
    length=st.integers(1, 60),
    world_size=st.integers(1, 9),
    batch_size=st.integers(1, 9),
    start=st.integers(0, 60),
)
def test_mask_for_any_size_makes_each_sample_valid_once(length, world_size, batch_size, start):
    start = min(start, length)
    seen, counts = [], set()
    order = DefaultOrdering(length, shuffle=True, seed=1).draw(0)
    for rank in range(world_size):
        rows = RankRows.deal(length, start=start, rank=rank, world_size=world_size, pad="mask", batch_size=batch_size)
        counts.add(rows.count)
        positions = rows.positions(0, rows.count)
        seen += order.at(positions)[0][positions < length].tolist()
    assert len(counts) == 1
    assert counts.pop() % batch_size == 0
    left = order.at(np.arange(start, length))[0].tolist()
    assert sorted(seen) == sorted(left)


@given(length=st.integers(1, 40), world_size=st.integers(1, 9), start=st.integers(0, 40), batches=st.integers(0, 20))
def test_delivered_after_some_rows_leaves_exactly_the_rest(length, world_size, start, batches):
    """What all ranks have taken and what a later deal hands out together make the epoch, whatever the new world."""
    start = min(start, length)
    old = [
        RankRows.deal(length, start=start, rank=rank, world_size=world_size, pad="repeat", batch_size=3)
        for rank in range(world_size)
    ]
    rows = min(3 * batches, old[0].count)
    taken = {p for rank in old for p in rank.positions(0, rows).tolist() if p < length}
    position = old[0].delivered(rows)
    for new_world in (1, 2, 3, 5):
        rest = set()
        for rank in range(new_world):
            dealt = RankRows.deal(length, start=position, rank=rank, world_size=new_world, pad="mask", batch_size=1)
            rest |= {p for p in dealt.positions(0, dealt.count).tolist() if p < length}
        assert taken | rest == set(range(start, length))
        assert not taken & rest


def test_occurrence_of_padding_counts_earlier_ones():
    indices, occurrences = rank_indices(3, world_size=8, rank=7, pad="repeat", shuffle=False, seed=0, epoch=0)
    assert (indices.tolist(), occurrences.tolist()) == ([1], [2])


def test_order_needs_no_array_when_nothing_is_shuffled():
    order = DefaultOrdering(10**15, shuffle=False, seed=0).draw(0)
    assert order.at(np.array([10**15 - 1]))[0].tolist() == [10**15 - 1]


def test_order_leaves_the_global_generator_alone():
    before = torch.random.get_rng_state()
    DefaultOrdering(100, shuffle=True, seed=0).draw(0)
    assert torch.equal(before, torch.random.get_rng_state())


def test_sharding_with_unknown_pad_raises():
    with pytest.raises(ConfigError, match=r"sharding\.pad='zero'"):
        Sharding(pad="zero")
