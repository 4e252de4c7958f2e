"""gpupipe selfcheck: right on a machine that works, and honest on one that does not."""

import json
from dataclasses import replace

import pytest

import gpupipe.measure.selfcheck as checks
from gpupipe import backends
from gpupipe.cli import main
from gpupipe.errors import BackendError
from gpupipe.headers import scan
from tests.available import why_not

no_gpu = pytest.mark.skipif(backends.cuda_problem() is None, reason="this machine has a GPU")


@pytest.fixture(scope="module")
def found():
    return checks.selfcheck()


def verdicts(found):
    return {check.name: check.verdict for check in found.checks}


def test_selfcheck_compares_every_backend_that_is_here(found):
    assert found.ok, found.table()
    seen = verdicts(found)
    for name in ("dali", "numba"):
        assert seen[f"pixels of {name} on cpu"] == ("ok" if why_not(name) is None else "missing")
    assert "torch" in found.environment


@no_gpu
def test_selfcheck_without_a_gpu_is_well_unless_one_is_required(found):
    assert verdicts(found)["GPU"] == "missing"
    assert checks._gpu(required=True).verdict == "failed"


def test_selfcheck_as_json_holds_every_check(found):
    assert [check["name"] for check in json.loads(found.to_json())["checks"]] == [check.name for check in found.checks]


def test_selfcheck_table_says_what_to_do(found):
    broken = replace(found, checks=[checks.Check("a thing", "failed", "it is broken", "mend it")])
    assert not broken.ok
    assert "failed  a thing  it is broken" in broken.table()
    assert "-> mend it" in broken.table()
    assert "something failed" in broken.table()


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import os; os.abort()", "exit status -6"),
        ("raise ValueError('odd')", "ValueError: odd"),
        ("", "no output"),
        ("print(1); print(True)", "True"),
    ],
)
def test_check_in_a_child_survives_whatever_it_does(code, said):
    assert said in checks._in_child(code)


def test_check_in_a_child_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(checks, "_CHILD_TIMEOUT_S", 0.5)
    assert "no answer" in checks._in_child("import time; time.sleep(60)")


@pytest.mark.parametrize("check", [checks._regions, checks._exact])
@pytest.mark.parametrize(("answer", "verdict"), [("True", "ok"), ("False", "missing"), ("exit status -11", "failed")])
def test_crash_of_a_decoder_is_a_failure_and_its_absence_is_not(monkeypatch, check, answer, verdict):
    monkeypatch.setattr(checks, "_in_child", lambda _: answer)
    assert check().verdict == verdict


def test_pixels_outside_the_tolerance_are_a_failure(monkeypatch, tmp_path):
    class Broken:
        ok = False
        rows = ()

        def table(self):
            return "whole chain 3.2"

    monkeypatch.setattr(checks, "check_parity", lambda *_, **__: Broken())
    check = checks._parity(str(tmp_path), "numba", "cpu", required=False)
    assert check.verdict == "failed"
    assert "whole chain 3.2" in check.found


def test_backend_that_fails_is_a_failure(monkeypatch, tmp_path):
    def fail(*_, **__):
        raise BackendError("the driver is too old")

    monkeypatch.setattr(checks, "check_parity", fail)
    check = checks._parity(str(tmp_path), "dali", "cpu", required=False)
    assert (check.verdict, check.found) == ("failed", "the driver is too old")


def test_generated_images_are_of_all_the_kinds_that_decoders_treat_differently(tmp_path):
    checks.write_images(tmp_path)
    headers = [scan(path.read_bytes()) for path in sorted((tmp_path / "a").iterdir())]
    assert {header.format for header in headers} == {"JPEG", "PNG", "WEBP"}
    assert {header.native for header in headers} == {True, False}


@no_gpu
def test_selfcheck_command_fails_where_a_gpu_is_required(monkeypatch, capsys):
    monkeypatch.setattr(checks, "_parity", lambda *_, **__: checks.Check("pixels", "ok", "not compared here"))
    assert main(["selfcheck"]) == 0
    assert "all is well" in capsys.readouterr().out
    monkeypatch.setenv("GPUPIPE_REQUIRE_GPU", "1")
    assert main(["selfcheck", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False
