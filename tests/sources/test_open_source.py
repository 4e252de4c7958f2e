"""open_source picks the right source, or says what there is."""

import os

import pytest

from gpupipe.errors import ConfigError, SourceError
from gpupipe.records import Record
from gpupipe.sources import open_source
from gpupipe.sources.base import check_index, is_source
from gpupipe.sources.folder import ImageFolder


class Tiny:
    uri = "memory"
    fingerprint = "1"
    columns = ()

    @property
    def labels(self):
        raise AssertionError("asked for labels")

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Record(data=b"", label=0, index=check_index(index, 1), key="0")

    def close(self):
        pass


@pytest.mark.parametrize("kind", [str, lambda path: path, lambda path: f"{path}/"])
def test_open_source_of_a_folder_is_an_image_folder(image_folder, kind):
    source = open_source(kind(image_folder))
    assert isinstance(source, ImageFolder)
    assert source.uri == str(image_folder)


def test_open_source_of_a_source_is_itself_and_calls_nothing():
    source = Tiny()
    assert open_source(source) is source


def test_open_source_of_an_image_folder_is_itself(image_folder):
    source = ImageFolder(image_folder)
    assert open_source(source) is source


def test_open_source_of_nothing_raises_source_error(tmp_path):
    with pytest.raises(SourceError, match=r"there is no .*gone.*Supported are: .*a folder of class folders"):
        open_source(tmp_path / "gone")


@pytest.mark.parametrize("target", [None, 3, [1, 2], object(), ImageFolder])
def test_open_source_of_something_else_raises_config_error(target):
    with pytest.raises(ConfigError, match=r"Supported are: .*a folder of class folders") as error:
        open_source(target)
    assert error.value.field == "source"


def test_open_source_of_an_unknown_format_raises_and_names_those_there_are(image_folder):
    with pytest.raises(ConfigError, match=r"format='zip' .* folder, tar"):
        open_source(image_folder, format="zip")


def test_open_source_of_a_file_raises_config_error(tmp_path):
    path = tmp_path / "list.xyz"
    path.write_text("")
    with pytest.raises(ConfigError, match=r"list\.xyz"):
        open_source(path)


@pytest.mark.parametrize("name", ["x.tar", "x.csv", "x.jsonl", "images.npy", "x.lmdb", "x"])
@pytest.mark.parametrize("format", [None, "list", "npy", "packed"])
def test_open_source_of_a_pipe_raises_and_does_not_wait_for_a_writer(tmp_path, name, format):
    if not hasattr(os, "mkfifo"):
        pytest.skip("there are no named pipes here")
    os.mkfifo(tmp_path / name)
    with pytest.raises(SourceError, match="neither a file nor a folder: copy"):
        open_source(tmp_path / name, format=format)


@pytest.mark.parametrize("name", ["a\0b", "a\0.csv", "a\0.tar", "\0.npy"])
def test_open_source_of_a_name_with_a_zero_byte_raises_source_error(name):
    with pytest.raises(SourceError, match=r"there is no .*\\x00"):
        open_source(name)


def test_open_source_of_a_folder_with_some_manifest_says_how_to_open_it(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(SourceError, match=r"no manifest of a pack.*format='folder'"):
        open_source(tmp_path)


def test_open_source_of_a_folder_of_shards_says_how_to_open_them(tmp_path):
    (tmp_path / "a.tar").write_bytes(bytes(1024))
    with pytest.raises(SourceError, match=r"no class folders.*\*\.tar'"):
        open_source(tmp_path)


def test_is_source_of_a_list_is_false():
    assert not is_source([b"1", b"2"])
    assert is_source(Tiny())
