"""ImageFolder against torchvision's."""

import os
import pickle
import string

import numpy as np
import pytest
import torchvision.datasets
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.errors import RecordError, SourceError
from gpupipe.sources import folder as folder_module
from gpupipe.sources.folder import IMG_EXTENSIONS, ImageFolder


def assert_like_torchvision(root, **options):
    theirs = torchvision.datasets.ImageFolder(str(root), **options)
    ours = ImageFolder(root, **options)
    assert ours.classes == theirs.classes
    assert ours.class_to_idx == theirs.class_to_idx
    assert [(ours.key(i), int(label)) for i, label in enumerate(ours.labels)] == [
        (os.path.relpath(path, root).replace(os.sep, "/"), label) for path, label in theirs.samples
    ]
    return ours


def write(root, *names):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode(errors="surrogateescape"))


def test_extensions_are_those_of_torchvision():
    assert IMG_EXTENSIONS == torchvision.datasets.folder.IMG_EXTENSIONS


def test_folder_of_generated_images_equals_torchvision(image_folder):
    source = assert_like_torchvision(image_folder)
    assert len(source) == 15
    for index in range(len(source)):
        record = source[index]
        assert record.index == index
        assert record.key == source.key(index)
        assert record.label == source.labels[index]
        assert type(record.label) is int
        assert record.path == str(image_folder / record.key)
        assert record.data == (image_folder / record.key).read_bytes()
        assert record.offset is None
        assert not record.columns


def test_photos_equal_torchvision(photos_dir):
    assert len(assert_like_torchvision(photos_dir)) == 92


def test_order_with_nested_folders_and_odd_names_equals_torchvision(tmp_path):
    write(
        tmp_path,
        *("b/z.jpg", "b/a/1.png", "b/a/b/2.jpg", "b/a-b/3.jpg", "b/a b/4.jpg", "b/A/5.JPG", "b/a.jpg/6.jpg"),
        *(
            "B/upper.Jpeg",
            "10/a.webp",
            "9/a.tif",
            "b-c/a.bmp",
            "ü/ö ß.jpg",
            "日本/写真.png",
            "b/.jpg",
            "b/no_image.txt",
        ),
        *("b/jpg", "b/x.jpg.txt", ".hidden/.a.jpg", "loose.jpg"),
    )
    source = assert_like_torchvision(tmp_path)
    assert "ü/ö ß.jpg" in [source.key(i) for i in range(len(source))]
    assert source[0].data == source.key(0).encode()


def test_name_that_is_not_utf8_is_read(tmp_path):
    name = os.fsdecode(b"a\xff\xfe.jpg")
    try:
        write(tmp_path, f"c/{name}")
    except OSError:
        pytest.skip("this file system takes names in UTF-8 only")
    source = assert_like_torchvision(tmp_path)
    assert source[0].key == f"c/{name}"
    assert source[0].data == f"c/{name}".encode(errors="surrogateescape")
    assert source.fingerprint


def test_links_to_files_and_folders_equal_torchvision(tmp_path):
    write(tmp_path / "elsewhere", "x/1.jpg", "x/deep/2.jpg")
    write(tmp_path / "root", "a/3.jpg", "b/4.jpg")
    (tmp_path / "root" / "c").symlink_to(tmp_path / "elsewhere" / "x", target_is_directory=True)
    (tmp_path / "root" / "a" / "also").symlink_to(tmp_path / "root" / "b", target_is_directory=True)
    (tmp_path / "root" / "a" / "linked.jpg").symlink_to(tmp_path / "elsewhere" / "x" / "1.jpg")
    (tmp_path / "root" / "a" / "nowhere.jpg").symlink_to(tmp_path / "gone.jpg")
    source = assert_like_torchvision(tmp_path / "root")
    keys = [source.key(i) for i in range(len(source))]
    assert source[keys.index("c/deep/2.jpg")].data == b"x/deep/2.jpg"
    with pytest.raises(RecordError, match="No such file"):
        source[keys.index("a/nowhere.jpg")]


@pytest.mark.parametrize("target", [".", "..", "../.."])
def test_link_in_a_circle_raises(tmp_path, target):
    write(tmp_path, "a/b/1.jpg")
    (tmp_path / "a" / "b" / "back").symlink_to(target, target_is_directory=True)
    with pytest.raises(SourceError, match="Remove it"):
        ImageFolder(tmp_path)


NAMES = st.text(string.ascii_letters + string.digits + "-_. é", min_size=1, max_size=4).filter(
    lambda name: name not in (".", "..") and name == name.strip()
)


@given(st.lists(st.tuples(st.lists(NAMES, min_size=1, max_size=3), NAMES), min_size=1, max_size=12))
def test_order_of_any_tree_equals_torchvision(tmp_path_factory, files):
    root = tmp_path_factory.mktemp("tree")
    for folders, name in files:
        try:
            write(root, "/".join([*folders, name + ".jpg"]))
        except OSError:
            continue  # a name that is already taken by a folder or file
    assert_like_torchvision(root, allow_empty=True)


def test_other_extensions_equal_torchvision_and_ignore_case(tmp_path):
    write(tmp_path, "a/1.GIF", "a/2.jpg", "b/3.gif")
    theirs = torchvision.datasets.DatasetFolder(str(tmp_path), loader=open, extensions=(".gif",))
    for extensions in (".gif", (".gif",), [".GIF"]):
        ours = ImageFolder(tmp_path, extensions=extensions)
        assert [ours.key(i) for i in range(len(ours))] == [
            os.path.relpath(path, tmp_path) for path, _ in theirs.samples
        ]


def test_class_without_images_raises_unless_allowed(tmp_path):
    write(tmp_path, "a/1.jpg", "b/notes.txt")
    (tmp_path / "c").mkdir()
    with pytest.raises(FileNotFoundError):
        torchvision.datasets.ImageFolder(str(tmp_path))
    with pytest.raises(SourceError, match=r"2 of 3 class folders.*'b', 'c'.*allow_empty=True"):
        ImageFolder(tmp_path)
    source = assert_like_torchvision(tmp_path, allow_empty=True)
    assert source.classes == ["a", "b", "c"]
    assert source.labels.tolist() == [0]


def test_all_classes_empty_and_allowed_has_no_records(tmp_path):
    (tmp_path / "a").mkdir()
    source = assert_like_torchvision(tmp_path, allow_empty=True)
    assert len(source) == 0
    assert source.labels.shape == (0,)
    assert source.fingerprint
    with pytest.raises(IndexError):
        source[0]


def test_many_empty_classes_are_not_all_named(tmp_path):
    write(tmp_path, "a/1.jpg")
    for number in range(50):
        (tmp_path / f"empty{number:02}").mkdir()
    with pytest.raises(SourceError, match=r"50 of 51 .*'empty09', \.\.\.") as error:
        ImageFolder(tmp_path)
    assert "empty10" not in str(error.value)


def test_missing_folder_raises(tmp_path):
    with pytest.raises(SourceError, match=r"No such file or directory.*one folder for each class") as error:
        ImageFolder(tmp_path / "gone")
    assert error.value.uri == str(tmp_path / "gone")


def test_file_instead_of_folder_raises(tmp_path):
    write(tmp_path, "1.jpg")
    with pytest.raises(SourceError, match="Not a directory"):
        ImageFolder(tmp_path / "1.jpg")


def test_empty_folder_raises(tmp_path):
    with pytest.raises(SourceError, match="no class folders: <root>/<class>"):
        ImageFolder(tmp_path)


def test_loose_images_raise_and_say_what_to_do(tmp_path):
    write(tmp_path, "1.jpg", "2.PNG", "notes.txt")
    with pytest.raises(SourceError, match=r"2 images but no class folders.*move the images"):
        ImageFolder(tmp_path)


def test_folder_that_cannot_be_listed_raises(tmp_path, monkeypatch):
    write(tmp_path, "a/1.jpg", "a/locked/2.jpg")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(folder_module.os, "scandir", refuse)
    with pytest.raises(SourceError, match="locked' cannot be listed: Permission denied"):
        ImageFolder(tmp_path)


def test_file_removed_later_raises_with_all_facts(tmp_path):
    write(tmp_path, "a/1.jpg", "b/2.jpg")
    source = ImageFolder(tmp_path)
    (tmp_path / "b" / "2.jpg").unlink()
    with pytest.raises(RecordError, match=r"record 1 \('b/2.jpg' of .*No such file.*restore it") as error:
        source[1]
    assert (error.value.index, error.value.key) == (1, "b/2.jpg")
    assert error.value.path == str(tmp_path / "b" / "2.jpg")
    assert error.value.uri == str(tmp_path)
    assert isinstance(error.value.__cause__, FileNotFoundError)


def test_relative_root_survives_a_change_of_directory(tmp_path, monkeypatch):
    write(tmp_path / "data", "a/1.jpg")
    monkeypatch.chdir(tmp_path)
    source = ImageFolder("data")
    monkeypatch.chdir("/")
    assert source[0].data == b"a/1.jpg"


def test_home_folder_is_expanded(tmp_path, monkeypatch):
    write(tmp_path / "data", "a/1.jpg")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(ImageFolder("~/data")) == 1


def test_file_that_is_read_in_pieces_is_whole(tmp_path, monkeypatch):
    content = bytes(range(256)) * 100
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "1.jpg").write_bytes(content)
    source = ImageFolder(tmp_path)
    read = os.read
    monkeypatch.setattr(folder_module.os, "read", lambda descriptor, size: read(descriptor, min(size, 1000)))
    assert source[0].data == content


def test_empty_file_is_a_record_of_no_bytes(tmp_path):
    write(tmp_path, "a/1.jpg")
    (tmp_path / "a" / "1.jpg").write_bytes(b"")
    assert ImageFolder(tmp_path)[0].data == b""


def test_reading_leaves_no_file_open(image_folder):
    source = ImageFolder(image_folder)
    for _ in range(5):
        source[0]
    before = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    for index in range(len(source)):
        source[index]
    if before:
        assert len(os.listdir("/proc/self/fd")) == before


def test_fingerprint_follows_keys_and_labels(tmp_path):
    write(tmp_path / "one", "a/1.jpg", "b/2.jpg")
    write(tmp_path / "same", "a/1.jpg", "b/2.jpg")
    write(tmp_path / "renamed", "a/1.jpg", "b/3.jpg")
    write(tmp_path / "more", "a/1.jpg", "b/2.jpg", "b/3.jpg")
    write(tmp_path / "nested", "a/1.jpg", "b/2/.jpg")
    write(tmp_path / "other_label", "a/1.jpg", "b/2.jpg")
    (tmp_path / "other_label" / "aa").mkdir()
    prints = {path.name: ImageFolder(path, allow_empty=True).fingerprint for path in tmp_path.iterdir()}
    assert prints["one"] == prints.pop("same")
    assert len(set(prints.values())) == len(prints)


def test_pickle_is_compact_and_whole(tmp_path):
    write(tmp_path, *(f"class/{i:05}.jpg" for i in range(2000)))
    source = ImageFolder(tmp_path)
    data = pickle.dumps(source)
    assert len(data) < 20 * len(source)
    again = pickle.loads(data)
    assert again.fingerprint == source.fingerprint
    assert again[1999].data == source[1999].data


def test_labels_belong_to_the_caller(image_folder):
    source = ImageFolder(image_folder)
    labels = source.labels
    assert labels.dtype == np.int64
    labels[:] = 7
    assert source.labels.tolist() == sorted([0, 1, 2] * 5)
