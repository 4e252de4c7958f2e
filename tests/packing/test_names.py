"""Names of samples: never two the same, and what webdataset makes of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.packing.names import sample_name, unique_names, webdataset_names
from gpupipe.sources.tar_samples import split_name

keys = st.lists(st.text("ab._2/\u00e4", max_size=8), max_size=12)


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("n01/x.JPEG", "n01/x"),
        ("v1.5/x.jpg", "v1.5/x"),
        ("a/x.tar.jpg", "a/x_tar"),
        ("a/x.v2", "a/x_v2"),
        ("ü/日本.png", "ü/日本"),
        ("/abs/x.jpg", "abs/x"),
        ("../../etc/passwd", "_/_/etc/passwd"),
        ("./a//x.jpg", "a/x"),
        (".jpg", "_jpg"),
        ("..", "_"),
        ("\0\0\1\0", "__\1_"),
        ("", "_"),
    ],
)
def test_sample_name_of_a_key_is_as_the_layout_wants_it(key, name):
    assert sample_name(key) == name


@given(st.text(max_size=20))
def test_sample_name_is_read_back_by_webdatasets_rule(key):
    webdataset = pytest.importorskip("webdataset")
    name = sample_name(key)
    if "\n" not in name and "\r" not in name and name.isprintable():
        assert webdataset.tariterators.base_plus_ext(f"{name}.jpg") == (name, "jpg")
    assert split_name(f"{name}.jpg") == (name, "jpg")
    assert not name.startswith("/")
    assert ".." not in name.split("/")


@given(keys)
def test_webdataset_names_are_unique_and_the_first_keeps_its_own(found):
    names, renamed = webdataset_names(found)
    assert len(set(names)) == len(names) == len(found)
    assert renamed == [place for place, key in enumerate(found) if names[place] != sample_name(key)]
    for place, key in enumerate(found):
        if sample_name(key) not in map(sample_name, found[:place]):
            assert names[place] == sample_name(key)


@given(keys)
def test_unique_names_differ_from_the_keys_only_where_these_repeat(found):
    names, renamed = unique_names(found)
    assert len(set(names)) == len(names)
    assert renamed == [place for place, key in enumerate(found) if key in found[:place]]


def test_webdataset_names_do_not_take_a_name_that_belongs_to_another():
    assert webdataset_names(["x.jpg", "x.png", "x_2.jpg", "x.bmp"])[0] == ["x", "x_3", "x_2", "x_4"]
