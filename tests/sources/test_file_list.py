"""FileList against the csv and json modules, and against the folder that a list describes."""

import csv
import json
import math
import os
import pickle
import shutil
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.errors import ConfigError, RecordError, SourceError
from gpupipe.sources import list_columns, open_source
from gpupipe.sources.file_list import FileList
from gpupipe.sources.folder import ImageFolder
from tests.sources.processes import read_all, read_forked, read_in_threads, read_spawned
from tests.sources.stores import write_csv, write_jsonl


def write(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode(errors="surrogateescape"))


def write_list(path, columns, rows):
    """The same list in the format that its name asks for."""
    if path.suffix == ".jsonl":
        return write_jsonl(path, [dict(zip(columns, row, strict=True)) for row in rows])
    return write_csv(path, [columns, *rows], "\t" if path.suffix == ".tsv" else ",")


FORMATS = pytest.mark.parametrize("name", ["list.csv", "list.tsv", "list.jsonl"])


# --- what is read ---


@FORMATS
def test_list_of_a_folder_equals_the_folder(tmp_path, image_folder, name):
    folder = ImageFolder(image_folder)
    rows = [(folder.key(index), label) for index, label in enumerate(folder.labels.tolist())]
    source = open_source(write_list(tmp_path / name, ["path", "label"], rows), root=image_folder)
    assert isinstance(source, FileList)
    assert source.fingerprint == folder.fingerprint
    assert source.labels.dtype == np.int64
    assert len(source) == len(folder)
    for index in range(len(folder)):
        ours, theirs = source[index], folder[index]
        assert (ours.key, ours.label, ours.data, ours.path) == (theirs.key, theirs.label, theirs.data, theirs.path)
        assert type(ours.label) is int
        assert source.key(index) == theirs.key


@FORMATS
def test_list_of_class_names_equals_the_folder(tmp_path, image_folder, name):
    shutil.copytree(image_folder, tmp_path / "data")
    folder = ImageFolder(tmp_path / "data")
    rows = [("data/" + folder.key(i), folder.classes[label]) for i, label in enumerate(folder.labels)]
    source = FileList(write_list(tmp_path / name, ["path", "label"], rows[::-1]))
    assert source.classes == folder.classes
    assert source.class_to_idx == folder.class_to_idx
    assert source.labels.tolist() == folder.labels.tolist()[::-1]
    assert source[0].data == folder[len(folder) - 1].data


@FORMATS
def test_paths_may_lead_anywhere(tmp_path, name):
    write(tmp_path, "lists/near.jpg", "far/away.jpg", "ü/日本 1.jpg", 'odd, "name"\t.jpg')
    paths = [
        "near.jpg",
        "../far/away.jpg",
        str(tmp_path / "far" / "away.jpg"),
        "../ü/日本 1.jpg",
        '../odd, "name"\t.jpg',
    ]
    path = write_list(tmp_path / "lists" / name, ["path", "label"], [(each, 0) for each in paths])
    source = FileList(path)
    assert [source.key(index) for index in range(5)] == paths
    for index, each in enumerate(paths):
        assert source[index].data == (tmp_path / "lists" / each).read_bytes()
        assert source[index].path == os.path.join(tmp_path, "lists", each)


def test_list_moved_with_its_images_has_the_same_fingerprint(tmp_path):
    write(tmp_path / "one", "a.jpg")
    write_csv(tmp_path / "one" / "list.csv", [["path", "label"], ["a.jpg", 3]])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    one, two = (FileList(tmp_path / place / "list.csv") for place in ("one", "two"))
    assert one.fingerprint == two.fingerprint
    assert one.uri != two.uri
    assert two[0].path == str(tmp_path / "two" / "a.jpg")


def test_no_image_is_opened_before_it_is_read(tmp_path):
    source = FileList(write_csv(tmp_path / "l.csv", [["path", "label"], ["gone.jpg", 0]]))
    assert source.labels.tolist() == [0]
    with pytest.raises(RecordError, match=r"record 0 \('gone\.jpg' of .*No such file.*pass root=") as error:
        source[0]
    assert (error.value.index, error.value.key) == (0, "gone.jpg")
    assert error.value.path == str(tmp_path / "gone.jpg")


def test_empty_image_file_is_a_record_of_no_bytes(tmp_path):
    (tmp_path / "a.jpg").write_bytes(b"")
    assert FileList(write_csv(tmp_path / "l.csv", [["path", "label"], ["a.jpg", 0]]))[0].data == b""


def test_name_that_is_not_utf8_is_read(tmp_path):
    name = os.fsdecode(b"a\xff.jpg")
    try:
        (tmp_path / name).write_bytes(b"odd")
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    source = FileList(write_csv(tmp_path / "l.csv", [["path"], [name]]), label=None)
    assert source[0].data == b"odd"
    assert source.key(0) == name
    assert source.fingerprint


def test_byte_order_mark_line_ends_and_blank_lines_are_let_pass(tmp_path):
    (tmp_path / "l.csv").write_bytes(b"\xef\xbb\xbfpath,label\r\n\r\na.jpg,1\r\n\nb.jpg,2\r\n\r\n")
    source = FileList(tmp_path / "l.csv")
    assert [source.key(0), source.key(1)] == ["a.jpg", "b.jpg"]
    assert source.labels.tolist() == [1, 2]
    (tmp_path / "l.jsonl").write_bytes(
        b'\xef\xbb\xbf{"path": "a.jpg", "label": 1}\r\n\r\n{"path": "b.jpg", "label": 2}'
    )
    assert FileList(tmp_path / "l.jsonl").fingerprint == source.fingerprint


# --- labels ---


@FORMATS
@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        ([3, -1, 1000, 3], np.int64),
        ([0.5, 2, -1e-3, 4], np.float64),
        ([[0, 1], [1, 1], [0, 0], [5, -3]], np.int64),
        ([[0.5, 1], [1, 1], [0, 0], [1, 0]], np.float32),
    ],
)
def test_labels_of_every_kind_are_read(tmp_path, name, labels, dtype):
    as_text = (lambda label: json.dumps(label)) if name != "list.jsonl" else (lambda label: label)
    rows = [(f"{n}.jpg", as_text(label)) for n, label in enumerate(labels)]
    source = FileList(write_list(tmp_path / name, ["path", "label"], rows))
    write(tmp_path, "0.jpg", "1.jpg", "2.jpg", "3.jpg")
    assert source.labels.dtype == dtype
    np.testing.assert_array_equal(source.labels, np.array(labels, dtype))
    for index, label in enumerate(np.array(labels, dtype)):
        np.testing.assert_array_equal(source[index].label, label)
    assert source.classes is source.class_to_idx is None


@FORMATS
def test_several_label_columns_make_a_vector(tmp_path, name):
    rows = [("a.jpg", 0, 1, 0.5), ("b.jpg", 1, 1, 2)]
    path = write_list(tmp_path / name, ["path", "x", "y", "z"], rows)
    found = FileList(path, label=("y", "x")).labels
    assert found.dtype == np.int64
    assert found.tolist() == [[1, 0], [1, 1]]
    found = FileList(path, label=["x", "z"]).labels
    assert found.dtype == np.float32
    assert found.tolist() == [[0, 0.5], [1, 2]]


@FORMATS
def test_no_label_column_is_no_label(tmp_path, name):
    write(tmp_path, "a.jpg")
    source = FileList(write_list(tmp_path / name, ["path"], [("a.jpg",)]), label=None)
    assert source.labels is None
    assert source[0].label is None


@FORMATS
def test_classes_given_number_the_labels(tmp_path, name):
    path = write_list(tmp_path / name, ["file", "class"], [("a.jpg", "dog"), ("b.jpg", "cat")])
    options = {"path_column": "file", "label": "class"}
    assert FileList(path, **options).labels.tolist() == [1, 0]
    source = FileList(path, **options, classes=["wolf", "cat", "dog"])
    assert source.labels.tolist() == [2, 1]
    assert source.classes == ["wolf", "cat", "dog"]
    with pytest.raises(SourceError, match=r"line [12]: the label 'dog' is none of classes= \(1 names\)"):
        FileList(path, **options, classes=["cat"])


def test_names_of_digits_are_names_where_classes_say_so(tmp_path):
    path = write_csv(tmp_path / "l.csv", [["path", "label"], ["a", "10"], ["b", "x"], ["c", "9"]])
    assert FileList(path, classes=["9", "10", "x"]).labels.tolist() == [1, 2, 0]


def test_numbers_with_spaces_around_them_are_numbers(tmp_path):
    source = FileList(write_csv(tmp_path / "l.csv", [["path", "label"], ["a", " 10"], ["b", "9 "]]))
    assert source.labels.tolist() == [10, 9]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["1", "cat"], r"line 3: the label 'cat' is no number .*line 2 has '1'.*classes="),
        (["cat", "1"], r"line 3: the label '1' is a number, where line 2 has the name 'cat'"),
        (["1", ""], r"line 3: the label is empty"),
        (["cat", ""], r"line 3: the label is empty"),
        (["", "1"], r"line 2: the label is empty"),
        (["1", "1_0"], r"line 3: the label '1_0' is no number"),
        (["1", "0x10"], r"line 3: the label '0x10' is no number"),
        (["0.5", "nan"], r"line 3: the label 'nan' is no number"),
        (["0.5", "1e999"], r"line 3: the label inf is not finite"),
        (["1", str(2**63)], r"line 3: the label 9223372036854775808 .* does not fit 64 bits"),
        (["1", "9" * 5000], r"line 3: the label 9{50} .* does not fit 64 bits"),
        (["[1, 2]", "[" * 100_000], r"line 3: the label '\[\[\[.* is no list in JSON"),
        (["[1, 2]", "[1"], r"line 3: the label '\[1' is no list in JSON"),
        (["[1, 2]", "3"], r"line 3: the label 3 cannot be used \(line 2 has \[1, 2\]\)"),
        (["[1, 2]", "[1, 2, 3]"], r"line 3: the label \[1, 2, 3\] cannot be used"),
        (["[1, 2]", '["a", "b"]'], r"line 3: the label \['a', 'b'\] cannot be used"),
        (["[]", "[]"], r"line 2: the label \[\] cannot be used"),
    ],
)
def test_csv_labels_that_cannot_be_raise_with_the_line(tmp_path, rows, message):
    path = write_csv(tmp_path / "l.csv", [["path", "label"], *([f"{n}.jpg", label] for n, label in enumerate(rows))])
    with pytest.raises(SourceError, match=message) as error:
        FileList(path)
    assert error.value.uri == str(path)


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([1, "cat"], r"line 2: the label 'cat' cannot be used \(line 1 has 1\)"),
        (["cat", 1], r"line 2: the label 1 cannot be used \(line 1 has 'cat'\)"),
        ([1, None], r"line 2: the label None"),
        ([None, None], r"line 1: the label None"),
        ([True, False], r"line 1: the label True"),
        ([[1, 2], [1]], r"line 2: the label \[1\] cannot"),
        ([[1, 2], [1, [2]]], r"line 2: the label \[1, \[2\]\] cannot"),
        ([{"a": 1}, 2], r"line 1|line 2: the label 2 cannot"),
        ([1.5, math.nan], r"line 2: the label nan is not finite"),
        ([1, 2**63], r"the label 1 cannot be used.*numbers of 64 bits"),
        (["cat", ""], r"line 2: the label is empty"),
    ],
)
def test_json_labels_that_cannot_be_raise_with_the_line(tmp_path, labels, message):
    path = write_jsonl(tmp_path / "l.jsonl", [{"path": f"{n}.jpg", "label": label} for n, label in enumerate(labels)])
    with pytest.raises(SourceError, match=message):
        FileList(path)


def test_several_label_columns_of_text_raise(tmp_path):
    path = write_csv(tmp_path / "l.csv", [["path", "x", "y"], ["a", 1, 2], ["b", 3, "z"]])
    with pytest.raises(SourceError, match=r"line 3: the label 'z' is no number \(column 'y'\)"):
        FileList(path, label=("x", "y"))
    path = write_jsonl(tmp_path / "l.jsonl", [{"path": "a", "x": 1, "y": 2}, {"path": "b", "x": 1, "y": "z"}])
    with pytest.raises(SourceError, match=r"line 2: 'y' is 'z'"):
        FileList(path, label=("x", "y"))


# --- columns ---


def test_csv_columns_are_integers_floats_or_text(tmp_path):
    columns = {
        "integer": (["1", "-20", "0"], [1, -20, 0]),
        "float": (["1", "2.5", "-1e-3"], [1.0, 2.5, -1e-3]),
        "gap": (["1", "", "3"], [1.0, math.nan, 3.0]),
        "zip": (["01", "02", "10"], ["01", "02", "10"]),
        "large": (["1", "2", str(2**64)], ["1", "2", str(2**64)]),
        "huge": (["1", "2", "9" * 5000], ["1", "2", "9" * 5000]),
        "text": (["a", "", "grüße, \n du"], ["a", "", "grüße, \n du"]),
        "odd": (["1", "2", "x"], ["1", "2", "x"]),
        "none": (["", "", ""], ["", "", ""]),
        "nan": (["nan", "1", "2"], ["nan", "1", "2"]),
        "thousand": (["1_0", "2", "3"], ["1_0", "2", "3"]),
    }
    cells = [["path", *columns], *([f"{n}.jpg", *(texts[n] for texts, _ in columns.values())] for n in range(3))]
    write(tmp_path, "0.jpg", "1.jpg", "2.jpg")
    source = FileList(write_csv(tmp_path / "l.csv", cells), label=None, columns=tuple(columns))
    assert source.columns == tuple(columns)
    for name, (_, expected) in columns.items():
        found = [source[index].columns[name] for index in range(3)]
        assert list(map(type, found)) == list(map(type, expected)), name
        np.testing.assert_array_equal(found, expected)


def test_json_columns_come_back_as_they_were(tmp_path):
    columns = {
        "integer": [1, -20, 0],
        "float": [1, 2.5, -1e-3],
        "text": ["a", "", "grüße\n\0"],
        "mixed": ["1", 2, None],
        "large": [1, 2, 2**64],
        "object": [{"a": [1]}, {}, None],
        "flag": [True, False, True],
        "half": ["\ud800", "a", "b"],
    }
    rows = [{"path": f"{n}.jpg", **{name: values[n] for name, values in columns.items()}} for n in range(3)]
    rows[1]["box"] = [1, 2]
    write(tmp_path, "0.jpg", "1.jpg", "2.jpg")
    source = FileList(write_jsonl(tmp_path / "l.jsonl", rows), label=None, columns=(*columns, "box"))
    for name, expected in columns.items():
        assert [source[index].columns[name] for index in range(3)] == expected
    assert [source[index].columns["box"] for index in range(3)] == [None, [1, 2], None]


def test_json_vectors_of_one_length_are_arrays(tmp_path):
    write(tmp_path, "a", "b")
    rows = [{"path": "a", "box": [1, 2]}, {"path": "b", "box": [3, 4.5]}]
    source = FileList(write_jsonl(tmp_path / "l.jsonl", rows), label=None, columns=("box",))
    assert isinstance(source[0].columns["box"], np.ndarray)
    assert source[1].columns["box"].tolist() == [3, 4.5]


# --- what is wrong with a list ---


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.csv", "", "has no header"),
        ("l.csv", "\npath,label\na,1\n", "has no header"),
        ("l.csv", "path,label\n", "lists no files"),
        ("l.csv", "path,label\n\n\n", "lists no files"),
        ("l.csv", "a.jpg,1\nb.jpg,2\n", r"no column 'path': its first line.*'a\.jpg', '1'.*path_column="),
        ("l.csv", "path,class\na,1\n", r"no column 'label'.*'path', 'class'.*label= \(None for none\)"),
        ("l.csv", "path;label\na;1\n", r"no column 'path'.*'path;label'"),
        ("l.csv", "path,label,path\na,1,b\n", "line 1: the header names 'path' twice"),
        ("l.csv", "path,label\na,1\nb,2,3\n", "line 3: 3 cells, where the header has 2"),
        ("l.csv", 'path,label\n"a\nb",1\n\nb\n', "line 5: 1 cells, where the header has 2"),
        ("l.csv", 'path,label\na,1\n"b,2\nc,3\n', "line 4: unexpected end of data. Quotes must be closed"),
        ("l.csv", 'path,label\n"a"x,1\n', "line 2: .*expected after"),
        ("l.csv", "path,label\na,1\n,2\n", "line 3: the path is empty"),
        ("l.csv", "path,label\na,1\nb\0c,2\n", "line 3: the path 'b.x00c' has a zero character|line contains NUL"),
        ("l.csv", 'path,label\n"a\n",1\nb,1\n"a\n",2\n', r"line 6: the path 'a\\n' is listed on line 3 already"),
        ("l.tsv", "path,label\na,1\n", r"no column 'path'.*'path,label'"),
        ("l.jsonl", "", "lists no files"),
        ("l.jsonl", "\n\n", "lists no files"),
        ("l.jsonl", '{"path": "a", "label": 1}\n{"path": "b"}\n', "line 2: there is no 'label', only 'path'"),
        ("l.jsonl", '{"label": 1}\n', "line 1: there is no 'path', only 'label'"),
        ("l.jsonl", '{"path": "a", "label": 1}\n{"path"\n', r"line 2: no JSON \("),
        ("l.jsonl", '{"path": "a", "label": 1}\n["b", 2]\n', "line 2: each line must be an object"),
        ("l.jsonl", "[" * 100_000, "line 1: no JSON"),
        ("l.jsonl", '{"path": 5, "label": 1}\n', "line 1: the path 5 is no text"),
        ("l.jsonl", '{"path": "a", "label": 1}\n{"path": null, "label": 1}\n', "line 2: the path None is no text"),
        ("l.jsonl", '{"path": "a", "label": 1}\n{"path": "a\\u0000", "label": 1}\n', "line 2: .* zero character"),
        (
            "l.jsonl",
            '{"path": "a", "label": 1}\n{"path": "a", "label": 2}\n',
            "line 2: the path 'a' is listed on line 1",
        ),
    ],
)
def test_list_that_is_wrong_raises_with_the_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(SourceError, match=message) as error:
        FileList(tmp_path / name)
    assert error.value.uri == str(tmp_path / name)


def test_path_with_half_a_surrogate_pair_raises(tmp_path):
    path = write_jsonl(tmp_path / "l.jsonl", [{"path": "a\ud800", "label": 1}])
    with pytest.raises(SourceError, match="line 1: the path"):
        FileList(path)


def test_missing_list_raises(tmp_path):
    with pytest.raises(SourceError, match="cannot be read: No such file"):
        FileList(tmp_path / "gone.csv")


def test_list_with_another_ending_raises(tmp_path):
    (tmp_path / "l.txt").write_text("path,label\na,1\n")
    with pytest.raises(ConfigError, match=r"must end in \.csv, \.tsv or \.jsonl"):
        open_source(tmp_path / "l.txt", format="list")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"label": ()}, "label"),
        ({"label": (1,)}, "label"),
        ({"columns": (None,)}, "columns"),
        ({"classes": "cat"}, "classes"),
        ({"classes": []}, "classes"),
        ({"classes": ["a", "a"]}, "classes"),
        ({"classes": ["a"], "label": ("x", "y")}, "classes"),
        ({"classes": ["a"], "label": None}, "classes"),
    ],
)
def test_arguments_that_cannot_work_raise(tmp_path, options, field):
    path = write_csv(tmp_path / "l.csv", [["path", "label", "x", "y"], ["a", 1, 2, 3]])
    with pytest.raises(ConfigError) as error:
        FileList(path, **options)
    assert error.value.field == field
    assert error.value.allowed


@pytest.mark.parametrize("name", ["l.csv", "l.jsonl"])
def test_further_column_that_is_missing_raises(tmp_path, name):
    path = write_list(tmp_path / name, ["path", "label"], [("a", 1)])
    with pytest.raises(SourceError, match="'nope'"):
        FileList(path, columns=("nope",))


# --- against the csv module, whatever the content and the size of blocks ---

TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6)


@given(
    rows=st.lists(
        st.tuples(TEXT.filter(bool), st.integers(-(2**63), 2**63 - 1), TEXT),
        min_size=1,
        max_size=12,
        unique_by=lambda row: row[0],
    ),
    block=st.integers(1, 13),
    tabs=st.booleans(),
)
def test_any_csv_equals_the_csv_module(tmp_path_factory, rows, block, tabs):
    path = tmp_path_factory.mktemp("csv") / ("l.tsv" if tabs else "l.csv")
    write_csv(
        path, [["note", "path", "label"], *((note, key, label) for key, label, note in rows)], "\t" if tabs else ","
    )
    with open(path, newline="", encoding="utf-8") as file:
        theirs = list(csv.DictReader(file, delimiter="\t" if tabs else ","))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_columns, "ROWS_A_BLOCK", block)
        ours = FileList(path, columns=("note",))
        listed = list_columns.read_list(str(path), ["path", "note"], ["path"])
    assert [ours.key(index) for index in range(len(ours))] == [row["path"] for row in theirs]
    assert ours.labels.tolist() == [int(row["label"]) for row in theirs]
    assert list(listed.columns["note"].values) == [row["note"] for row in theirs]


@given(
    rows=st.lists(
        st.none()
        | st.booleans()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False)
        | st.text(max_size=4)
        | st.lists(st.integers(0, 9) | st.floats(0, 1), max_size=3),
        min_size=1,
        max_size=8,
    ),
    block=st.integers(1, 9),
)
def test_any_json_column_comes_back_equal(tmp_path_factory, rows, block):
    path = tmp_path_factory.mktemp("json") / "l.jsonl"
    write_jsonl(path, [{"path": f"{n}", "value": value} for n, value in enumerate(rows)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_columns, "ROWS_A_BLOCK", block)
        column = list_columns.read_list(str(path), ["value"], []).columns["value"]
    found = [column[index] for index in range(len(column))]
    assert [value.tolist() if isinstance(value, np.ndarray) else value for value in found] == rows


@given(st.lists(st.text(string.ascii_letters, min_size=1, max_size=3), min_size=2, max_size=30))
def test_lines_in_errors_are_those_of_the_file(tmp_path_factory, names):
    path = tmp_path_factory.mktemp("lines") / "l.csv"
    write_csv(path, [["path", "label"], *((name, 0) for name in names)])
    first = {}
    twice = {
        row: first.setdefault(name, row) for row, name in enumerate(names) if name in first or first.update({name: row})
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(list_columns, "ROWS_A_BLOCK", 4)
        if not twice:
            assert len(FileList(path)) == len(names)
            return
        with pytest.raises(SourceError, match=r"line \d+: the path '\w+' is listed on line \d+ already") as error:
            FileList(path)
    again, before = (int(word.rstrip(":")) for word in str(error.value).split() if word.rstrip(":").isdigit())
    assert before < again
    assert names[again - 2] == names[before - 2]


# --- handles ---


@pytest.fixture
def source(tmp_path, image_folder):
    folder = ImageFolder(image_folder)
    rows = [(folder.key(i), folder.classes[label], i / 2) for i, label in enumerate(folder.labels)]
    return FileList(write_csv(tmp_path / "l.csv", [["path", "label", "x"], *rows]), root=image_folder, columns=("x",))


def test_threads_read_the_same(source):
    assert read_in_threads(source)


def test_spawned_process_reads_the_same(source):
    assert read_spawned(source) == read_all(source)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_processes_read_the_same(source):
    assert read_forked(source) == read_all(source)


def test_many_rows_pickle_small(tmp_path):
    rows = ((f"{n:06}.jpg", n % 7, f"{n % 3}.5") for n in range(20_000))
    source = FileList(write_csv(tmp_path / "l.csv", [["path", "label", "x"], *rows]), columns=("x",))
    data = pickle.dumps(source)
    assert len(data) < 20_000 * (11 + 3 * 8 + 4)
    again = pickle.loads(data)
    assert again.fingerprint == source.fingerprint
    assert again.key(19_999) == "019999.jpg"
    source.close()


def test_index_outside_raises(source):
    for index in (-1, len(source)):
        with pytest.raises(IndexError):
            source[index]
        with pytest.raises(IndexError):
            source.key(index)


def test_single_column_may_be_named_without_a_sequence(tmp_path):
    path = write_csv(tmp_path / "l.csv", [["path", "label", "x"], ["a", 1, 2]])
    assert FileList(path, columns="x").columns == ("x",)
