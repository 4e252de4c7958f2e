import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.errors import StateError
from gpupipe.sampling.orders import ArrayOrder, check_same, count_earlier, digest


def counted(values):
    """The definition of an occurrence, word for word."""
    return [values[:place].count(value) for place, value in enumerate(values)]


@given(st.lists(st.integers(0, 9), max_size=60))
def test_count_earlier_of_any_values_counts_them(values):
    found = count_earlier(np.array(values, np.int64))
    assert (np.zeros(len(values)) if found is None else found).tolist() == counted(values)
    assert (found is None) == (len(set(values)) == len(values))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(1, 4))
def test_array_order_behind_its_end_begins_again_and_counts_on(values, times):
    order = ArrayOrder(np.array(values), length=len(values), made_from={}, repeats=True)
    indices, occurrences = order.at(np.arange(times * len(values)))
    assert indices.tolist() == values * times
    assert occurrences.tolist() == counted(values * times)


def test_array_order_at_leaves_the_positions_alone():
    order = ArrayOrder(np.array([1, 1, 0]), length=3, made_from={}, repeats=True)
    positions = np.arange(9)
    order.at(positions)
    assert positions.tolist() == list(range(9))


def test_digest_does_not_depend_on_memory_layout():
    values = np.arange(10)
    assert digest(values) == digest(np.arange(20).reshape(10, 2)[:, 0] // 2) == digest(values.astype(">i8"))
    assert digest(values) != digest(values[::-1])


def test_check_same_names_each_entry_that_differs():
    with pytest.raises(StateError, match="window was 3 and is 4 here; costs was 'a' and is 'b' here") as raised:
        check_same({"kind": "cost", "window": 3, "costs": "a"}, {"kind": "cost", "window": 4, "costs": "b"})
    assert raised.value.expected == {"window": 4, "costs": "b"}
    check_same({"kind": "cost", "window": 3}, {"kind": "cost", "window": 4}, ignore=frozenset({"window"}))


def test_check_same_of_other_kinds_names_the_kind_alone():
    with pytest.raises(StateError, match="kind was 'cost' and is 'default' here") as raised:
        check_same({"kind": "cost", "window": 3}, {"kind": "default", "shuffle": True})
    assert "window" not in str(raised.value)
