"""The commands pack, index and inspect: what they print, where, and their exit status."""

import json
import os
import shutil
import subprocess
import sys

import pytest

import gpupipe as gp
from gpupipe import cli
from gpupipe.packing import Manifest
from tests import images


def run(*arguments, **keywords):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "gpupipe", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, **keywords)


@pytest.mark.parametrize("format", ["tar", "lmdb", "memmap"])
def test_pack_prints_a_summary_and_the_pack_opens(tmp_path, image_folder, capsys, format):
    arguments = ["pack", str(image_folder), str(tmp_path / "packed"), "--format", format, "--shuffle", "3", "--verify"]
    assert cli.main(arguments) == 0
    found = capsys.readouterr()
    assert f"15 records of 15 as {format}" in found.out
    assert "images: the bytes of the source, untouched" in found.out
    assert "verified" in found.out
    assert found.err == ""
    assert len(gp.open_source(tmp_path / "packed")) == 15


def test_pack_prints_the_manifest_as_json(tmp_path, image_folder, capsys):
    arguments = ["pack", str(image_folder), str(tmp_path / "packed"), "--json", "--prefix", "train"]
    arguments += ["--shard-samples", "8", "--shard-bytes", "1M", "--resize", "30", "--quality", "70"]
    assert cli.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == json.loads((tmp_path / "packed" / "manifest.json").read_text())
    assert found["options"]["shard_bytes"] == 1_000_000
    assert found["options"]["resize"] == 30
    assert [file["name"] for file in found["files"]] == ["train-000000.tar", "train-000001.tar"]
    assert Manifest.load(str(tmp_path / "packed")).changed == found["changed"] > 0


def test_pack_runs_as_a_command(tmp_path, image_folder):
    found = run("pack", image_folder, "packed", cwd=tmp_path)
    assert (found.returncode, found.stderr) == (0, "")
    assert "15 records" in found.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing-here", "packed"], "there is no 'nothing-here'"),
        ([".", "packed"], "have no images"),
        (["IMAGES", "packed", "--shard-samples", "0"], "shard_samples=0"),
        (["IMAGES", "packed", "--raw"], "only format='memmap'"),
        (["IMAGES", "packed", "--prefix", "a/b"], "prefix='a/b'"),
        (["IMAGES", "packed", "--shuffle", "-1"], "shuffle=-1"),
        (["IMAGES", "packed", "--threads", "0"], "threads=0"),
        (["IMAGES", "taken"], "is no pack"),
        (["IMAGES", "IMAGES/packed"], "lies in the source"),
    ],
)
def test_pack_of_wrong_use_says_so_in_one_line(tmp_path, image_folder, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    assert cli.main(["pack", *(each.replace("IMAGES", str(image_folder)) for each in arguments)]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("gpupipe: ")
    assert found.err.count("\n") == 1
    assert says in found.err
    assert os.listdir(tmp_path) == ["taken"]


@pytest.mark.parametrize("size", ["", "M", "1.5G", "-1", "1 M", "9" * 20])
def test_pack_of_a_size_that_is_none_is_wrong_use(tmp_path, capsys, size):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["pack", "a", str(tmp_path / "b"), f"--shard-bytes={size}"])
    assert "is no size like" in capsys.readouterr().err


def test_pack_with_other_arguments_is_refused(tmp_path, image_folder, capsys):
    assert cli.main(["pack", str(image_folder), str(tmp_path / "packed")]) == 0
    assert cli.main(["pack", str(image_folder), str(tmp_path / "packed"), "--shuffle", "1"]) == 2
    assert "shuffle: null there, 1 asked for" in capsys.readouterr().err


def test_pack_that_skips_says_what(tmp_path, capsys):
    images.folder(tmp_path / "data")
    (tmp_path / "data" / "class_0" / "000.JPEG").write_bytes(b"no image")
    arguments = ["pack", str(tmp_path / "data"), str(tmp_path / "packed"), "--resize", "20"]
    assert cli.main(arguments) == 2
    assert "class_0/000.JPEG" in capsys.readouterr().err
    assert cli.main([*arguments, "--on-error", "skip"]) == 0
    assert "skipped: 1 ('class_0/000.JPEG')" in capsys.readouterr().out


def test_index_of_a_folder_prints_where_it_is(tmp_path, capsys):
    images.folder(tmp_path / "data")
    assert cli.main(["index", str(tmp_path / "data")]) == 0
    out = capsys.readouterr().out
    assert "15 records, 3 classes" in out
    assert str(tmp_path / "data" / ".gpupipe-index.npz") in out


def test_index_of_shards_prints_json(tmp_path, image_folder, capsys):
    gp.pack(image_folder, tmp_path / "packed", options=gp.PackOptions(shard_samples=8))
    for path in (tmp_path / "packed").iterdir():
        if path.suffix != ".tar":
            path.unlink()
    assert cli.main(["index", str(tmp_path / "packed"), "--dali", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["kind"], found["records"], found["shards"], found["dali"]) == ("tar", 15, 2, 2)
    assert sorted(os.listdir(tmp_path / "packed")) == [
        "index.npz",
        "shard-000000.idx",
        "shard-000000.tar",
        "shard-000000.tar.index.npz",
        "shard-000001.idx",
        "shard-000001.tar",
        "shard-000001.tar.index.npz",
    ]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing.tar"], "missing"),
        (["IMAGES", "--dali"], "no tar shards"),
        (["x-{0..1.tar"], "x-{0..1.tar"),
    ],
)
def test_index_of_wrong_use_says_so_in_one_line(tmp_path, image_folder, capsys, monkeypatch, arguments, says):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["index", *(each.replace("IMAGES", str(image_folder)) for each in arguments)]) == 2
    found = capsys.readouterr().err
    assert found.startswith("gpupipe: ")
    assert found.count("\n") == 1
    assert says in found


def test_inspect_prints_tables_and_is_ok(image_folder, capsys):
    assert cli.main(["inspect", str(image_folder), "--decode"]) == 0
    out = capsys.readouterr().out
    assert "15 records" in out
    assert "unreadable: 0 (every image was decoded)" in out


def test_inspect_of_a_bad_file_is_no(tmp_path, capsys):
    images.folder(tmp_path / "data")
    (tmp_path / "data" / "class_0" / "000.JPEG").write_bytes(b"no image")
    assert cli.main(["inspect", str(tmp_path / "data"), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [each["key"] for each in found["bad"]] == ["class_0/000.JPEG"]
    assert found["ok"] is False


def test_inspect_of_nothing_says_so(capsys):
    assert cli.main(["inspect", "nothing-here"]) == 2
    assert "there is no 'nothing-here'" in capsys.readouterr().err


def test_commands_print_names_that_are_no_unicode(tmp_path, image_folder):
    root = tmp_path / "data-\udcff"
    shutil.copytree(image_folder, root)
    (root / "class_0").rename(root / "class-\udcfe")
    for arguments in (["inspect", root], ["index", root], ["pack", root, tmp_path / "packed", "--verify"]):
        found = run(*arguments)
        assert (found.returncode, found.stderr) == (0, ""), arguments


def test_pack_of_files_that_are_gone_raises_or_skips_them(tmp_path, image_folder, capsys):
    shutil.copytree(image_folder, tmp_path / "data")
    (tmp_path / "data" / "class_1" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    arguments = ["pack", str(tmp_path / "data"), str(tmp_path / "packed")]
    assert cli.main(arguments) == 2
    assert "class_1/gone.jpg" in capsys.readouterr().err
    assert cli.main([*arguments, "--on-error", "skip", "--json"]) == 0
    (skipped,) = json.loads(capsys.readouterr().out)["skipped"]
    assert skipped["key"] == "class_1/gone.jpg"
    assert "No such file" in skipped["reason"]
    assert len(gp.open_source(tmp_path / "packed")) == 15
