"""Samples of every kind of column to a batch, with torch's own collation and padding as oracles."""

from collections import namedtuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, default_collate

import gpupipe as gp
from gpupipe.errors import ConfigError, SourceError


def column(values, kind=None, name="x"):
    """The batch of one column."""
    return gp.collate([{name: value} for value in values], kind and gp.Collate(columns={name: kind}))


def tensors(values, dtype=torch.int64):
    return [torch.tensor(value, dtype=dtype) for value in values]


def same(found, expected):
    assert found.dtype == expected.dtype
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


TOKENS = [[5, 6, 7], [], [1], [2, 3]]
BOXES = [np.arange(8, dtype=np.float32).reshape(2, 4), np.zeros((0, 4), np.float32), np.ones((1, 4), np.float32)]


# --- what the values suggest ---


@pytest.mark.parametrize(
    "values",
    [
        [1, 2, 3],
        [True, False],
        [np.int32(3), np.int32(4)],
        ["a", "b"],
        [b"a", b"bc"],
        [np.arange(3), np.arange(3)],
        [torch.ones(2, 3), torch.zeros(2, 3)],
        [np.float32([1, 2]), np.float32([3, 4])],
    ],
    ids=repr,
)
def test_collate_without_specification_is_default_collate(values):
    samples = [{"a": value, "b": 1} for value in values]
    found, expected = gp.collate(samples), default_collate(samples)
    assert found.keys() == expected.keys()
    if isinstance(expected["a"], torch.Tensor):
        assert torch.equal(found["a"], expected["a"])
    else:
        assert found["a"] == expected["a"]
    both = [(value, 1) for value in values]
    for one, other in zip(gp.collate(both), default_collate(both), strict=True):
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == list(other)


def test_collate_makes_floats_float32_and_leaves_lists():
    batch = gp.collate([{"a": 0.5, "b": [1, 2], "c": None, "d": {"x": 1}}, {"a": 1.5, "b": [3], "c": "y", "d": {}}])
    same(batch["a"], torch.tensor([0.5, 1.5]))
    assert batch["b"] == [[1, 2], [3]]
    assert batch["c"] == [None, "y"]
    assert batch["d"] == [{"x": 1}, {}]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([1, 0.5], "row 0 is an integer and row 1 is a float"),
        ([1, None], "row 0 is an integer and row 1 is of type NoneType"),
        ([np.arange(2), "a"], "row 0 is of type ndarray and row 1 is of type str"),
        ([np.arange(2), np.arange(3)], r"row 0 has \(2,\), row 1 has \(3,\).*gpupipe.Pad"),
        ([np.zeros((2, 3)), np.zeros((2, 4))], r"\(2, 3\), row 1 has \(2, 4\).*gpupipe.Keep"),
        ([np.zeros(2), np.zeros(2, np.float32)], "row 0 has float64, row 1 has float32.*dtype='float32'"),
        ([1, 2**63], "row 1 has a number that int64 cannot hold"),
        ([np.array(["a"]), np.array(["b"])], "row 0 is array"),
        ([torch.eye(2).to_sparse()] * 2, r"layout torch\.sparse_coo"),
        ([np.ma.array([1, 2], mask=[0, 1])] * 2, "row 0 is a masked array"),
    ],
    ids=repr,
)
def test_collate_of_what_makes_no_tensor_names_column_rows_and_shapes(values, said):
    with pytest.raises(SourceError, match=f"column 'x' cannot be collated: .*{said}") as raised:
        column(values)
    assert raised.value.column == "x"
    assert set(raised.value.rows) <= set(range(len(values)))


# --- Stack ---


def test_stack_converts_to_the_dtype_asked_for():
    same(column([1, 2.5, True], gp.Stack(dtype="float32"))["x"], torch.tensor([1, 2.5, 1]))
    same(column([[1, 2], [3, 4]], gp.Stack())["x"], torch.tensor([[1, 2], [3, 4]]))
    same(column([[0.1], [0.2]], gp.Stack(dtype="float64"))["x"], torch.tensor([[0.1], [0.2]], dtype=torch.float64))
    same(column([0.1, 3.0], gp.Stack(dtype=torch.bfloat16))["x"], torch.tensor([0.1, 3.0], dtype=torch.bfloat16))
    same(column([1, 0], gp.Stack(dtype="bool"))["x"], torch.tensor([True, False]))
    arrays = [np.arange(3, dtype=np.int64), np.arange(3, dtype=np.float32)]
    same(column(arrays, gp.Stack(dtype="float16"))["x"], torch.tensor([[0, 1, 2]] * 2, dtype=torch.float16))


def test_stack_reads_arrays_that_torch_cannot_take_as_they_are():
    read_only = np.arange(4)
    read_only.flags.writeable = False
    values = [read_only, np.arange(4)[::-1], np.arange(4, dtype=">i8"), np.asfortranarray(np.arange(4))]
    same(column(values, gp.Stack())["x"], torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3], [0, 1, 2, 3]]))
    same(column([np.uint16([1]), np.uint16([65535])], gp.Stack())["x"], torch.tensor([[1], [65535]], dtype=torch.int32))


@pytest.mark.parametrize(
    ("values", "dtype", "said"),
    [
        ([1, 70000], "float16", "row 1 has a 70000, which float16 cannot hold"),
        ([1.0, 1e39], "float32", "row 1 has a 1e.39, which float32 cannot hold"),
        ([1, 300], "uint8", "row 1 has a 300"),
        ([1, -1], "uint8", "row 1 has a -1"),
        ([np.uint8(1), np.uint8(200)], "int8", "row 1 has a 200"),
        ([1.0, 1.5], "int64", "row 1 has a 1.5"),
        ([1.0, float("nan")], "int32", "row 1 has a nan"),
        ([2**40, 1.0, 0.5], "int32", "row 0 has a 1099511627776"),
        ([[[1, 2], [3, 4]], [[5, 6], [7, 800]]], "uint8", "row 1 has a 800"),
        ([np.array([1 + 1j])] * 2, "float32", "complex"),
    ],
    ids=repr,
)
def test_dtype_that_cannot_hold_a_value_raises_naming_it(values, dtype, said):
    with pytest.raises(SourceError, match=said):
        column(values, gp.Stack(dtype=dtype))


def test_dtype_keeps_what_is_not_finite():
    found = column([float("inf"), float("nan")], gp.Stack(dtype="float16"))["x"]
    assert found[0] == float("inf")
    assert found[1].isnan()


def test_large_integers_beside_floats_are_not_rounded_on_their_way():
    same(column([2**60 + 1, 1.0], gp.Stack(dtype="int64"))["x"], torch.tensor([2**60 + 1, 1]))


# --- Pad ---


@pytest.mark.parametrize("value", [0, -100, 7])
def test_pad_to_the_longest_is_pad_sequence(value):
    batch = column(TOKENS, gp.Pad(value=value))
    same(batch["x"], pad_sequence(tensors(TOKENS), batch_first=True, padding_value=value))
    same(batch["x_lengths"], torch.tensor([3, 0, 1, 2]))
    assert batch["x_mask"].tolist() == [[True] * 3, [False] * 3, [True, False, False], [True, True, False]]


@pytest.mark.parametrize("side", ["left", "right"])
def test_pad_on_either_side_is_pad_sequence(side):
    batch = column(BOXES, gp.Pad(value=-1, side=side))
    expected = pad_sequence(
        [torch.from_numpy(box) for box in BOXES], batch_first=True, padding_value=-1, padding_side=side
    )
    same(batch["x"], expected)
    for row, box in enumerate(BOXES):
        assert (batch["x"][row][batch["x_mask"][row]].numpy() == box).all()


def test_pad_to_a_multiple_and_to_a_width():
    assert column(TOKENS, gp.Pad(multiple=8))["x"].shape == (4, 8)
    assert column([[1] * 9, [1]], gp.Pad(multiple=8))["x"].shape == (2, 16)
    assert column(TOKENS, gp.Pad(to=5))["x"].shape == (4, 5)
    assert column(TOKENS, gp.Pad(multiple=4, limit=3))["x"].shape == (4, 4)
    assert column([[], []], gp.Pad(multiple=8))["x"].shape == (2, 0)
    assert column([[], []], gp.Pad(to=3, value=9))["x"].tolist() == [[9] * 3] * 2


@pytest.mark.parametrize(("too_long", "kept"), [("keep_first", [1, 2, 3]), ("keep_last", [3, 4, 5])])
@pytest.mark.parametrize("how", [{"to": 3}, {"limit": 3}])
def test_pad_shortens_what_is_too_long_if_asked(too_long, kept, how):
    batch = column([[1, 2, 3, 4, 5], [6]], gp.Pad(too_long=too_long, **how))
    assert batch["x"].tolist() == [kept, [6, 0, 0]]
    assert batch["x_lengths"].tolist() == [3, 1]


@pytest.mark.parametrize("how", [{"to": 2}, {"limit": 2}, {"to": 4, "limit": 2}])
def test_pad_raises_for_what_is_too_long(how):
    with pytest.raises(SourceError, match="row 0 has 3 items, and 2 is the limit"):
        column(TOKENS, gp.Pad(**how))


@pytest.mark.parametrize(
    ("values", "dtype", "expected"),
    [
        ([[1], [2, 3]], None, torch.int64),
        ([[1.0], [2, 3]], None, torch.float32),
        ([[True], []], None, torch.bool),
        ([b"ab", b"c"], None, torch.uint8),
        ([np.int16([1]), []], None, torch.int16),
        ([np.int16([1]), [2, 3]], None, torch.int16),
        ([np.float64([1]), [2, 3]], None, torch.float64),
        ([np.uint16([1]), np.uint16([2, 3])], None, torch.int32),
        ([torch.tensor([1.0], dtype=torch.bfloat16), []], None, torch.bfloat16),
        ([range(3), (1, 2)], None, torch.int64),
        ([[1], [2, 3]], "float16", torch.float16),
        ([[], []], "int32", torch.int32),
        ([np.int8([1]), np.int64([2, 3])], "int32", torch.int32),
    ],
    ids=repr,
)
def test_pad_finds_the_dtype(values, dtype, expected):
    assert column(values, gp.Pad(dtype=dtype))["x"].dtype == expected


def test_empty_lists_of_boxes_have_their_shape():
    lists = [[[1, 2, 3, 4]], [], None, [[5, 6, 7, 8], [1.5, 2, 3, 4]]]
    batch = column(lists, gp.Pad(missing="empty"))
    assert batch["x"].shape == (4, 2, 4)
    assert batch["x_lengths"].tolist() == [1, 0, 0, 2]
    nothing = column([[], None], gp.Pad(item=(4,), dtype="float32", missing="empty"))
    assert nothing["x"].shape == (2, 0, 4)
    assert column([[], []], gp.Ragged(item=(4,)))["x"].shape == (0, 4)


@pytest.mark.parametrize("kind", [gp.Pad(), gp.Ragged()])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[1], None], "row 1 is None"),
        ([[1], 3], "row 1 is the number 3, not a sequence.*gpupipe.Stack"),
        ([[1], "ab"], r"row 1 is 'ab' \(str\)"),
        ([[1], ["a"]], r"row 1 is \['a'\] \(list\)"),
        ([[1], [[1], [1, 2]]], r"row 1 is \[\[1\], \[1, 2\]\] \(list\), which is no array"),
        ([[1], [2**70]], "row 1 is"),
        ([[1], {}], r"row 1 is \{\} \(dict\)"),
        ([np.zeros((1, 4)), np.zeros((1, 5))], r"row 0 has \(1, 4\), row 1 has \(1, 5\)"),
        ([np.zeros((1, 4)), np.zeros(3)], r"row 0 has \(1, 4\), row 1 has \(3,\)"),
        ([np.int64([1]), np.int32([1])], "row 0 has int64, row 1 has int32"),
        ([np.int64([1]), [0.5]], "row 1 has floats beside arrays of int64"),
        ([np.array([True]), [5]], "row 1 has integers beside arrays of bool"),
    ],
    ids=repr,
)
def test_sequences_that_make_no_tensor_raise_naming_the_row(kind, values, said):
    with pytest.raises(SourceError, match=f"column 'x' cannot be collated: .*{said}"):
        column(values, kind)


def test_item_that_is_not_the_shape_asked_for_raises():
    with pytest.raises(SourceError, match=r"row 1 has the shape \(2, 5\)"):
        column([np.zeros((1, 4)), np.zeros((2, 5))], gp.Pad(item=(4,)))


@pytest.mark.parametrize(
    ("values", "dtype", "value"),
    [
        ([[1], []], "uint8", -1),
        ([[1], []], None, 0.5),
        ([[1], []], None, float("nan")),
        ([[1.0], []], "float16", -1e9),
        ([[True], []], None, 2),
    ],
)
def test_padding_value_that_the_dtype_lacks_raises(values, dtype, value):
    with pytest.raises(SourceError, match="cannot be padded with"):
        column(values, gp.Pad(value=value, dtype=dtype))


def test_padding_with_infinity():
    batch = column([[1.0, 2.0], [3.0]], gp.Pad(value=float("-inf"), dtype="float16"))
    assert batch["x"].tolist() == [[1, 2], [3, float("-inf")]]


DTYPES = {
    "int64": st.integers(-(2**63), 2**63 - 1),
    "float32": st.floats(width=32, allow_nan=False),
    "bool": st.booleans(),
}


@st.composite
def ragged(draw):
    """Ragged data as arrays: some sequences empty, perhaps all."""
    dtype = draw(st.sampled_from(sorted(DTYPES)))
    item = draw(st.sampled_from([(), (2,), (1, 3)]))
    lengths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=6))
    size = int(np.prod(item))
    return [
        np.array(draw(st.lists(DTYPES[dtype], min_size=n * size, max_size=n * size)), dtype).reshape(n, *item)
        for n in lengths
    ]


@given(
    rows=ragged(),
    side=st.sampled_from(["left", "right"]),
    multiple=st.sampled_from([1, 3, 8]),
    to=st.sampled_from(["longest", 24]),
    as_lists=st.booleans(),
)
def test_padding_and_mask_give_back_the_ragged_data(rows, side, multiple, to, as_lists):
    values = [row.tolist() for row in rows] if as_lists else rows
    kind = gp.Pad(value=1, side=side, multiple=multiple, to=to, item=rows[0].shape[1:], dtype=str(rows[0].dtype))
    batch = column(values, kind)
    padded, mask, lengths = batch["x"], batch["x_mask"], batch["x_lengths"]
    assert padded.shape[:2] == mask.shape
    assert padded.shape[1] % multiple == 0
    assert lengths.tolist() == mask.sum(dim=1).tolist() == [len(row) for row in rows]
    for row, found, real in zip(rows, padded, mask, strict=True):
        assert (found[real].numpy() == row).all()
        assert (found[~real] == 1).all()
        begins = padded.shape[1] - len(row) if side == "left" else 0
        assert real.nonzero().flatten().tolist() == list(range(begins, begins + len(row)))


@given(rows=ragged())
def test_ragged_and_nested_give_back_the_data(rows):
    batch = column(rows, gp.Ragged())
    values, offsets = batch["x"], batch["x_offsets"]
    assert offsets.dtype == torch.int64
    assert offsets.shape == (len(rows) + 1,)
    assert (values.numpy() == np.concatenate(rows)).all()
    for number, row in enumerate(rows):
        assert (values[offsets[number] : offsets[number + 1]].numpy() == row).all()
    nested = column(rows, gp.Ragged(layout="nested"))["x"]
    assert nested.layout == torch.jagged
    for found, row in zip(nested.unbind(), rows, strict=True):
        assert (found.numpy() == row).all()


# --- several columns, and the shapes of samples ---

MIXED = gp.Collate(
    columns={
        "tokens": gp.Pad(multiple=4, dtype="int32"),
        "boxes": gp.Ragged(item=(4,), dtype="float32"),
        "score": gp.Stack(dtype="float16"),
        "caption": gp.Keep(column="json:captions.0"),
        "classes": gp.Pad(value=-1, column="json:classes", mask=False),
    }
)
SAMPLES = [
    {
        "image": torch.full((3, 2, 2), float(n)),
        "tokens": list(range(n)),
        "boxes": [[n, 0, 1, 1]] * (n % 3),
        "score": n / 2,
        "json": {"captions": [f"nr {n}", "more"], "classes": [n] * (n % 2)},
        "label": n,
        "key": str(n),
    }
    for n in range(5)
]


def test_mixed_columns_come_as_each_was_asked_for():
    batch = gp.collate(SAMPLES, MIXED)
    assert set(batch) == {
        *("image", "label", "key", "tokens", "tokens_mask", "tokens_lengths", "boxes", "boxes_offsets"),
        *("score", "caption", "classes", "classes_lengths"),
    }
    assert batch["image"].shape == (5, 3, 2, 2)
    assert batch["tokens"].shape == (5, 4)
    assert batch["tokens"].dtype == torch.int32
    assert batch["boxes_offsets"].tolist() == [0, 0, 1, 3, 3, 4]
    assert batch["boxes"][:, 0].tolist() == [1, 2, 2, 4]
    same(batch["score"], torch.tensor([0, 0.5, 1, 1.5, 2], dtype=torch.float16))
    assert batch["caption"] == [f"nr {n}" for n in range(5)]
    assert batch["classes"].tolist() == [[-1], [1], [-1], [3], [-1]]


def test_mixed_columns_of_a_batch_of_one_row():
    batch = MIXED(SAMPLES[:1])
    assert batch["tokens"].shape == (1, 0)
    assert batch["boxes"].shape == (0, 4)
    assert batch["boxes_offsets"].tolist() == [0, 0]


def test_default_drop_leaves_the_rest_out():
    spec = gp.Collate(columns={"label": gp.Stack()}, default="drop")
    assert list(gp.collate(SAMPLES, spec)) == ["label"]
    batch = gp.collate(SAMPLES, gp.Collate(columns={"label": gp.Stack()}, default=gp.Keep()))
    assert batch["tokens"] == [sample["tokens"] for sample in SAMPLES]


def test_tuples_with_names_become_a_dict():
    spec = gp.Collate(columns={"tokens": gp.Pad()}, names=("tokens", "label"))
    batch = gp.collate([([1, 2], 0), ([3], 1)], spec)
    assert batch["tokens"].tolist() == [[1, 2], [3, 0]]
    assert batch["label"].tolist() == [0, 1]
    named = namedtuple("named", "tokens label")
    other = gp.collate([named([1, 2], 0), named([3], 1)], gp.Collate(columns={"tokens": gp.Pad()}))
    assert torch.equal(other["tokens"], batch["tokens"])


@pytest.mark.parametrize(
    ("samples", "spec", "said"),
    [
        ([], None, "samples is empty"),
        ([{"a": 1}], {"a": gp.Pad()}, "must be gpupipe.Collate"),
        ([1, 2], None, "samples of type int"),
        ([{"a": 1}, (1,)], None, "samples of type dict, tuple"),
        ([(1,), (1, 2)], None, "row 0 has 1, row 1 has 2"),
        ([{"a": 1}, {"b": 1}], None, "column 'a': row 1 has no 'a', only 'b'"),
        ([{"a": 1}], gp.Collate(columns={"b": gp.Pad()}), "column 'b': row 0 has no 'b'"),
        ([(1,)], gp.Collate(columns={"b": gp.Pad()}), "say what their entries are"),
        ([(1,)], gp.Collate(columns={}, names=("a", "b")), "names has 2 entries and the samples have 1"),
        ([{"a": [1], "a_mask": 1}], gp.Collate(columns={"a": gp.Pad()}), "'a_mask' is a column, and comes out"),
    ],
    ids=repr,
)
def test_samples_that_do_not_fit_raise(samples, spec, said):
    with pytest.raises(ConfigError, match=said):
        gp.collate(samples, spec)


@pytest.mark.parametrize(
    ("value", "said"),
    [({"b": 1}, "row 1 has no 'a.0': where 'a' should be, it has 'b'"), ({"a": []}, "where '0' should be"), (3, "int")],
)
def test_path_that_leads_nowhere_raises_naming_the_row(value, said):
    samples = [{"json": {"a": [1]}}, {"json": value}]
    with pytest.raises(SourceError, match=said):
        gp.collate(samples, gp.Collate(columns={"x": gp.Keep(column="json:a.0")}))


def test_path_through_none_is_none():
    samples = [{"json": {"a": None}}, {"json": None}, {"json": {"a": {"b": 3}}}]
    batch = gp.collate(samples, gp.Collate(columns={"x": gp.Keep(column="json:a.b")}))
    assert batch["x"] == [None, None, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_serves_a_torch_dataloader(workers):
    loader = DataLoader(SAMPLES, batch_size=2, collate_fn=MIXED, num_workers=workers)
    batches = list(loader)
    assert [len(batch["label"]) for batch in batches] == [2, 2, 1]
    assert torch.cat([batch["boxes"] for batch in batches]).shape == (4, 4)
    assert [len(batch["boxes_offsets"]) for batch in batches] == [3, 3, 2]


def test_error_of_a_worker_keeps_its_facts():
    import pickle

    with pytest.raises(SourceError) as raised:
        column([[1], None], gp.Pad())
    copy = pickle.loads(pickle.dumps(raised.value))
    assert (copy.column, copy.rows, str(copy)) == ("x", (1,), str(raised.value))
