"""The command: what it prints, where, and its exit status."""

import json
import os
import subprocess
import sys

import pytest

import gpupipe as gp
from gpupipe import cli, parity
from gpupipe.errors import BackendUnavailable, ConfigError
from tests import images


def run(*arguments: str, **keywords) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own."""
    return subprocess.run([sys.executable, "-m", "gpupipe", *arguments], capture_output=True, text=True, **keywords)


def test_version_is_the_packages(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"gpupipe {gp.__version__}\n"


def test_help_names_every_command_and_imports_nothing_heavy():
    code = (
        "import sys\nfrom gpupipe.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'PIL', 'nvidia', 'numba'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert all(name in found.stdout for name in cli._COMMANDS)


def test_no_command_is_wrong_use():
    found = run()
    assert found.returncode == 2
    assert "COMMAND" in found.stderr


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], gp.Recipe.train()),
        (["train", "--size", "128"], gp.Recipe.train(size=128)),
        (["train-jitter"], gp.Recipe.train(jitter=(0.4, 0.4, 0.4, 0.1))),
        (["eval"], gp.Recipe.eval(size=224, resize=256)),
        (["eval", "--size", "448"], gp.Recipe.eval(size=448, resize=512)),
        (["eval", "--size", "288", "--resize", "300"], gp.Recipe.eval(size=288, resize=300)),
        (
            ["train", "--interpolation", "bicubic", "--precision", "uint8", "--exif", "apply", "--dtype", "float16"],
            gp.Recipe.train(
                interpolation="bicubic", precision="uint8", exif="apply", output=gp.Output(dtype="float16")
            ),
        ),
    ],
)
def test_recipe_prints_json_that_is_that_recipe(capsys, arguments, expected):
    assert cli.main(["recipe", *arguments]) == 0
    assert gp.Recipe.from_json(capsys.readouterr().out) == expected
    assert cli.main(["recipe", *arguments, "--fingerprint"]) == 0
    assert capsys.readouterr().out == expected.fingerprint + "\n"


def test_recipe_file_is_read_back(capsys, tmp_path):
    path = tmp_path / "mine.json"
    path.write_text(gp.Recipe.eval(size=99).to_json(), encoding="utf-8")
    assert cli.main(["recipe", str(path), "--fingerprint"]) == 0
    assert capsys.readouterr().out.strip() == gp.Recipe.eval(size=99).fingerprint


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nothing.json"], "train, train-jitter, eval, or a JSON file"),
        (["train", "--resize", "256"], "--resize belongs to the recipe eval"),
        (["train", "--size", "0"], "size=0 is not valid"),
        (["{file}"], "invalid JSON"),
        (["{file}", "--size", "3", "--dtype", "float16"], "--size, --dtype cannot change the recipe in"),
        (["{folder}"], "cannot read the recipe"),
    ],
)
def test_recipe_wrong_use_is_one_line_and_status_2(capsys, tmp_path, arguments, says):
    (tmp_path / "bad.json").write_text("{", encoding="utf-8")
    arguments = [word.format(file=tmp_path / "bad.json", folder=tmp_path) for word in arguments]
    assert cli.main(["recipe", *arguments]) == 2
    found = capsys.readouterr()
    assert found.out == ""
    assert found.err.startswith("gpupipe: ")
    assert found.err.count("\n") == 1
    assert says in found.err


@pytest.mark.parametrize(("text", "expected"), [("0", (0,)), ("3,1", (3, 1)), ("0,4-6", (0, 4, 5, 6)), ("7-7", (7,))])
def test_numbers_reads_lists_and_ranges(text, expected):
    assert cli._numbers(text) == expected


@pytest.mark.parametrize("text", ["", "a", "-1", "1-", "1,,2", "1.5", "5-3", "0-99999999999", f"0-{10**30}"])
def test_numbers_anything_else_is_wrong_use(text, capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["parity", ".", f"--seeds={text}"])
    assert "--seeds" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path):
    return images.folder(tmp_path / "set", classes=1, per_class=2)


def parity_arguments(folder, *more):
    return ["parity", str(folder), "--backend", "torchvision", "--size", "32", *more]


def test_parity_passes_with_table_and_page(capsys, folder, tmp_path):
    page = tmp_path / "out.html"
    assert cli.main(parity_arguments(folder, "--recipe", "train-jitter", "--html", str(page))) == 0
    found = capsys.readouterr().out
    assert "PASS" in found
    assert str(page) in found
    assert "<html" in page.read_text(encoding="utf-8")


def test_parity_json_is_nothing_but_json(capsys, folder):
    assert cli.main(parity_arguments(folder, "--json", "--seeds", "1,2", "--epochs", "3", "--limit", "1")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] is True
    assert found["files"] == 1
    assert found["draws"] == [{"seed": 1, "epoch": 3}, {"seed": 2, "epoch": 3}]


def test_parity_broken_tolerance_is_status_1(capsys, folder, monkeypatch):
    row = parity.tolerances.Tolerance(max_lsb=-1, reason="nothing is that good")
    monkeypatch.setattr(parity.tolerances, "normalize", lambda _: row)
    assert cli.main(parity_arguments(folder)) == 1
    assert "FAIL: 1 of" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["parity", "nowhere"], "nowhere"),
        (["parity", "{folder}", "--backend", "fast"], "fast"),
        (["parity", "{folder}", "--html", "no/such/folder/x.html", "--backend", "torchvision"], "cannot write"),
        (["parity", "{folder}", "--limit", "0"], "limit"),
    ],
)
def test_parity_wrong_use_is_one_line_and_status_2(capsys, folder, arguments, says):
    assert cli.main([word.format(folder=folder) for word in arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("gpupipe: ")
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("two\nlines"), 2),
        (BackendUnavailable("no DALI"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_main_errors_become_statuses(capsys, monkeypatch, error, status):
    def fail(_):
        raise error

    monkeypatch.setitem(cli._COMMANDS, "fail", cli._Command("fails", (), fail))
    assert cli.main(["fail"]) == status
    assert capsys.readouterr().err.count("\n") == 1


def test_main_error_that_is_a_bug_keeps_its_traceback(monkeypatch):
    def fail(_):
        raise ZeroDivisionError

    monkeypatch.setitem(cli._COMMANDS, "fail", cli._Command("fails", (), fail))
    with pytest.raises(ZeroDivisionError):
        cli.main(["fail"])


@pytest.mark.skipif(os.name != "posix", reason="only there can a folder be removed while someone is in it")
def test_main_in_a_folder_that_is_gone_is_one_line_and_status_2(tmp_path):
    code = "import os, sys; from gpupipe.cli import main; os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    for arguments in (["inspect", "x"], ["pack", "x", "y"], ["index", "x.tar"]):
        found = subprocess.run(
            [sys.executable, "-c", f"{code}; sys.exit(main({arguments!r}))"],
            capture_output=True,
            text=True,
            cwd=tmp_path,
        )
        assert found.returncode == 2, found.stderr
        assert found.stderr == "gpupipe: the folder that this was started in is gone: change to another one\n"


def in_shell(command, **environment):
    return subprocess.run(
        ["bash", "-c", command.replace("gpupipe ", f"{sys.executable} -m gpupipe ")],
        capture_output=True,
        text=True,
        env=os.environ | environment,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("command", ["recipe", "inspect --json {folder}"])
def test_main_on_a_full_disk_is_one_line_and_status_2(folder, command):
    found = in_shell(f"gpupipe {command.format(folder=folder)} > /dev/full")
    assert found.returncode == 2
    assert found.stderr == "gpupipe: the output cannot be written: No space left on device\n"


def test_main_with_closed_streams_does_its_work(folder):
    found = in_shell(f"gpupipe inspect {folder} >&-")
    assert (found.returncode, found.stderr) == (0, "")
    found = in_shell(f"gpupipe inspect {folder} 2>&-")
    assert found.returncode == 0
    assert "unreadable: 0" in found.stdout


def test_main_on_a_terminal_without_the_characters_of_a_name_escapes_them(tmp_path):
    images.folder(tmp_path / "data")
    (tmp_path / "data" / "\u8a9e").mkdir()
    (tmp_path / "data" / "\u8a9e" / "1.jpg").write_bytes(images.jpeg(images.photo(8, 8, 1)))
    found = in_shell(f"gpupipe inspect {tmp_path / 'data'}", PYTHONIOENCODING="ascii")
    assert (found.returncode, found.stderr) == (0, "")
    assert "\\u8a9e" in found.stdout


def test_main_reader_that_leaves_is_no_traceback():
    found = subprocess.run(
        ["bash", "-c", f"set -o pipefail; (sleep 0.2; {sys.executable} -m gpupipe recipe) | true; echo $?"],
        capture_output=True,
        text=True,
    )
    assert found.stderr == ""
    assert found.stdout.strip() == "141"
