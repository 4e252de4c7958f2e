"""Sums of differences against NumPy on everything at once."""

import numpy as np
import pytest

from gpupipe.parity.tally import KEPT_SIDE_PX, Tally


def add(tally, backend, reference, key="k", index=0, allowed=0.0):
    tally.add(
        backend.astype(np.float32), reference.astype(np.float32), allowed=allowed, key=key, index=index, seed=0, epoch=0
    )


def test_tally_many_images_equals_numpy():
    rng = np.random.default_rng(0)
    tally, found = Tally(), []
    for index in range(7):
        reference = rng.uniform(0, 255, (20 + index, 30, 3)).astype(np.float32)
        backend = reference + (rng.normal(0, 10.0**-index, reference.shape)).astype(np.float32)
        found.append((backend - reference).ravel())
        add(tally, backend, reference, key=str(index), index=index)
    values = np.concatenate(found).astype(np.float64)
    assert tally.samples == 7
    assert tally.max_lsb == np.abs(values).max()
    assert tally.mean_lsb == pytest.approx(np.abs(values).mean(), rel=1e-9)
    assert tally.bias_lsb == pytest.approx(values.mean(), rel=1e-9)
    for share in (0.5, 0.9, 0.999, 1.0):
        exact = np.quantile(np.abs(values), share, method="inverted_cdf")
        assert tally.percentile(share) == pytest.approx(exact, rel=2e-3)
    assert [sample.key for sample in tally.worst] == ["0", "1", "2"]


def test_tally_equal_images_keeps_nothing():
    tally = Tally()
    add(tally, np.ones((2, 2, 3)), np.ones((2, 2, 3)))
    assert (tally.max_lsb, tally.mean_lsb, tally.percentile(0.999), tally.worst) == (0, 0, 0, [])


def test_tally_of_nothing_is_zero():
    assert (Tally().mean_lsb, Tally().bias_lsb, Tally().percentile(0.999)) == (0, 0, 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_tally_value_that_is_no_number_is_infinitely_far(value):
    for reference in (0.0, value):
        tally = Tally()
        add(tally, np.full((1, 1, 3), value), np.full((1, 1, 3), reference))
        assert tally.max_lsb == np.inf
        assert tally.percentile(0.999) == np.inf


def test_tally_allowed_is_taken_off_what_is_judged():
    tally = Tally()
    backend = np.zeros((1, 2, 3))
    backend[0, 0], backend[0, 1] = 2.0, 1.0
    allowed = np.zeros((1, 2, 3), np.float32)
    allowed[0, 0] = 1.75
    add(tally, backend, np.zeros((1, 2, 3)), allowed=allowed)
    assert (tally.max_lsb, tally.excess_lsb) == (2.0, 1.0)


def test_tally_counts_what_is_beyond_the_bound():
    tally = Tally()
    backend = np.zeros((1, 10, 3))
    backend[0, :4, 0] = (1.0, 2.0, 3.0, np.nan)
    allowed = np.zeros((1, 10, 3), np.float32)
    allowed[0, 2] = 1.5
    tally.add(
        *(values.astype(np.float32) for values in (backend, np.zeros_like(backend))),
        allowed=allowed,
        bound=1.5,
        key="k",
        index=0,
        seed=0,
        epoch=0,
    )
    assert tally.beyond == 2  # 2.0, and what is no number; 3.0 is allowed 1.5 more
    assert tally.beyond_share == 2 / 30
    assert Tally().beyond_share == 0


@pytest.mark.parametrize(("row", "column"), [(0, 0), (999, 0), (500, 700), (0, 1199), (999, 1199)])
def test_tally_large_picture_keeps_the_part_around_the_worst(row, column):
    reference = np.zeros((1000, 1200, 3))
    backend = reference.copy()
    backend[row, column, 1] = 3
    tally = Tally()
    add(tally, backend, reference)
    kept = tally.worst[0]
    assert kept.backend.shape == (KEPT_SIDE_PX, KEPT_SIDE_PX, 3)
    assert kept.backend[row - kept.corner[0], column - kept.corner[1], 1] == 3
