"""The measurements for a GPU end with one line where there is none, and measure what the table of targets asks for."""

import os
import subprocess
import sys

import pytest

from tests.conftest import REPO, missing_for_gpu


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "benchmarks/gpu/run.py", *arguments],
        cwd=REPO,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_gpu_benchmarks_without_a_gpu_say_so_and_measure_nothing():
    done = run(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith("no GPU: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.gpu
def test_gpu_probe_finds_the_gpu_as_designed():
    assert missing_for_gpu() is None
    done = run("--only", "probe", "--images", "48", "--discard")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "NOT AS DESIGNED" not in done.stdout, done.stdout
