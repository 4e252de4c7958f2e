"""Memory, threads and descriptors where files are huge, claim to be, or are bad by the hundred.

The bounds are those that `gpupipe.Options` documents; each backend is measured in a process of its own.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import available
from tests.conformance.bad_input.memory import BATCHES, SIDE, huge

SCRIPT = Path(__file__).parent / "memory.py"
MB = 1 << 20
PIXELS = SIDE * SIDE
# Bytes a pixel of the image that a thread is at: 3 as uint8, 12 as float32, and what the decoder itself takes.
BYTES_A_PIXEL = {"torchvision": 18, "numba": 10, "dali": 10}

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc, which is Linux's"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("huge")
    for kind in ("JPEG", "PNG"):
        (made / kind).write_bytes(huge(kind))
    return made


@pytest.fixture
def found(folder, backend):
    available.need(backend)
    report = folder / f"found by {backend}"
    if not report.exists():
        command = [sys.executable, str(SCRIPT), str(folder), backend]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=280, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(report.read_text())


@available.each_backend
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_image_of_100_megapixels_takes_what_is_documented_and_no_longer_than_its_batch(found, backend, kind):
    peak, after = found[kind]["peak"], found[kind]["after"]
    assert peak > 2 * PIXELS, "it was not decoded: this tests nothing"
    assert peak < BYTES_A_PIXEL[backend] * PIXELS + 64 * MB, f"{peak // MB} MB"
    # It is in the 11th of 20 batches. DALI keeps its memory, and uses it again.
    kept = 6 * PIXELS if backend == "dali" else 0
    assert max(after[13:]) < kept + 32 * MB, [each // MB for each in after]


@available.each_backend
def test_headers_that_claim_billions_of_pixels_cost_no_memory(found):
    assert found["claims"]["bad"] == found["claims"]["claimed"] > 5
    assert found["claims"]["peak"] < 32 * MB, f"{found['claims']['peak'] // MB} MB more than without them"


@available.each_backend
def test_hundreds_of_bad_batches_leave_memory_threads_and_descriptors_flat(found):
    failed = found["failures"]
    assert failed["bad"] == failed["expected"] == 2 * BATCHES
    resident, middle = failed["resident"], slice(100, -20)  # the reading threads end before the last batches are out
    assert len(resident) == BATCHES
    assert len(set(failed["threads"][middle])) <= 2, failed["threads"]
    assert max(failed["descriptors"][middle]) <= max(failed["descriptors"][:100])
    # 200 batches of 0.9 MB: one kept in 20 would be 9 MB. The list of bad samples grows by 1 MB.
    grown = min(resident[-50:]) - min(resident[50:100])
    assert grown < 8 * MB, f"{grown / MB:.1f} MB more after {BATCHES - 100} bad batches"
