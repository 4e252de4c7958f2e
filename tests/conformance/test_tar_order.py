"""`order="shards"` over real tar shards: the pixels of every other order, and bad samples replaced within a shard."""

import gc

import numpy as np
import pytest
import torch

import gpupipe as gp
from tests import available, images
from tests.sources.tars import write_tar

SIZES = (5, 1, 8, 3, 6)
STARTS = np.cumsum([0, *SIZES])
RECIPE = gp.Recipe.train(size=16, jitter=(0.4, 0.4, 0.4, 0.1))
SHARDS = gp.ShardOrder(lanes=4, window=3)
BAD = (0, 6, 9, 20)


def sample(number, *, bad=False):
    image = images.jpeg(images.photo(20 + number, 30, seed=number))
    key = f"{number:05}"
    return [(f"{key}.jpg", image[:100] if bad else image), (f"{key}.cls", str(number % 3))]


def write(folder, bad=()):
    for shard, (first, last) in enumerate(zip(STARTS[:-1].tolist(), STARTS[1:].tolist(), strict=True)):
        entries = [entry for number in range(first, last) for entry in sample(number, bad=number in bad)]
        write_tar(folder / f"train-{shard:03}.tar", *entries)
    return str(folder / "train-*.tar")


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    return write(tmp_path_factory.mktemp("tars"))


@pytest.fixture(scope="module")
def bad_tars(tmp_path_factory):
    return write(tmp_path_factory.mktemp("bad_tars"), BAD)


def pixels(loader):
    """Index -> image; no index comes twice."""
    rows = [row for images, indices in loader for row in zip(indices.tolist(), images.clone(), strict=True)]
    assert len(dict(rows)) == len(rows)
    return dict(rows)


@available.each_backend
def test_tar_shards_in_turn_have_the_samples_and_pixels_of_the_global_order(tars, backend):
    arguments = {"batch_size": 4, "shuffle": True, "seed": 5, "fields": ("image", "index")}
    with available.loader(tars, RECIPE, backend, **arguments) as loader:
        assert loader.dataset.shard_starts.tolist() == STARTS.tolist()
        expected = pixels(loader)
    found = {}
    for rank in range(2):
        sharding = gp.Sharding(rank=rank, world_size=2, pad="drop", order=SHARDS)
        with available.loader(tars, RECIPE, backend, sharding=sharding, **arguments) as loader:
            assert len(loader) == 3
            found |= pixels(loader)
    assert len(found) == len(expected) - 1 == sum(SIZES) - 1
    assert all(torch.equal(image, expected[index]) for index, image in found.items())


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_tar_shards_in_one_lane_without_shuffling_come_as_webdataset_reads_them(tars):
    webdataset = pytest.importorskip("webdataset")
    folder = tars.rpartition("/")[0]
    urls = [f"{folder}/train-{shard:03}.tar" for shard in range(len(SIZES))]
    dataset = webdataset.WebDataset(urls, shardshuffle=False)
    theirs = [each["__key__"] for each in dataset]
    del dataset
    gc.collect()  # it leaves the shards open
    sharding = gp.Sharding(order=gp.ShardOrder(lanes=1))
    with gp.Loader(tars, RECIPE, batch_size=4, fields=("key",), sharding=sharding, backend="torchvision") as loader:
        assert [key for (keys,) in loader for key in keys] == theirs


@available.each_backend
def test_substitutes_of_bad_samples_come_from_their_shard_on_any_ranks_and_after_a_resume(bad_tars, backend):
    arguments = {
        "batch_size": 2,
        "shuffle": True,
        "seed": 5,
        "fields": ("index", "valid"),
        "on_error": gp.OnError("substitute", max_bad=1.0),
    }
    found = []
    for world_size in (1, 2, 4):
        substitutes = {}
        for rank in range(world_size):
            sharding = gp.Sharding(rank=rank, world_size=world_size, order=SHARDS)
            with available.loader(bad_tars, RECIPE, backend, sharding=sharding, **arguments) as loader:
                list(loader)
                substitutes |= {bad.index: bad.substitute for bad in loader.errors if bad.substitute is not None}
        found.append(substitutes)
    assert found[0] == found[1] == found[2]
    assert found[0].keys() == set(BAD)
    for bad, substitute in found[0].items():
        assert substitute not in BAD
        assert np.searchsorted(STARTS, bad, side="right") == np.searchsorted(STARTS, substitute, side="right")
    sharding = gp.Sharding(order=SHARDS)
    with available.loader(bad_tars, RECIPE, backend, sharding=sharding, **arguments) as loader:
        batches = iter(loader)
        seen = [next(batches)[0].tolist() for _ in range(4)]
        state = loader.state_dict()
        rest = [batch[0].tolist() for batch in batches]
    with available.loader(bad_tars, RECIPE, backend, sharding=sharding, **arguments) as loader:
        loader.load_state_dict(state)
        assert [batch[0].tolist() for batch in loader] == rest
    assert sorted(index for batch in seen + rest for index in batch) == sorted(
        [*(set(range(sum(SIZES))) - set(BAD)), *found[0].values()]
    )


def test_bad_sample_alone_in_its_shard_is_replaced_by_any_other(tmp_path):
    with gp.Loader(
        write(tmp_path, bad=(STARTS[1],)),
        RECIPE,
        batch_size=4,
        backend="torchvision",
        sharding=gp.Sharding(order=SHARDS),
        on_error=gp.OnError("substitute", max_bad=1.0),
    ) as loader:
        rows = sum(len(images) for images, _ in loader)
        (bad,) = loader.errors
    assert rows == sum(SIZES)
    assert bad.index == STARTS[1]
    assert bad.path.endswith("train-001.tar")
    assert bad.substitute not in (None, STARTS[1])
