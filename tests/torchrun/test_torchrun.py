"""Real processes over gloo: what the ranks were given together, and that none waits for the others for ever."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

import gpupipe as gp
from tests import available
from tests.fakes import in_shards
from tests.torchrun.run import guarded, torchrun
from tests.torchrun.worker import SHARD_SIZES, SHARDS

HERE = Path(__file__).parent
SAMPLES = 15  # not divisible by two ranks, nor by any batch size used
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo's loopback device has another name elsewhere")


@pytest.fixture(scope="module")
def run(image_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("torchrun")
    there = [backend for backend in available.ON_CPU if available.why_not(backend) is None]
    torchrun(HERE / "worker.py", image_folder, out, *there)
    return json.loads((out / "found.json").read_text()) | {"out": out}


@pytest.fixture
def found(run, backend):
    available.need(backend)
    return run[backend]


def rows_of(rank):
    return [tuple(row) for batch in rank for row in batch]


def valid(ranks):
    return [row for rank in ranks for row in rows_of(rank) if row[1]]


def totals(loader):
    """Index -> sum of its pixels, of a loader of images and indices."""
    return {int(i): float(image.double().sum()) for batch in loader for image, i in zip(*batch, strict=True)}


@available.each_backend
@pytest.mark.parametrize("pad", ["repeat", "drop", "mask"])
def test_ranks_together_have_each_sample_once(found, pad):
    ranks = found["epochs"][pad]
    batches = [rank["batches"] for rank in ranks]
    assert [len(rank) for rank in batches] == [rank["len"] for rank in ranks]
    assert len({rank["len"] for rank in ranks}) == 1
    assert {rank["global"] for rank in ranks} == {4}
    indices = sorted(index for index, _, _ in valid(batches))
    if pad == "drop":
        assert len(indices) == len(set(indices)) == SAMPLES - 1
    else:
        assert indices == list(range(SAMPLES))


@available.each_backend
def test_slow_rank_gets_what_it_would_get_anyway(found):
    assert found["slow_rank"] == [rank["batches"] for rank in found["epochs"]["repeat"]]


@available.each_backend
def test_early_stop_of_one_condition_stops_all_and_the_next_epoch_is_whole(found):
    for first, second in found["early_stop"]:
        assert len(first) == 2
        assert len(second) == 4
    stopped, whole = zip(*found["early_stop"], strict=True)
    assert [rank[:2] for rank in (each["batches"] for each in found["epochs"]["repeat"])] == list(stopped)
    assert sorted(index for index, _, _ in valid(whole)) == list(range(SAMPLES))
    assert [index for index, _, _ in valid(whole)] != [
        index for index, _, _ in valid([rank["batches"] for rank in found["epochs"]["repeat"]])
    ]


@available.each_backend
def test_resume_from_the_checkpoint_of_rank_0_goes_on_on_every_rank(found):
    for rank in found["resume"]:
        assert rank["before"] + rank["after"] == rank["straight"]


@available.each_backend
def test_resume_of_two_ranks_with_one_delivers_the_rest_with_the_same_pixels(run, found, backend, image_folder):
    straight = {index: total for index, _, total in valid([rank["straight"] for rank in found["resume"]])}
    before = {row[0] for row in valid([rank["before"] for rank in found["resume"]])}
    fields = ("image", "index")
    with available.loader(
        image_folder, gp.Recipe.train(size=16), backend, batch_size=3, seed=1, shuffle=True, fields=fields
    ) as loader:
        loader.load_state_dict(torch.load(run["out"] / f"{backend}.pt", weights_only=True))
        rest = totals(loader)
    assert not before & rest.keys()
    assert before | rest.keys() == set(range(SAMPLES))
    assert rest == {index: straight[index] for index in rest}


@available.each_backend
def test_train_and_eval_at_once_do_not_disturb_each_other(found):
    train, evaluate = zip(*[(rank["train"], rank["eval"]) for rank in found["train_and_eval"]], strict=True)
    assert list(train) == [rank["batches"] for rank in found["epochs"]["repeat"]]
    assert sorted(index for index, _, _ in valid(evaluate)) == list(range(SAMPLES))
    assert {len(rank) for rank in evaluate} == {2}


@available.each_backend
def test_distributed_sampler_of_each_rank_gives_the_default_order_and_pixels(found):
    """Its padding is counted over the ranks, as in the default order: there is no difference left."""
    theirs = [[(index, total) for index, _, total in rows_of(rank)] for rank in found["handed_in"]["distributed"]]
    default = [[(index, total) for index, _, total in rows_of(rank["batches"])] for rank in found["epochs"]["repeat"]]
    assert theirs == default


@available.each_backend
def test_repeated_augmentation_gives_each_repeat_another_crop_over_all_ranks(found):
    rows = [row for rank in found["handed_in"]["augmented"] for row in rows_of(rank)]
    assert max(Counter(index for index, _, _ in rows).values()) >= 2
    assert len({(index, total) for index, _, total in rows}) == len(rows)
    assert found["handed_in"]["augmented, resumed"] == found["handed_in"]["augmented"]


@available.each_backend
def test_weighted_order_is_dealt_without_repeating_a_crop(found):
    rows = [row for rank in found["handed_in"]["weighted"] for row in rows_of(rank)]
    assert len({(index, total) for index, _, total in rows}) == len(rows) == SAMPLES + 1


@available.each_backend
@pytest.mark.parametrize("pad", ["repeat", "drop", "mask"])
def test_shards_are_shared_out_and_resumed_like_every_order(found, pad):
    ranks = found["shards"][pad]
    assert [[len(batch) for batch in rank] for rank in ranks] == 2 * [[len(batch) for batch in ranks[0]]]
    assert found["shards"][f"{pad}, resumed"] == ranks
    indices = sorted(index for index, _, _ in valid(ranks))
    if pad == "drop":
        assert len(indices) == len(set(indices)) == SAMPLES - 1
    else:
        assert indices == list(range(SAMPLES))


@available.each_backend
def test_shards_of_two_ranks_resumed_with_one_deliver_the_rest_with_the_same_pixels(run, found, backend, image_folder):
    straight = {index: total for index, _, total in valid(found["shards"]["repeat"])}
    before = {row[0] for row in valid(found["shards"]["before"])}
    with available.loader(
        in_shards(image_folder, SHARD_SIZES),
        gp.Recipe.train(size=16),
        backend,
        batch_size=3,
        seed=1,
        shuffle=True,
        sharding=gp.Sharding(order=SHARDS),
        fields=("image", "index"),
    ) as loader:
        loader.load_state_dict(torch.load(run["out"] / f"{backend} shards.pt", weights_only=True))
        rest = totals(loader)
    assert not before & rest.keys()
    assert before | rest.keys() == set(range(SAMPLES))
    assert rest == {index: straight[index] for index in rest}


@pytest.mark.parametrize("case", ["indices", "seeds", "weights", "costs", "buckets", "shards"])
def test_orders_that_differ_between_ranks_raise_on_every_rank(run, case):
    assert all("must be the same on every rank, but rank 1 of 2" in str(text) for text in run["disagreements"][case])


def test_samplers_of_different_length_raise_on_every_rank(run):
    assert all("yield [3, 4] indices" in str(text) for text in run["disagreements"]["lengths"])


@pytest.mark.parametrize("case", ["one fails", "one fails, own parts"])
def test_sampler_that_fails_on_one_rank_raises_on_every_rank(run, case):
    theirs, own = run["disagreements"][case]
    assert "rank 1 of 2 could not draw the order" in theirs
    assert "division" in own


def test_guard_ends_what_hangs(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text("import time; print('hanging', flush=True); time.sleep(600)")
    with pytest.raises(pytest.fail.Exception, match="still running after 1 s"):
        guarded([sys.executable, str(script)], guard_s=1)
