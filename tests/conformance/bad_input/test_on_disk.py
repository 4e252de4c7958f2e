"""What else than a readable file may bear the name of an image: an error, and never a wait without end."""

import os
import socket
import sys
import threading
from pathlib import Path

import pytest

import gpupipe as gp
from gpupipe.errors import RecordError
from gpupipe.sources.folder import ImageFolder
from tests import images

pytestmark = pytest.mark.skipif(os.name != "posix", reason="links, pipes and devices are made as on POSIX systems")


def link_to_nothing(path):
    path.symlink_to("gone.jpg")


def link_to_itself(path):
    path.symlink_to(path.name)


def pipe(path):
    os.mkfifo(path)


def endless_device(path):
    path.symlink_to("/dev/zero")


def empty_device(path):
    path.symlink_to("/dev/null")


def unix_socket(path):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(path))


def unreadable(path):
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    path.write_bytes(images.jpeg(images.photo(20, 30)))
    path.chmod(0)


def removed(path):
    path.unlink()


def turned_into_a_folder(path):
    path.unlink()
    path.mkdir()


def turned_into_a_pipe(path):
    path.unlink()
    os.mkfifo(path)


BEFORE = {
    link_to_nothing: "No such file",
    link_to_itself: "symbolic links",
    pipe: "a named pipe, not a regular file",
    endless_device: "a device, not a regular file",
    empty_device: "a device, not a regular file",
    unix_socket: "a socket, not a regular file",
    unreadable: "Permission denied",
}
AFTER = {
    removed: "No such file",
    turned_into_a_folder: "a folder, not a regular file",
    turned_into_a_pipe: "a named pipe, not a regular file",
}


def within(seconds, work):
    """What `work` returns or raises, unless it hangs."""
    found = []

    def run():
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    assert not thread.is_alive(), f"still at it after {seconds} s"
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a socket's path must be short
    (tmp_path / "a").mkdir()
    for name in ("1.jpg", "3.jpg"):
        (tmp_path / "a" / name).write_bytes(images.jpeg(images.photo(20, 30)))
    return tmp_path


@pytest.mark.parametrize("make", [*BEFORE, *AFTER], ids=lambda make: make.__name__)
def test_folder_with_what_is_no_file_reads_the_others_and_says_why(root, make):
    path = root / "a" / "2.jpg"
    if make in BEFORE:
        make(path)
        source = ImageFolder(root)
    else:
        path.write_bytes(images.jpeg(images.photo(20, 30)))
        source = ImageFolder(root)
        make(path)
    assert len(source) == 3
    with pytest.raises(RecordError, match=(BEFORE | AFTER)[make]) as error:
        within(10, lambda: source[1])
    assert (error.value.index, error.value.key, error.value.path) == (1, "a/2.jpg", str(path))

    def epoch():
        with gp.Loader(
            source,
            gp.Recipe.eval(size=8, resize=8),
            batch_size=3,
            backend="torchvision",
            fields=("index", "label", "valid"),
            on_error="ignore",
        ) as loader:
            return list(loader), loader.errors

    (batch,), errors = within(30, epoch)
    assert [each.tolist() for each in batch] == [[0, 1, 2], [0, -100, 0], [True, False, True]]
    assert [(bad.index, bad.path) for bad in errors] == [(1, str(path))]


def test_folder_named_as_an_image_is_a_folder(root):
    (root / "a" / "x.jpg").mkdir()
    (root / "a" / "x.jpg" / "inside.jpg").write_bytes(images.jpeg(images.photo(20, 30)))
    source = ImageFolder(root)
    assert [source.key(index) for index in range(len(source))] == ["a/1.jpg", "a/3.jpg", "a/x.jpg/inside.jpg"]


@pytest.mark.skipif(sys.platform != "linux", reason="descriptors are counted in /proc")
def test_refused_files_leave_no_descriptor_open(root):
    os.mkfifo(root / "a" / "2.jpg")
    (root / "a" / "4.jpg").symlink_to("/dev/zero")
    source = ImageFolder(root)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(100):
        for index in (1, 3):
            with pytest.raises(RecordError):
                source[index]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
