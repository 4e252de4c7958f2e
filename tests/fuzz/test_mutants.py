"""Thousands of damaged files: no process dies, none hangs, and all decoders say the same of each.

By itself the suite takes 2,000 of them, in a minute. `FUZZ_COUNT=20000 python -m pytest tests/fuzz` takes ten times as
many and as long. The numbers are the seeds: `tests.fuzz.mutations.mutated(number)` makes the file again.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import available
from tests.fuzz.mutations import bases, mutated

CHILD = Path(__file__).parent / "child.py"
COUNT = int(os.environ.get("FUZZ_COUNT", "2000"))
CHUNK = min(COUNT, 1000 if COUNT < 10_000 else 4000)
BATCH_SIZE = 32
# For a batch, imports and compilation on a busy machine included.
LIMIT_S = 100
GUARD_S = 580


def run(first, count, report, backends, *, batch_size=BATCH_SIZE, limit_s=LIMIT_S, fault=""):
    """What a child found; or the test fails, and names the file that did it."""
    environment = os.environ | {"FUZZ_LIMIT_S": str(limit_s), "FUZZ_FAULT": fault, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(CHILD), str(first), str(count), str(batch_size), str(report), *backends]
    report.unlink(missing_ok=True)
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, errors="replace", timeout=GUARD_S, check=False
    )
    if done.returncode == 0:
        return json.loads(report.read_text())
    at = json.loads(Path(f"{report}.at").read_text())
    said = done.stderr if len(done.stderr) < 4000 else f"{done.stderr[:1000]} ... {done.stderr[-3000:]}"
    what = f"files {first} to {first + count - 1} ended with {done.returncode} at {at}\n{said}"
    if batch_size == 1:
        # Of this batch and those that were read ahead.
        suspects = range(at["first"], min(at["first"] + 3, first + count))
        for number in suspects:
            (report.parent / f"mutant {number}").write_bytes(mutated(number)[1])
        named = "; ".join(f"{number}: {mutated(number)[0]}" for number in suspects)
        pytest.fail(f"one of these ({named}), saved in {report.parent}: {what}")
    # Once more, file by file, from a batch before the one that it died at.
    start = max(first, at["first"] - batch_size)
    run(start, min(4 * batch_size, first + count - start), report, backends, batch_size=1, limit_s=limit_s, fault=fault)
    pytest.fail(f"not again in batches of one: {what}")


@pytest.mark.parametrize("first", range(0, COUNT, CHUNK))
def test_decoders_of_damaged_files_survive_and_agree(first, tmp_path):
    there = [backend for backend in ("torchvision", "numba", "dali") if available.why_not(backend) is None]
    count = min(CHUNK, COUNT - first)
    found = run(first, count, tmp_path / "report.json", there)
    for each in found["disagreements"]:
        description, data = mutated(each["number"])
        (tmp_path / f"mutant {each['number']}").write_bytes(data)
        each["file"] = description
    # No file is left on which backends, whole decode and Pillow differ; one that is found is to be explained here.
    assert found["disagreements"] == [], f"the files are in {tmp_path}"
    # Neither all bad nor all good, or else little was tested.
    assert 0.2 * count < found["good"] < 0.8 * count
    assert found["native"] > 0.2 * count


@pytest.mark.parametrize("fault", ["crash", "hang"])
def test_file_that_ends_the_process_is_named(fault, tmp_path):
    if fault == "hang" and COUNT <= 2000:
        pytest.skip("takes a minute: set FUZZ_COUNT to more than 2000")
    with pytest.raises(pytest.fail.Exception, match=r"one of these .*\b137: ") as failure:
        run(100, 64, tmp_path / "report.json", ["torchvision"], limit_s=25, fault=f"{fault} 137")
    assert ("Aborted" if fault == "crash" else "Timeout") in str(failure.value)
    assert (tmp_path / "mutant 137").read_bytes() == mutated(137)[1]


def test_mutants_are_the_same_each_time_and_differ_from_their_bases():
    again = [mutated(number) for number in range(300)]
    assert again == [mutated(number) for number in range(300)]
    assert len({data for _, data in again}) > 290
    assert sum(data not in bases().values() for _, data in again) > 290
