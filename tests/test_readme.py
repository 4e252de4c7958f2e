"""The README's promises: its examples run, and its commands exist."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
README = (REPO / "README.md").read_text()
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)


def test_readme_has_examples():
    assert len(EXAMPLES) >= 1


@pytest.mark.parametrize("code", EXAMPLES, ids=lambda code: code.splitlines()[0][:40])
def test_readme_example_runs(code, image_folder, tmp_path, monkeypatch):
    shutil.copytree(image_folder, tmp_path / "train")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    exec(compile(code, "README.md", "exec"), namespace)


@pytest.mark.parametrize("target", ["demo", "test"])
def test_readme_command_exists_in_makefile(target):
    assert f"make {target}" in README
    assert re.search(rf"^{target}:", (REPO / "Makefile").read_text(), flags=re.MULTILINE)


def test_readme_first_example_is_short():
    lines = [line for line in EXAMPLES[0].splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert len(lines) <= 12


def test_readme_tables_are_those_of_the_results():
    spec = importlib.util.spec_from_file_location("readme_tables", REPO / "benchmarks" / "readme_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert README.count("<!-- end -->") >= 3
    assert tables.filled(README) == README, "run: python benchmarks/readme_tables.py"
