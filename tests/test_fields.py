"""Columns of a Loader: padded, ragged, by a function of one's own; and what bad records do to them."""

import dataclasses
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import default_collate

import gpupipe as gp
from gpupipe import backends
from gpupipe.errors import ConfigError, RecordError, SourceError
from gpupipe.trees import map_tensors
from tests.fakes import FakeBackend, MemorySource

RECIPE = gp.Recipe.train(size=16)


class Captioned(MemorySource):
    """Record n has n % 4 tokens, n % 3 boxes, a caption, and a nested column; those in `missing` cannot be read."""

    columns = ("tokens", "boxes", "caption", "json", "score")

    def __init__(self, length=7, missing=(), label=lambda index: index):
        super().__init__(length)
        self.missing, self.label = missing, label

    def __getitem__(self, index):
        if index in self.missing:
            raise RecordError(f"record {index} is gone", index=index)
        record = super().__getitem__(index)
        columns = {
            "tokens": list(range(index % 4)),
            "boxes": np.full((index % 3, 4), index, np.float32),
            "caption": f"nr {index}",
            "json": {"words": ["a"] * index, "ids": [index] * (index % 2)},
            "score": index / 2,
        }
        return dataclasses.replace(record, label=self.label(index), columns=columns)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    monkeypatch.setattr(backends, "create", lambda *_, **__: FakeBackend())


def batches(fields, collate=None, source=None, **arguments):
    arguments = {"batch_size": 3, "backend": "torchvision"} | arguments
    with gp.Loader(source or Captioned(), RECIPE, fields=fields, collate=collate, **arguments) as loader:
        return list(loader)


SPEC = gp.Collate(
    columns={
        "tokens": gp.Pad(value=-1, multiple=2),
        "boxes": gp.Ragged(dtype="float16"),
        "ids": gp.Pad(column="json:ids", item=()),
        "score": gp.Stack(dtype="bfloat16"),
    }
)


def test_columns_come_as_asked_for_in_the_order_of_the_fields():
    fields = ("tokens_mask", "index", "boxes_offsets", "tokens", "boxes", "caption", "score", "ids_lengths", "image")
    found = batches(fields, SPEC)
    assert [len(batch[1]) for batch in found] == [3, 3, 1]
    for mask, index, offsets, tokens, boxes, caption, score, ids, image in found:
        rows = index.tolist()
        expected = pad_sequence([torch.arange(n % 4) for n in rows], batch_first=True, padding_value=-1)
        assert torch.equal(tokens[:, : expected.shape[1]], expected)
        assert tokens.shape == mask.shape
        assert tokens.shape[1] % 2 == 0
        assert mask.sum(1).tolist() == [n % 4 for n in rows]
        assert offsets.tolist() == np.cumsum([0, *(n % 3 for n in rows)]).tolist()
        assert boxes.dtype == torch.float16
        assert boxes[:, 0].tolist() == [n for n in rows for _ in range(n % 3)]
        assert caption == [f"nr {n}" for n in rows]
        assert score.dtype == torch.bfloat16
        assert ids.tolist() == [n % 2 for n in rows]
        assert image[:, 0, 0, 0].tolist() == rows


def test_nested_boxes_need_no_offsets():
    spec = gp.Collate(columns={"boxes": gp.Ragged(layout="nested")})
    for boxes, index in batches(("boxes", "index"), spec):
        assert [len(row) for row in boxes.unbind()] == [n % 3 for n in index.tolist()]


def test_columns_without_a_kind_are_of_the_default_one():
    spec = gp.Collate(columns={"caption": gp.Keep()}, default=gp.Ragged(layout="nested"))
    tokens, caption = batches(("tokens", "caption"), spec)[0]
    assert tokens.is_nested
    assert caption == ["nr 0", "nr 1", "nr 2"]


@pytest.mark.parametrize(
    ("fields", "collate", "field", "said"),
    [
        (("tokens_mask",), None, "fields", "fields="),
        (("tokens_mask",), gp.Collate(columns={"tokens": gp.Pad(mask=False)}), "fields", "fields="),
        (("boxes",), SPEC, "fields", "'boxes' without 'boxes_offsets'"),
        (("image",), gp.Collate(columns={"masks": gp.Pad()}), "collate.columns", "the column 'masks', which memory"),
        (("image",), gp.Collate(columns={"x": gp.Pad(column="image")}), "collate.columns", "column 'image'"),
        (("image",), gp.Collate(columns={"valid": gp.Keep()}), "collate.columns", "'valid'"),
        (("image",), gp.Collate(columns={"index": gp.Keep(column="label")}), None, None),
        (("image",), "pad", "collate", "collate='pad' is not valid"),
    ],
    ids=str,
)
def test_fields_and_columns_that_do_not_fit_raise_naming_them(fields, collate, field, said):
    if field is None:
        assert batches(fields, collate)
        return
    with pytest.raises(ConfigError, match=said) as raised:
        batches(fields, collate)
    assert raised.value.field == field


def test_column_that_cannot_be_collated_names_row_and_record():
    with pytest.raises(SourceError, match=r"column 'boxes' .*row 0 \(record 0, '0'\) has \(0, 4\), row 1 \(record 1"):
        batches(("boxes",), gp.Collate(columns={"boxes": gp.Stack()}))
    with pytest.raises(SourceError, match=r"row 0 \(record 3, '3'\) has 3 items, and 2 is the limit"):
        batches(("tokens",), gp.Collate(columns={"tokens": gp.Pad(limit=2)}))


def test_several_labels_can_be_padded():
    source = Captioned(label=lambda index: [index] * (index % 3))
    spec = gp.Collate(columns={"label": gp.Pad(value=-1)})
    label, lengths = batches(("label", "label_lengths"), spec, source)[0]
    assert label.tolist() == [[-1, -1], [1, -1], [2, 2]]
    assert lengths.tolist() == [0, 1, 2]


def test_labels_of_bool_are_integers_and_columns_of_bool_are_not():
    source = Captioned(label=lambda index: index > 1)
    assert batches(("label",), source=source)[0][0].dtype == torch.int64


def test_records_that_cannot_be_read_are_empty_rows():
    source = Captioned(missing=(1, 6))
    fields = ("tokens", "tokens_lengths", "boxes", "boxes_offsets", "ids_lengths", "caption", "score", "valid")
    found = batches(fields, SPEC, source, on_error="ignore")
    tokens, lengths, boxes, offsets, ids, caption, score, valid = found[0]
    assert tokens.tolist() == [[-1, -1], [-1, -1], [0, 1]]
    assert lengths.tolist() == [0, 0, 2]
    assert offsets.tolist() == [0, 0, 0, 2]
    assert ids.tolist() == [0, 0, 0]
    assert caption == ["nr 0", "", "nr 2"]
    assert score.tolist() == [0, 0, 1]
    assert valid.tolist() == [True, False, True]
    assert boxes.shape == (2, 4)
    assert found[2][0].shape == (1, 0)  # nothing but a record that cannot be read


def test_function_gets_tuples_of_the_fields():
    got = []

    def collate(samples):
        got.append(samples)
        return {"n": len(samples)}

    found = batches(("image", "tokens", "caption", "valid"), collate)
    assert found == [{"n": 3}, {"n": 3}, {"n": 1}]
    image, tokens, caption, valid = got[1][2]
    assert image.shape == (3, 16, 16)
    assert (tokens, caption, valid) == ([0], "nr 5", True)


def test_function_may_be_that_of_torch():
    found = batches(("image", "label", "score"), default_collate)
    plain = batches(("image", "label", "score"))
    for one, other in zip(found, plain, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])
        assert torch.equal(one[2], other[2].double())


def test_function_that_fails_ends_the_epoch_and_delivers_nothing():
    def collate(samples):
        return len(samples) // 0

    loader = gp.Loader(Captioned(), RECIPE, batch_size=3, backend="torchvision", collate=collate)
    with pytest.raises(ZeroDivisionError):
        next(iter(loader))
    assert loader.state_dict()["delivered"] == 0
    loader.close()


@pytest.mark.parametrize("where", ["cuda", "cpu"])
def test_columns_on_the_device_equal_those_on_the_cpu(where):
    if where == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a GPU: torch sees no CUDA device")
    fields = ("tokens", "tokens_mask", "boxes", "boxes_offsets", "score", "label")
    for one, other in zip(batches(fields, SPEC), batches(fields, SPEC, device=where), strict=True):
        assert all(tensor.device.type == where for tensor in other)
        assert all(torch.equal(a, b.cpu()) for a, b in zip(one, other, strict=True))


# --- tensors inside containers ---

Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True, slots=True)
class Boxes:
    values: torch.Tensor
    names: list

    def __post_init__(self):
        if self.values.ndim != 1:
            raise ValueError


def test_map_tensors_goes_through_every_container_and_changes_none():
    one = torch.ones(2)
    tree = {
        "list": [one, 1],
        "tuple": (one, "a"),
        "named": Point(one, None),
        "ordered": OrderedDict(a=one),
        "dataclass": Boxes(one, [one]),
        "packed": pack_sequence([torch.ones(2), torch.ones(1)]),
        "type": Boxes,
    }
    found = map_tensors(tree, lambda tensor: tensor + 1)
    two = torch.full((2,), 2.0)
    assert torch.equal(found["list"][0], two)
    assert found["list"][1] == 1
    assert isinstance(found["tuple"], tuple)
    assert torch.equal(found["named"].x, two)
    assert type(found["named"]) is Point
    assert type(found["ordered"]) is OrderedDict
    assert torch.equal(found["ordered"]["a"], two)
    assert type(found["dataclass"]) is Boxes
    assert torch.equal(found["dataclass"].values, two)
    assert torch.equal(found["dataclass"].names[0], two)
    assert torch.equal(found["packed"].data, torch.full((3,), 2.0))
    assert found["packed"].batch_sizes.tolist() == [2, 1]
    assert found["type"] is Boxes
    assert torch.equal(tree["ordered"]["a"], torch.ones(2))
    assert torch.equal(tree["dataclass"].values, torch.ones(2))
