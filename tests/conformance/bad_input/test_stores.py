"""The zoo in every kind of store: the same verdicts and substitutes, and where to find what is bad."""

from pathlib import Path

import pytest

import gpupipe as gp
from gpupipe.packing import pack
from tests.available import loader
from tests.conformance.bad_input import files
from tests.zoo import zoo

STORES = ("folder", "list", "tar", "lmdb", "memmap")
RECIPE = gp.Recipe.eval(size=8, resize=8)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """All of the zoo in class folders, whose order is that of the names in the zoo."""
    made = tmp_path_factory.mktemp("zoo") / "images"
    for number, animal in enumerate(zoo().values()):
        folder = made / f"class {number // 60}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{number:03}.jpg").write_bytes(animal.data)
    return made


@pytest.fixture(scope="module", params=STORES)
def source(request, root, tmp_path_factory):
    if request.param == "folder":
        return gp.open_source(root)
    made = tmp_path_factory.mktemp(request.param)
    if request.param == "list":
        paths = sorted(root.rglob("*.jpg"))
        rows = [f"{path},{number // 60}" for number, path in enumerate(paths)]
        (made / "list.csv").write_text("path,label\n" + "\n".join(rows) + "\n")
        return gp.open_source(made / "list.csv")
    if request.param == "lmdb":
        pytest.importorskip("lmdb", reason="needs lmdb: pip install 'gpupipe[lmdb]'")
    pack(root, made / "packed", format=request.param, verify=True)
    return gp.open_source(made / "packed")


def epoch(source, policy):
    on_error = gp.OnError(policy, max_bad=files.ANY_NUMBER)
    with loader(
        source, RECIPE, "torchvision", batch_size=16, fields=("label", "index", "valid"), on_error=on_error
    ) as each:
        return files.rows_of(each), list(each.errors)


def test_store_has_the_verdict_on_each_file_and_says_where_it_is(source):
    animals = list(zoo().values())
    assert len(source) == len(animals)
    rows, errors = epoch(source, "ignore")
    assert [bool(valid) for *_, valid in rows] == [animal.good for animal in animals]
    assert [int(label) for label, *_ in rows] == [n // 60 if animal.good else -100 for n, animal in enumerate(animals)]
    assert len(errors) == sum(not animal.good for animal in animals)
    for bad in errors:
        assert bad.key in bad.reason
        assert bad.path in bad.reason
        if bad.offset is not None:
            assert f"at byte {bad.offset}" in bad.reason
            data = animals[bad.index].data
            assert Path(bad.path).read_bytes()[bad.offset : bad.offset + len(data)] == data
        elif Path(bad.path).suffix == ".jpg":
            assert Path(bad.path).read_bytes() == animals[bad.index].data


def test_store_gives_the_substitutes_of_the_folder(source, root):
    _, errors = epoch(source, "substitute")
    _, theirs = epoch(gp.open_source(root), "substitute")
    assert {bad.index: bad.substitute for bad in errors} == {bad.index: bad.substitute for bad in theirs}
