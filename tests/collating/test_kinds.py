"""The definitions: what they refuse, and what names they make."""

import pickle

import pytest
import torch

import gpupipe as gp
from gpupipe.collating.kinds import check_parts, path_of
from gpupipe.errors import ConfigError


@pytest.mark.parametrize(
    ("kind", "arguments", "field"),
    [
        (gp.Pad, {"value": "0"}, "value"),
        (gp.Pad, {"multiple": 0}, "multiple"),
        (gp.Pad, {"multiple": True}, "multiple"),
        (gp.Pad, {"to": 0}, "to"),
        (gp.Pad, {"to": "max"}, "to"),
        (gp.Pad, {"to": 10, "multiple": 8}, "to"),
        (gp.Pad, {"limit": 0}, "limit"),
        (gp.Pad, {"limit": 17, "to": 16}, "limit"),
        (gp.Pad, {"too_long": "truncate", "to": 4}, "too_long"),
        (gp.Pad, {"too_long": "keep_first"}, "too_long"),
        (gp.Pad, {"side": "top"}, "side"),
        (gp.Pad, {"missing": None}, "missing"),
        (gp.Pad, {"dtype": "float8"}, "dtype"),
        (gp.Pad, {"dtype": torch.complex64}, "dtype"),
        (gp.Pad, {"item": 4}, "item"),
        (gp.Pad, {"item": (-1,)}, "item"),
        (gp.Pad, {"column": ":boxes"}, "column"),
        (gp.Ragged, {"layout": "jagged"}, "layout"),
        (gp.Ragged, {"missing": "zero"}, "missing"),
        (gp.Stack, {"dtype": "half"}, "dtype"),
        (gp.Keep, {"column": 3}, "column"),
        (gp.Collate, {"columns": ["tokens"]}, "columns"),
        (gp.Collate, {"columns": {"tokens": "pad"}}, "columns"),
        (gp.Collate, {"columns": {}, "default": "stack"}, "default"),
        (gp.Collate, {"columns": {}, "default": "drop"}, "default"),
        (gp.Collate, {"columns": {}, "default": gp.Keep(column="a")}, "default"),
        (gp.Collate, {"columns": {}, "names": "ab"}, "names"),
        (gp.Collate, {"columns": {"a": gp.Pad(), "a_mask": gp.Keep()}}, "collate.columns"),
        (gp.Collate, {"columns": {"a": gp.Ragged(), "a_offsets": gp.Keep()}}, "collate.columns"),
    ],
)
def test_kind_with_impossible_values_raises_naming_the_field(kind, arguments, field):
    with pytest.raises(ConfigError) as raised:
        kind(**arguments)
    assert raised.value.field == field
    assert field.removeprefix("collate.") in str(raised.value)


def test_kinds_name_what_they_make():
    assert gp.Keep().parts("x") == gp.Stack().parts("x") == gp.Ragged(layout="nested").parts("x") == ("x",)
    assert gp.Pad().parts("x") == ("x", "x_mask", "x_lengths")
    assert gp.Pad(mask=False).parts("x") == ("x", "x_lengths")
    assert gp.Pad(lengths=False, mask=False).parts("x") == ("x",)
    assert gp.Ragged().parts("x") == ("x", "x_offsets")


def test_column_that_another_one_makes_is_refused():
    with pytest.raises(ConfigError, match="both 'tokens_mask' and 'tokens' would give a 'tokens_mask'"):
        check_parts({"tokens": gp.Pad()}, others=("image", "tokens", "tokens_mask"))
    assert check_parts({"words": gp.Pad(column="tokens")}, others=("tokens", "tokens_mask"))["words_mask"] == "words"


def test_dtypes_may_be_those_of_torch():
    assert gp.Stack(dtype=torch.bfloat16) == gp.Stack(dtype="bfloat16")


def test_paths_lead_into_a_column():
    assert path_of("a", gp.Keep()) == ("a", ())
    assert path_of("a", gp.Keep(column="json")) == ("json", ())
    assert path_of("a", gp.Keep(column="json:x.0.y")) == ("json", ("x", "0", "y"))
    assert path_of("a:b", gp.Keep()) == ("a:b", ())


def test_specification_survives_pickle():
    spec = gp.Collate(columns={"tokens": gp.Pad(value=-1, to=8), "boxes": gp.Ragged(item=[4])}, default="drop")
    assert pickle.loads(pickle.dumps(spec)) == spec
