"""Brace patterns, against the package that webdataset uses."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.errors import ConfigError
from gpupipe.sources.braces import expand_braces

PATTERNS = [
    "plain.tar",
    "train-{000000..000146}.tar",
    "{a,b,c}.tar",
    "{train,val}-{0..3}.tar",
    "{a,b{1..2},{x,y}z}.tar",
    "{0..100..10}.tar",
    "{5..1}.tar",
    "{08..11}",
    "{-2..2}",
    "{a..e}{1..2}",
    "{a}.tar",
    "{}.tar",
    "{,old/}a.tar",
    "x{a,b}y{c,d}z",
    "{{a,b}}",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_expand_braces_equals_braceexpand(pattern):
    braceexpand = pytest.importorskip("braceexpand")
    assert expand_braces(pattern) == list(braceexpand.braceexpand(pattern))


PIECES = st.recursive(
    st.sampled_from(["a", "b-", "1", "", "{1..3}", "{08..10}", "{a..c}"]),
    lambda inner: (
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: "{" + ",".join(parts) + "}")
        | st.tuples(inner, inner).map("".join)
    ),
    max_leaves=6,
)


@given(PIECES)
def test_expand_braces_of_nested_patterns_equals_braceexpand(pattern):
    braceexpand = pytest.importorskip("braceexpand")
    assert expand_braces(pattern) == list(braceexpand.braceexpand(pattern))


@given(st.text("{},.01a", max_size=12))
def test_expand_braces_of_anything_gives_names(pattern):
    assert len(expand_braces(pattern)) >= 1


def test_expand_braces_that_are_not_closed_stand_for_themselves():
    assert expand_braces("a{b.tar") == ["a{b.tar"]
    assert expand_braces("a}b{1,2}") == ["a}b1", "a}b2"]


@pytest.mark.parametrize("pattern", ["{0..99999999999}", "{0..1999}{0..999}", "{1,2}" * 30])
def test_expand_braces_of_too_many_names_raises(pattern):
    with pytest.raises(ConfigError, match="at most 1000000"):
        expand_braces(pattern)
