"""Two real processes, and all bad files on one of them: neither waits for the other, and each gets what it should."""

import json
import sys
from pathlib import Path

import pytest

import gpupipe as gp
from tests import available
from tests.torchrun.bad_files import BAD, loader, rows, substitutes
from tests.torchrun.run import torchrun

SAMPLES = 15
DEALT = (list(range(0, SAMPLES, 2)), [*range(1, SAMPLES, 2), 0])
PADDING = (1, 7)  # rank and row of the last one
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="gloo's loopback device has another name elsewhere")


@pytest.fixture(scope="module")
def run(image_folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("bad_files") / "found.json"
    there = [backend for backend in available.ON_CPU if available.why_not(backend) is None]
    torchrun(Path(__file__).parent / "bad_files.py", image_folder, out, *there)
    return json.loads(out.read_text())


@pytest.fixture
def found(run, backend):
    available.need(backend)
    return run[backend]


@pytest.fixture(scope="module")
def labels(image_folder):
    return gp.open_source(image_folder).labels.tolist()


@available.each_backend
@pytest.mark.parametrize("policy", ["substitute", "ignore"])
def test_ranks_get_equally_many_batches_and_only_one_meets_the_bad_files(found, policy):
    assert [(rank["batches"], rank["len"], len(rank["rows"])) for rank in found[policy]] == [(4, 4, 8)] * 2
    assert [{index for index, _ in rank["bad"]} >= set(BAD) for rank in found[policy]] == [False, True]
    assert found[policy][0]["bad"] == []


@available.each_backend
def test_ranks_get_a_good_sample_in_the_place_of_each_bad_one(found, labels):
    for number, (dealt, rank) in enumerate(zip(DEALT, found["substitute"], strict=True)):
        taken = dict(rank["bad"])
        expected = [taken.get(index, index) for index in dealt]
        assert not set(expected) & set(BAD)
        assert [(index, label) for index, label, *_ in rank["rows"]] == [(index, labels[index]) for index in expected]
        for row, (*_, valid, total) in enumerate(rank["rows"]):
            assert valid == ((number, row) != PADDING)
            assert total != 0


@available.each_backend
def test_ranks_get_zeros_in_the_place_of_each_bad_one(found, labels):
    for number, (dealt, rank) in enumerate(zip(DEALT, found["ignore"], strict=True)):
        for row, (index, (same, label, valid, total)) in enumerate(zip(dealt, rank["rows"], strict=True)):
            assert same == index
            assert label == (-100 if index in BAD else labels[index])
            assert (total == 0) == (index in BAD)
            assert valid == (index not in BAD and (number, row) != PADDING)


@available.each_backend
@pytest.mark.parametrize("policy", ["substitute", "ignore"])
def test_ranks_together_get_what_one_process_gets_alone(found, backend, policy, image_folder):
    with loader(image_folder, backend, policy, batch_size=5) as alone:
        expected = rows(alone)
        taken = substitutes(alone)
    theirs = [row for pair in zip(*(rank["rows"] for rank in found[policy]), strict=True) for row in pair]
    assert theirs[:SAMPLES] == expected
    assert sorted(found[policy][1]["bad"]) == sorted(taken)
