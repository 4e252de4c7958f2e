"""The backend as the loader uses it."""

import dataclasses
import logging
import os
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="needs numba: pip install 'gpupipe[fast]'")
from gpupipe import Output, Recipe, make_plan
from gpupipe.backends import numba_cpu
from gpupipe.backends.base import Options
from gpupipe.backends.numba_cpu import NumbaBackend, exact, kernels, operate
from gpupipe.backends.torchvision_cpu import TorchvisionBackend
from gpupipe.headers import scan, upright_size
from gpupipe.records import Operation, Record
from gpupipe.steps import (
    GaussianBlur,
    Normalize,
    RandAugment,
    RandomApply,
    RandomCrop,
    RandomErasing,
    RandomGrayscale,
    RandomResizedCrop,
    RandomVerticalFlip,
    TrivialAugmentWide,
)
from gpupipe.steps.colour import IMAGENET_STD, ColorJitter
from tests import images
from tests.conftest import REPO

CPU = torch.device("cpu")
JITTER = (0.4, 0.4, 0.4, 0.1)
RECIPES = {
    "train": Recipe.train(size=64),
    "train jitter": Recipe.train(size=64, jitter=JITTER),
    "eval": Recipe.eval(size=56, resize=64),
    "upright": Recipe.train(size=64, exif="apply"),
}
# Colour steps before, between and behind operations; no thresholds, which would double the smallest difference.
OPERATING = Recipe(
    steps=(
        RandomResizedCrop((64, 61)),
        RandomApply((ColorJitter(*JITTER),), 0.8),
        GaussianBlur(7),
        ColorJitter(contrast=0.5),
        RandomGrayscale(0.2),
        RandomVerticalFlip(),
        Normalize(),
        RandomErasing(0.5, value="pixels"),
    )
)
AUGMENTING = Recipe(steps=(RandomResizedCrop(64), RandAugment(3, interpolation="bilinear", fill=0.4), Normalize()))


def records_of(files):
    return [Record(data, label=0, index=i, key=f"{i:03}", path=f"/data/{i:03}") for i, data in enumerate(files)]


def run(recipe, records, backend=NumbaBackend, batch_size=64, threads=2, epoch=0):
    """The batches of a data set as one tensor, and the errors by record."""
    headers = [scan(record.data) for record in records]
    sizes = [upright_size(header, recipe.exif) for header in headers]
    plan = make_plan(recipe, seed=7, epoch=epoch, indices=[record.index for record in records], sizes=sizes)
    made = backend(recipe, device=CPU, batch_size=batch_size, options=Options(threads=threads))
    try:
        parts = [slice(first, first + batch_size) for first in range(0, len(records), batch_size)]
        futures = [made.submit(records[part], headers[part], plan.take(part)) for part in parts]
        found = [future.result(timeout=300) for future in futures]
    finally:
        made.close()
    errors = {
        part.start + row: error for part, batch in zip(parts, found, strict=True) for row, error in batch.errors.items()
    }
    return torch.cat([batch.images for batch in found]), errors


@pytest.fixture(scope="module")
def generated():
    """Every sort of good file, in sizes that are worth a crop."""
    files = [*images.jpegs().values(), *images.others().values()]
    files += [images.jpeg(images.photo(150 + 40 * n, 300 - 30 * n, n)) for n in range(5)]
    return records_of(files)


@pytest.fixture(scope="module")
def photos(photos_dir):
    return records_of([path.read_bytes() for path in sorted(photos_dir.glob("*/*"))])


def with_precision(recipe, precision, **output):
    return dataclasses.replace(recipe, precision=precision, output=Output(**output))


def assert_parity(recipe, records, epoch):
    found, errors = run(recipe, records, epoch=epoch)
    expected, _ = run(recipe, records, TorchvisionBackend, epoch=epoch)
    assert not errors
    if recipe.precision == "uint8":
        assert torch.equal(found, expected)
        return
    levels = (found - expected).abs() * torch.tensor(IMAGENET_STD).view(3, 1, 1) * 255
    # PARITY: 0.02 LSB for the whole chain; typical is 0.0005.
    assert levels.max() < 0.02
    assert np.percentile(levels.numpy(), 99.9) < 0.002


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("name", RECIPES)
def test_backend_generated_files_have_torchvisions_pixels(generated, name, precision):
    for epoch in range(3):
        assert_parity(with_precision(RECIPES[name], precision), generated, epoch)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("name", ["train", "train+jitter", "eval"])
def test_backend_photos_have_torchvisions_pixels(photos, name, precision, interpolation):
    recipe = {
        "train": Recipe.train(precision=precision, interpolation=interpolation),
        "train+jitter": Recipe.train(jitter=JITTER, precision=precision, interpolation=interpolation),
        "eval": Recipe.eval(precision=precision, interpolation=interpolation),
    }[name]
    for epoch in range(1 if name == "eval" else 2):
        assert_parity(recipe, photos, epoch)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_backend_pixels_do_not_depend_on_threads_batch_size_or_the_users_torch_threads(generated, precision):
    recipe = with_precision(RECIPES["train jitter"], precision)
    expected, _ = run(recipe, generated)
    before = torch.get_num_threads()
    try:
        for threads, batch_size, users_threads in ((1, 64, 1), (4, 1, 4), (4, 7, 2), (1, 7, 3)):
            torch.set_num_threads(users_threads)
            found, _ = run(recipe, generated, threads=threads, batch_size=batch_size)
            assert torch.equal(found, expected)
            assert torch.get_num_threads() == users_threads
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_backend_outputs_are_the_float32_batch_converted(generated, precision, dtype, memory_format):
    plain = with_precision(RECIPES["train jitter"], precision)
    expected, _ = run(plain, generated)
    recipe = with_precision(plain, precision, dtype=dtype, memory_format=memory_format)
    found, _ = run(recipe, generated, batch_size=len(generated))
    assert found.is_contiguous(
        memory_format=torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    )
    assert torch.equal(found, expected.to(getattr(torch, dtype)))


def test_backend_bad_files_are_named_and_black_and_the_rest_is_untouched(generated):
    bad = [data for data in images.broken().values() if is_scannable(data)]
    assert len(bad) >= 4
    records = records_of(
        [record.data for pair in zip(generated, bad, strict=False) for record in records_of([pair[0].data, pair[1]])]
    )
    found, errors = run(RECIPES["train jitter"], records, batch_size=3)
    assert sorted(errors) == list(range(1, len(records), 2))
    for row, error in errors.items():
        assert (error.index, error.key, error.backend) == (row, f"{row:03}", "numba")
        assert not found[row].any()
    alone, _ = run(RECIPES["train jitter"], records[::2])
    assert torch.equal(found[::2], alone)


def is_scannable(data):
    try:
        scan(data)
    except Exception:
        return False
    return True


def test_backend_says_its_name_and_has_nothing_to_note():
    made = NumbaBackend(RECIPES["train"], device=CPU, batch_size=2, options=Options(threads=1))
    made.close()
    assert (made.name, made.note) == ("numba", "")


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_backend_operations_have_torchvisions_pixels(generated, precision):
    for epoch in range(3):
        assert_parity(with_precision(OPERATING, precision), generated, epoch)
    assert_parity(with_precision(AUGMENTING, "uint8"), generated, 0)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_backend_operations_and_erasing_are_converted_to_the_output(generated, precision, dtype):
    expected, _ = run(with_precision(OPERATING, precision), generated)
    recipe = with_precision(OPERATING, precision, dtype=dtype, memory_format="channels_last")
    found, _ = run(recipe, generated)
    assert torch.equal(found, expected.to(getattr(torch, dtype)))


def test_backend_takes_a_crop_that_only_larger_images_allow():
    # The picture that kernels are compiled with is 16 x 16.
    recipe = Recipe(steps=(RandomCrop(96), TrivialAugmentWide()))
    records = records_of([images.jpeg(images.photo(100, 120))])
    found, _ = run(recipe, records)
    torch.testing.assert_close(found, run(recipe, records, TorchvisionBackend)[0], rtol=0, atol=1e-4)


# --- the self-check of uint8 precision ---


def test_backend_where_operations_are_not_exact_hands_them_over_and_says_so(generated, monkeypatch):
    expected, _ = run(with_precision(AUGMENTING, "uint8"), generated, TorchvisionBackend)
    monkeypatch.setattr(numba_cpu, "uint8_operations_are_exact", lambda: False)
    monkeypatch.setattr(operate, "kernels", None)
    recipe = with_precision(AUGMENTING, "uint8")
    made = NumbaBackend(recipe, device=CPU, batch_size=2, options=Options(threads=1))
    made.close()
    assert "torch's operators are used for them" in made.note
    found, _ = run(recipe, generated)
    assert torch.equal(found, expected)
    # Recipes without operations are not concerned.
    made = NumbaBackend(with_precision(RECIPES["train"], "uint8"), device=CPU, batch_size=2, options=Options(threads=1))
    made.close()
    assert made.note == ""


def test_backend_where_uint8_is_not_exact_uses_torchs_operators_and_says_so(generated, monkeypatch):
    recipe = with_precision(RECIPES["train jitter"], "uint8")
    expected, _ = run(recipe, generated, TorchvisionBackend)
    monkeypatch.setattr(numba_cpu, "uint8_is_exact", lambda: False)
    monkeypatch.setattr(numba_cpu.Renderer, "render", None)
    made = NumbaBackend(recipe, device=CPU, batch_size=2, options=Options(threads=1))
    made.close()
    assert "torch's operators" in made.note
    found, _ = run(recipe, generated)
    assert torch.equal(found, expected)


def test_uint8_is_exact_is_found_out_once_and_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(kernels, "cache_directory", lambda: tmp_path)
    assert exact.uint8_is_exact()
    monkeypatch.setattr(exact, "_compare", lambda: pytest.fail("compared twice"))
    assert exact.uint8_is_exact()
    # Another torch, or another CPU, is another question.
    monkeypatch.setattr(exact, "_key", lambda: "another machine")
    monkeypatch.setattr(exact, "_compare", lambda: False)
    assert not exact.uint8_is_exact()


@pytest.mark.parametrize("content", ["", "{", "[1]", '{"a": 3}', None])
def test_uint8_is_exact_without_a_usable_file_is_found_out_again(tmp_path, monkeypatch, content):
    directory = tmp_path if content is not None else tmp_path / "missing"
    if content is not None:
        (tmp_path / "gpupipe-uint8-is-exact.json").write_text(content)
    monkeypatch.setattr(kernels, "cache_directory", lambda: directory)
    monkeypatch.setattr(exact, "_compare", lambda: True)
    assert exact.uint8_is_exact()
    monkeypatch.setattr(kernels, "cache_directory", lambda: None)
    assert exact.uint8_is_exact()


@pytest.mark.parametrize("where", range(-3, 3))
def test_compare_finds_one_pixel_that_is_off_by_one_level(monkeypatch, where):
    plain, calls = exact.Renderer.render, []

    def off_by_one(self, pixels, place, region, taps, plan, row, out):
        plain(self, pixels, place, region, taps, plan, row, out)
        calls.append(row)
        if len(calls) == 6:
            out[where * 17] += np.float32(1 / 255)

    monkeypatch.setattr(exact.Renderer, "render", off_by_one)
    assert not exact._compare()


def test_operations_are_exact_here():
    assert exact._compare_operations()


def test_compare_operations_finds_an_operation_that_is_off_by_one_level(monkeypatch):
    plain = exact.Renderer.render

    def off_by_one(self, pixels, place, region, taps, plan, row, out):
        plain(self, pixels, place, region, taps, plan, row, out)
        if plan.operations[0].operation[row] == Operation.SHARPNESS:
            out[1234] += np.float32(1 / 255)

    monkeypatch.setattr(exact.Renderer, "render", off_by_one)
    assert not exact._compare_operations()


# --- start-up ---

START = """
import logging, sys, time
import torch
import numpy as np
before = time.perf_counter()
from gpupipe import GaussianBlur, RandomResizedCrop, Recipe
from gpupipe.backends.base import Options
from gpupipe.backends.numba_cpu import NumbaBackend
steps = (RandomResizedCrop(32), *[GaussianBlur(3)] * {operating})
made = NumbaBackend(Recipe(steps=steps, precision={precision!r}), device=torch.device("cpu"), batch_size=2,
                    options=Options(threads=1))
made.close()
print("torchvision" in sys.modules, time.perf_counter() - before)
"""


def start(precision="float32", operating=False, **environment):
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", START.format(precision=precision, operating=operating)],
        cwd=REPO,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )


@pytest.mark.parametrize(("precision", "operating"), [("float32", True), ("uint8", False)])
def test_start_with_a_warm_cache_does_not_import_torchvision(tmp_path, precision, operating):
    start(precision, operating, NUMBA_CACHE_DIR=str(tmp_path))
    compiled = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}
    again = start(precision, operating, NUMBA_CACHE_DIR=str(tmp_path))
    assert again.stdout.split()[0] == "False"
    assert compiled == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.nb?")}


def test_start_with_a_cold_cache_says_what_it_does_and_fills_it(tmp_path):
    found = start(NUMBA_CACHE_DIR=str(tmp_path))
    assert found.stderr.splitlines() in ([], ["gpupipe: compiling the numba kernels: some seconds, once a machine"])
    assert {path.name.split("-")[0] for path in tmp_path.rglob("*.nbi")} >= {
        "kernels.float_render",
        "kernels.covered",
        "scan.is_one_plain_scan",
    }


def test_start_where_no_cache_is_writable_works():
    # Neither beside the package nor below the home directory: numba has nowhere to go, and says so by RuntimeError.
    script = f"""
from numba.core import caching
caching.CacheImpl._locator_classes = []
{START.format(precision="float32", operating=True)}
from gpupipe.backends.numba_cpu import kernels
assert kernels.cache_directory() is None
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=REPO, check=True, capture_output=True, timeout=300
    )


def test_progress_message_comes_only_if_it_takes_long(monkeypatch, caplog):
    with caplog.at_level(logging.WARNING), numba_cpu._progress_message():
        pass
    assert not caplog.records
    monkeypatch.setattr(numba_cpu, "_SILENT_S", 0.01)
    with caplog.at_level(logging.WARNING), numba_cpu._progress_message():
        for _ in range(500):
            if caplog.records:
                break
            time.sleep(0.01)
    assert [record.getMessage() for record in caplog.records] == [
        "gpupipe: compiling the numba kernels: some seconds, once a machine"
    ]


def test_import_compiles_nothing():
    script = """
from gpupipe.backends.numba_cpu import kernels, operation_kernels, scan
for module in (kernels, operation_kernels, scan):
    for name, value in vars(module).items():
        assert not getattr(value, "signatures", None), name
"""
    subprocess.run(
        [sys.executable, "-W", "error", "-c", script], cwd=REPO, check=True, capture_output=True, timeout=120
    )
