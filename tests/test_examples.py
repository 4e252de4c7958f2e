"""The training script: killed and resumed, and with two processes. Images with captions and boxes; text alone."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import available
from tests.images import jpeg, photo
from tests.torchrun.run import guarded, torchrun

SCRIPT = Path(__file__).parent.parent / "examples" / "train.py"
ONE_THREAD = os.environ | {"OMP_NUM_THREADS": "1"}  # on shared machines, threads wait for threads
EPOCHS, BATCHES = 12, 6  # of 20 images with batch size 3, the incomplete batch left out


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """20 images of two classes, which their colour tells apart."""
    root = tmp_path_factory.mktemp("train")
    for number in range(20):
        folder = root / f"class_{number % 2}"
        folder.mkdir(exist_ok=True)
        pixels = photo(48, 64, number)
        pixels[..., 2 * (number % 2)] //= 8
        (folder / f"{number}.jpg").write_bytes(jpeg(pixels))
    return root


def arguments(data, out, *more, epochs=EPOCHS):
    fixed = ["--model", "tiny", "--size", "32", "--batch-size", "3", "--jitter", "--threads", "2", "--lr", "1"]
    return [data, *fixed, "--epochs", epochs, "--checkpoint", out / "run.pt", "--losses", out / "losses", *more]


def python(*command):
    return [sys.executable, str(SCRIPT), *map(str, command)]


def losses(out):
    """(epoch, step) -> every loss that was logged for it."""
    found = {}
    for line in (out / "losses").read_text().splitlines():
        row = json.loads(line)
        found.setdefault((row["epoch"], row["step"]), []).append(row["loss"])
    return found


def test_train_killed_in_mid_epoch_and_resumed_has_the_losses_of_a_run_that_was_not(data, tmp_path):
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    more = ["--log-every", 1, "--save-every", 4, "--backend", "torchvision"]
    output = guarded(python(*arguments(data, whole, *more)))
    process = subprocess.Popen(
        python(*arguments(data, cut, *more)), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not ((cut / "losses").exists() and len(losses(cut)) >= 2 * BATCHES + 3):
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait(timeout=10) == -signal.SIGKILL, "it had ended before it was killed"
    before = len(losses(cut))
    resumed = guarded(python(*arguments(data, cut, *more, "--resume")))
    expected, found = losses(whole), losses(cut)
    assert before < len(found) == len(expected) == EPOCHS * BATCHES
    for place, (loss,) in expected.items():
        assert set(found[place]) == {loss}, place  # bit for bit, also where a step was taken twice
    epoch, left = map(int, re.search(r"resumed at epoch (\d+) with (\d+) batches left", resumed).groups())
    assert epoch >= 2
    assert 0 < left <= BATCHES
    assert re.findall(r"\d+ of 20 correct", output)[-1] == re.findall(r"\d+ of 20 correct", resumed)[-1]
    assert int(re.findall(r"(\d+) of 20 correct", output)[-1]) >= 18


@pytest.mark.skipif(sys.platform != "linux", reason="gloo's loopback device has another name elsewhere")
def test_train_resnet18_with_two_processes_counts_each_image_once_and_one_can_go_on(data, tmp_path):
    def command(epochs, *more):
        sizes = ["--size", "64", "--batch-size", "5", "--epochs", epochs, "--log-every", "1"]
        return [data, *sizes, "--checkpoint", tmp_path / "run.pt", "--losses", tmp_path / "losses", *more]

    together = torchrun(SCRIPT, *command(2))
    assert "global batch 10" in together
    assert re.search(r"epoch 1: \d+ of 20 correct", together)
    assert list(losses(tmp_path)) == [(0, 1), (0, 2), (1, 3), (1, 4)]
    alone = guarded(python(*command(3, "--resume")))
    assert "resumed at epoch 2 with 4 batches left" in alone
    assert re.search(r"epoch 2: \d+ of 20 correct", alone)
    assert list(losses(tmp_path))[4:] == [(2, step) for step in (5, 6, 7, 8)]


def test_captions_and_boxes_train_alike_on_both_backends(tmp_path):
    script = SCRIPT.with_name("captions.py")
    found = {}
    for backend, more in (("torchvision", ("--make", "96")), ("numba", ())):
        available.need(backend)
        command = [sys.executable, str(script), str(tmp_path / "shards"), "--backend", backend, *more]
        found[backend] = re.findall(r"epoch \d: loss ([\d.]+); (\d+) of (\d+) boxes", guarded(command, env=ONE_THREAD))
    for one, other in zip(*found.values(), strict=True):
        assert one[1:] == other[1:]  # the same crops, so the same boxes are left
        assert float(one[0]) == pytest.approx(float(other[0]), rel=0.02)
    first, last = (float(epoch[0]) for epoch in found["torchvision"])
    assert last < first
    assert 0 < int(found["numba"][0][1]) <= int(found["numba"][0][2])


def test_text_in_buckets_has_less_padding(tmp_path):
    lengths = [1 + number * 37 % 30 for number in range(160)]
    (tmp_path / "text.txt").write_text("\n\n".join("ab" * length for length in lengths))
    command = [sys.executable, str(SCRIPT.with_name("text.py")), str(tmp_path / "text.txt"), "--batch-size", "8"]
    output = guarded(command, env=ONE_THREAD)
    assert "160 paragraphs" in output
    plain, bucketed = (float(share) for share in re.findall(r"([\d.]+) % of all numbers are padding", output))
    assert bucketed < plain / 2


def test_reference_recipe_trains_and_evaluates(data):
    script = SCRIPT.parent / "reference.py"
    more = ["--model", "mobilenet_v3_small", "--epochs", "2", "--batch-size", "8", "--backend", "torchvision"]
    output = guarded([sys.executable, str(script), str(data), *more], env=ONE_THREAD)
    assert "TrivialAugmentWide" in output
    assert len(re.findall(r"epoch \d: loss [\d.]+, accuracy [01]\.\d+", output)) == 2
