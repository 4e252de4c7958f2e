"""Checks of arguments."""

import numpy as np
import pytest

from gpupipe.checks import check_integer
from gpupipe.errors import ConfigError


@pytest.mark.parametrize("value", [1, 7, np.int64(7), np.uint8(1)])
def test_check_integer_of_one_in_bounds_is_an_int(value):
    found = check_integer("depth", value, 1, 7)
    assert found == value
    assert type(found) is int


@pytest.mark.parametrize("value", [0, -1, 8, 1.0, True, np.bool_(1), "3", None, np.array([3])])
def test_check_integer_of_anything_else_raises(value):
    with pytest.raises(ConfigError, match=r"depth=.* is not valid: it must be an integer from 1 to 7") as caught:
        check_integer("depth", value, 1, 7)
    assert caught.value.field == "depth"
    assert caught.value.value is value


def test_check_integer_without_an_upper_bound_says_so():
    assert check_integer("depth", 10**30, 1) == 10**30
    with pytest.raises(ConfigError, match=r"an integer of at least 1$"):
        check_integer("depth", 0, 1)
