"""Columns as bytes and labels as arrays: there and back."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from gpupipe.errors import ConfigError, SourceError
from gpupipe.sources.labels import given_labels, record_label, stacked
from gpupipe.sources.values import KINDS, from_bytes, kind_of, to_bytes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(JSON.filter(lambda value: value is not None))
def test_json_values_come_back_equal(value):
    kind = kind_of(value)
    assert kind == ("str" if isinstance(value, str) else "json")
    found = from_bytes(to_bytes(value, kind), kind)
    assert found == value
    assert type(found) is type(value)


@given(st.binary(max_size=50))
def test_bytes_of_every_kind_come_back_equal(value):
    for each in (value, bytearray(value), memoryview(value)):
        assert kind_of(each) == "bytes"
        assert from_bytes(to_bytes(each, "bytes"), "bytes") == value


@given(npst.arrays(npst.scalar_dtypes(), npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)))
def test_arrays_come_back_equal(value):
    found = from_bytes(to_bytes(value, "array"), "array")
    assert found.dtype == value.dtype
    np.testing.assert_array_equal(found, value)


def test_numbers_of_numpy_are_plain_numbers():
    assert from_bytes(to_bytes(np.float32(0.5), "json"), "json") == 0.5
    assert from_bytes(to_bytes(np.int64(2**62), "json"), "json") == 2**62
    assert math.isnan(from_bytes(to_bytes(math.nan, "json"), "json"))


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (1, "str"),
        ("a", "bytes"),
        ([1], "array"),
        (b"a", "json"),
        ({1, 2}, "json"),
        (object(), "json"),
        ("\ud800", "str"),
        ("\ud800", "json"),
        (np.array([object()]), "array"),
    ],
)
def test_value_of_another_kind_raises(value, kind):
    with pytest.raises(SourceError, match=r"is in a column of kind|cannot be stored"):
        to_bytes(value, kind)


@pytest.mark.parametrize("kind", ["array", "json"])
@pytest.mark.parametrize(
    "data",
    [b"", b"junk", b"\x80\4.", b"\x93NUMPY\1\0", b"[" * 100_000, b"\x93NUMPY\1\0\3\0{(\n", b"\x93NUMPY\1\0\4\0{'a\n"],
)
def test_bytes_that_are_no_value_raise_value_error(kind, data):
    with pytest.raises(ValueError):  # noqa: PT011 - of whichever library
        from_bytes(data, kind)


def test_array_of_objects_is_not_unpickled(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="allow_pickle"):
        from_bytes((tmp_path / "a.npy").read_bytes(), "array")


def test_kinds_are_all_that_kind_of_gives():
    assert {kind_of(value) for value in ("a", b"a", np.zeros(1), 1)} == set(KINDS)


@pytest.mark.parametrize("labels", [[1, 2, 3], np.array([[0.5], [1], [2]]), [True, False, True], (1.5, 2, 3)])
def test_labels_given_are_a_copy_in_order(labels):
    found = given_labels(labels, 3, "uri")
    np.testing.assert_array_equal(found, labels)
    if isinstance(labels, np.ndarray):
        labels[0] = 9
        assert found[0] != 9


@pytest.mark.parametrize("labels", [[1, 2], [], 3, ["a", "b", "c"], [[1], [1, 2], []], None, [1j, 2, 3]])
def test_labels_that_do_not_fit_raise(labels):
    with pytest.raises(ConfigError, match=r"one \(or one row\) for each of the 3 records of uri"):
        given_labels(labels, 3, "uri")


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\3\4"])
def test_labels_of_a_damaged_file_raise(tmp_path, content):
    (tmp_path / "x.npy").write_bytes(content)
    with pytest.raises(SourceError, match=r"x\.npy' cannot be read"):
        given_labels(tmp_path / "x.npy", 3, "uri")


def test_record_label_is_a_number_or_a_row_of_its_own():
    assert record_label(None, 0) is None
    assert type(record_label(np.array([1, 2], np.uint8), 1)) is int
    rows = np.array([[1, 2], [3, 4]])
    row = record_label(rows, 1)
    row[:] = 0
    assert rows[1].tolist() == [3, 4]


@pytest.mark.parametrize(
    "labels", [["a"], [None], [1, None], [[1], 2], [[1], [1, 2]], [{}], [True], [2**64], [math.inf], [[math.nan]]]
)
def test_labels_that_cannot_be_stacked_raise_value_error(labels):
    with pytest.raises(ValueError):  # noqa: PT011 - it says what is wrong, in words for a longer message
        stacked(labels)
