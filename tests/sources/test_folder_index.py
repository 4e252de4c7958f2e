"""A folder by its index is the folder by its list, and a changed folder is listed again."""

import logging
import shutil
import time

import numpy as np
import pytest

import gpupipe as gp
from gpupipe.errors import SourceError
from gpupipe.sources import folder_index
from gpupipe.sources.folder import ImageFolder
from gpupipe.sources.folder_index import NAME, write_folder_index
from tests import images


@pytest.fixture
def root(tmp_path):
    return images.folder(tmp_path / "data")


@pytest.fixture
def lists(monkeypatch):
    """How often a folder was listed."""
    made = []
    monkeypatch.setattr(folder_index, "ImageFolder", _counting(made))
    return made


def _counting(made):
    class Counting(ImageFolder):
        def __init__(self, *arguments, **keywords):
            made.append(arguments)
            super().__init__(*arguments, **keywords)

    return Counting


def facts(source):
    return [
        source.classes,
        source.class_to_idx,
        source.root,
        source.fingerprint,
        source.labels.tolist(),
        [(record.key, record.label, bytes(record.data)) for record in map(source.__getitem__, range(len(source)))],
        repr(source),
    ]


def test_folder_by_its_index_is_the_same_and_is_not_listed(root, lists):
    write_folder_index(root)
    lists.clear()
    found = gp.open_source(root)
    assert lists == []
    assert facts(found) == facts(ImageFolder(root))


def test_folder_without_an_index_is_listed(root, lists):
    gp.open_source(root)
    assert len(lists) == 1


def test_folder_with_options_is_listed(root, lists):
    write_folder_index(root)
    lists.clear()
    assert len(gp.open_source(root, extensions=".png")) == 3
    assert len(lists) == 1


def test_folder_with_odd_names_comes_back(tmp_path, lists):
    for name in ("ü/日本.jpg", "a b/c d.jpg", "a b/deeper/still/x.png", "\udcff/\udcfe.jpg"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode("utf-8", "surrogateescape"))
    write_folder_index(tmp_path / "data")
    lists.clear()
    found = gp.open_source(tmp_path / "data")
    assert facts(found) == facts(ImageFolder(tmp_path / "data"))
    assert len(lists) == 0


def _add_file(root):
    shutil.copy(root / "class_0" / "000.JPEG", root / "class_0" / "new.jpg")


def _add_file_deep(root):
    shutil.copy(root / "class_0" / "000.JPEG", root / "class_0" / "nested" / "new.jpg")


def _remove_file(root):
    (root / "class_1" / "000.JPEG").unlink()


def _rename_file(root):
    (root / "class_1" / "000.JPEG").rename(root / "class_1" / "other.jpg")


def _add_class(root):
    shutil.copytree(root / "class_0", root / "class_9")


def _remove_class(root):
    shutil.rmtree(root / "class_2")


def _rename_class(root):
    (root / "class_2").rename(root / "class_3")


@pytest.mark.parametrize(
    "change", [_add_file, _add_file_deep, _remove_file, _rename_file, _add_class, _remove_class, _rename_class]
)
def test_folder_that_changed_is_listed_again(root, lists, caplog, change):
    write_folder_index(root)
    lists.clear()
    time.sleep(0.02)  # times of files come in steps of a few milliseconds
    change(root)
    with caplog.at_level(logging.WARNING):
        found = gp.open_source(root)
    assert len(lists) == 1
    assert "has changed since it was indexed" in caplog.text
    assert facts(found) == facts(ImageFolder(root))


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"text"])
def test_folder_with_a_damaged_index_is_listed(root, caplog, data):
    (root / NAME).write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert facts(gp.open_source(root)) == facts(ImageFolder(root))
    assert "is not usable" in caplog.text


def test_folder_with_an_index_that_leads_outside_is_listed(root, lists, caplog):
    write_folder_index(root)
    table = folder_index.Table.load(root / NAME)
    table.meta["folders"][0] = "../../etc"
    table.save(root / NAME)
    lists.clear()
    with caplog.at_level(logging.WARNING):
        gp.open_source(root)
    assert len(lists) == 1
    assert "outside of its own" in caplog.text


def test_folder_index_that_cannot_be_written_raises(tmp_path):
    with pytest.raises(SourceError):
        write_folder_index(tmp_path / "nothing")
    with pytest.raises(SourceError, match="no class folders"):
        write_folder_index(tmp_path)


def test_folder_by_its_index_needs_little_memory_and_pickles(root):
    import pickle

    write_folder_index(root)
    found = pickle.loads(pickle.dumps(gp.open_source(root)))
    assert found._ends.dtype == np.uint32
    assert facts(found) == facts(ImageFolder(root))
