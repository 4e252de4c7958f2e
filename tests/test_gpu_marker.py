"""The `gpu` marker skips where there is no GPU, and fails there when a GPU is required."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPO

TEST = """
import pytest

@pytest.mark.gpu
def test_marked():
    pass

def test_plain():
    pass
"""


@pytest.mark.parametrize(
    ("required", "expected"),
    [(None, "1 passed, 1 skipped"), ("0", "1 passed, 1 skipped"), ("1", "1 passed, 1 error")],
)
def test_gpu_marker_without_gpu_skips_or_fails_when_required(tmp_path, required, expected):
    (tmp_path / "test_it.py").write_text(TEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu\n")
    environment = os.environ | {"PYTHONPATH": str(REPO), "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("GPUPIPE_REQUIRE_GPU", None)
    if required is not None:
        environment["GPUPIPE_REQUIRE_GPU"] = required
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:randomly", "-n0", "-rs", "test_it.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert expected in run.stdout, run.stdout + run.stderr
    assert "CUDA" in run.stdout or "DALI" in run.stdout, "the reason is missing"
    assert run.returncode == (1 if required == "1" else 0)
