"""Views by one backend each: outcome of every batch, whatever the backends do. They are stand-ins."""

import time
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest
import torch

import gpupipe as gp
from gpupipe.backends.base import Applied
from gpupipe.backends.side_by_side import SideBySide
from gpupipe.errors import BackendError, DecodeError
from gpupipe.headers import Header, scan
from gpupipe.records import Record
from tests.images import broken, jpeg, photo

RECIPE = gp.Recipe(steps=(gp.CenterCrop(4),))
VIEWS = gp.Views(RECIPE, RECIPE)
SECONDS = 30


class Inner:
    """Keeps what it is given; `finish` makes images of ones."""

    name = "stand-in"

    def __init__(self):
        self.given, self.closed, self.refuses = [], 0, None

    def submit(self, records, headers, plan):
        if self.refuses is not None:
            raise self.refuses
        self.given.append((records, headers, plan, Future()))
        return self.given[-1][-1]

    def finish(self, errors=None):
        records, *_, future = self.given[-1]
        future.set_result(Applied(torch.ones(len(records), 3, 4, 4), errors or {}))

    def close(self):
        self.closed += 1


@pytest.fixture
def inner():
    return [Inner(), Inner()]


@pytest.fixture
def make(inner):
    made = []

    def make_backend(threads=1):
        made.append(SideBySide(inner, VIEWS, batch_size=4, threads=threads))
        return made[-1]

    yield make_backend
    for backend in made:
        backend.close()


def batch(*files):
    records = [Record(data, 0, index, f"k{index}") for index, data in enumerate(files)]
    headers = [scan(data) if data[:2] == b"\xff\xd8" else Header("JPEG", 8, 8, 1, native=True) for data in files]
    plan = gp.make_plan(
        RECIPE, seed=0, epoch=0, indices=range(len(files)), sizes=[(h.height, h.width) for h in headers]
    )
    return records, headers, (plan, plan)


GOOD = jpeg(photo(20, 30))


def wait_for(inner):
    """Until the batch has arrived at every backend."""
    for _ in range(SECONDS * 100):
        if all(one.given for one in inner):
            return
        time.sleep(0.01)
    raise AssertionError("never handed on")


def test_backends_get_pixels_and_a_batch_is_done_when_all_are(make, inner):
    future = make().submit(*batch(GOOD, GOOD))
    wait_for(inner)
    for one in inner:
        records, headers, plan, _ = one.given[0]
        assert all(isinstance(record.data, np.ndarray) and record.data.shape == (20, 30, 3) for record in records)
        assert {header.format for header in headers} == {"PIXELS"}
        assert len(plan) == 2
    assert inner[0].given[0][0][0].data is inner[1].given[0][0][0].data
    inner[0].finish()
    assert not future.done()
    inner[1].finish()
    assert [view.shape for view in future.result(SECONDS).views] == [(2, 3, 4, 4)] * 2


def test_backends_that_decode_for_themselves_get_the_files(make, inner):
    future = make(threads=0).submit(*batch(GOOD))
    assert all(one.given[0][0][0].data == GOOD for one in inner)
    for one in inner:
        one.finish({0: DecodeError("broken")})
    applied = future.result(SECONDS)
    assert list(applied.errors) == [0]
    assert not any(view.any() for view in applied.views)


def test_a_record_that_cannot_be_decoded_is_an_error_and_zeros_in_all_views(make, inner):
    future = make().submit(*batch(GOOD, broken()["JPEG cut in half"]))
    wait_for(inner)
    for one in inner:
        one.finish()
    applied = future.result(SECONDS)
    assert list(applied.errors) == [1]
    assert applied.errors[1].key == "k1"
    assert all(view[0].all() and not view[1].any() for view in applied.views)


@pytest.mark.parametrize("error", [BackendError("no more", backend="stand-in"), RuntimeError("no more")])
def test_a_backend_that_fails_fails_the_batch(make, inner, error):
    future = make().submit(*batch(GOOD))
    wait_for(inner)
    inner[0].finish()
    inner[1].given[0][-1].set_exception(error)
    with pytest.raises(BackendError, match="no more"):
        future.result(SECONDS)
    inner[1].refuses = error
    with pytest.raises(BackendError, match="no more"):
        make().submit(*batch(GOOD)).result(SECONDS)


def test_cancel_reaches_every_view(make, inner):
    future = make().submit(*batch(GOOD))
    wait_for(inner)
    assert future.cancel()
    assert all(one.given[0][-1].cancelled() for one in inner)
    future = make(threads=0).submit(*batch(GOOD))
    inner[0].given[-1][-1].cancel()
    inner[1].finish()
    with pytest.raises(CancelledError):
        future.result(SECONDS)


def test_close_cancels_what_is_unfinished_and_closes_all(make, inner):
    backend = make()
    futures = [backend.submit(*batch(GOOD, GOOD)) for _ in range(20)]
    backend.close()
    assert all(future.cancelled() for future in futures)
    assert [one.closed for one in inner] == [1, 1]
    with pytest.raises(BackendError, match="closed"):
        backend.submit(*batch(GOOD))
