"""The reference backend against torchvision's own transforms, with the same draws."""

import dataclasses
import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from torchvision.transforms.v2 import functional as F

from gpupipe import (
    CenterCrop,
    ColorJitter,
    Grayscale,
    Normalize,
    Output,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Recipe,
    Resize,
    make_plan,
)
from gpupipe.backends.base import Options
from gpupipe.backends.torchvision_cpu import TorchvisionBackend, apply_row
from gpupipe.errors import BackendError, DecodeError
from gpupipe.headers import scan, upright_size
from gpupipe.records import JitterRows, Record
from tests import images
from tests.backends.reference import stock

CPU = torch.device("cpu")
JITTER = (0.4, 0.4, 0.4, 0.1)
STRONG = ColorJitter((0.2, 1.8), (0.2, 1.8), (0.2, 1.8), 0.5)
SIZES = [(61, 43), (43, 61), (1, 1), (1, 57), (57, 1), (2, 3), (32, 32), (150, 200), (33, 160)]

RECIPES = {
    "train": Recipe.train(size=32),
    "train jitter": Recipe.train(size=32, jitter=JITTER),
    "train bicubic": Recipe.train(size=(24, 40), interpolation="bicubic"),
    "train grey": Recipe(steps=(RandomResizedCrop(32), STRONG, RandomGrayscale(0.5), RandomVerticalFlip(0.5))),
    "two jitters": Recipe(steps=(RandomResizedCrop(32), Grayscale(), STRONG, ColorJitter(hue=0.2), Normalize())),
    "eval": Recipe.eval(size=32, resize=40),
    "eval bicubic": Recipe.eval(size=32, resize=40, interpolation="bicubic"),
    "eval padded": Recipe.eval(size=(50, 44), resize=40),
    "eval exact size": Recipe(steps=(Resize((30, 50)), Normalize())),
    "crop only, padded": Recipe(steps=(CenterCrop((40, 55)), RandomHorizontalFlip(1.0), STRONG, Normalize())),
}


def records_of(files):
    return [Record(data, label=0, index=i, key=f"{i:03}.jpg", path=f"/data/{i:03}.jpg") for i, data in enumerate(files)]


def planned(recipe, records, **arguments):
    headers = [scan(record.data) for record in records]
    sizes = [upright_size(header, recipe.exif) for header in headers]
    indices = [record.index for record in records]
    return headers, make_plan(recipe, **({"seed": 1, "epoch": 2} | arguments), indices=indices, sizes=sizes)


def run(recipe, records, batch_size=64, threads=2, device=CPU, order=None):
    """The batches of a data set as one tensor; the batches are submitted in `order`."""
    headers, plan = planned(recipe, records)
    parts = [slice(first, first + batch_size) for first in range(0, len(records), batch_size)]
    backend = TorchvisionBackend(recipe, device=device, batch_size=batch_size, options=Options(threads=threads))
    try:
        futures = {
            part: backend.submit(records[parts[part]], headers[parts[part]], plan.take(parts[part]))
            for part in (order or range(len(parts)))
        }
        found = [futures[part].result() for part in range(len(parts))]
    finally:
        backend.close()
    assert not any(applied.errors for applied in found)
    return torch.cat([applied.images for applied in found])


@pytest.fixture
def one_thread():
    """torch's own float sums as the backend makes them: with one intra-op thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.usefixtures("one_thread")
def test_apply_row_any_recipe_equals_stock_v2(name, precision, size):
    recipe = dataclasses.replace(RECIPES[name], precision=precision)
    pixels = images.photo(*size)
    plan = make_plan(recipe, seed=3, epoch=0, indices=range(8), sizes=[size] * 8)
    for row in range(len(plan)):
        ours = F.normalize(apply_row(pixels, plan, row, recipe), recipe.normalize.mean, recipe.normalize.std)
        theirs = stock(recipe, plan, row, pixels)
        # Bit for bit, except for colour in floats: our image is in planes and flipped already there, so torch's kernels
        # take other paths (with or without a fused multiply-add) and sum contrast's mean in another order.
        exact = precision == "uint8" or not recipe.colour_steps
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
@pytest.mark.usefixtures("one_thread")
def test_apply_row_every_jitter_order_equals_direct_calls(order, precision):
    recipe = dataclasses.replace(Recipe(steps=(CenterCrop(20), STRONG)), precision=precision)
    plan = make_plan(recipe, seed=0, epoch=0, indices=[0], sizes=[(20, 20)])
    factors = (1.4, 0.6, 1.7, -0.3)
    rows = JitterRows(
        order=np.array([order], np.uint8), factors=np.array([factors]), used=(True,) * 4, apply=np.ones(1, np.bool_)
    )
    pixels = images.photo(20, 20)
    ours = apply_row(pixels, dataclasses.replace(plan, colour=(rows,)), 0, recipe)

    expected = torch.from_numpy(pixels).permute(2, 0, 1)
    if precision == "float32":
        expected = expected.float() / 255
    for operation in order:
        if operation == 0:
            expected = F.adjust_brightness(expected, factors[0])
        elif operation == 1:
            expected = F.adjust_contrast(expected, factors[1])
        elif operation == 2:
            expected = F.adjust_saturation(expected, factors[2])
        else:
            expected = F.adjust_hue(expected, factors[3])
    expected = expected.float() / 255 if precision == "uint8" else expected
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("operation", range(4))
def test_apply_row_unused_operation_is_skipped(operation):
    recipe = Recipe(steps=(CenterCrop(20), STRONG))
    plan = make_plan(recipe, seed=0, epoch=0, indices=[0], sizes=[(20, 20)])
    used = tuple(position != operation for position in range(4))
    neutral = np.where(used, (1.0, 1.0, 1.0, 0.0), 0.3)[None]
    rows = JitterRows(order=np.array([[3, 1, 0, 2]], np.uint8), factors=neutral, used=used, apply=np.ones(1, np.bool_))
    pixels = images.photo(20, 20)
    ours = apply_row(pixels, dataclasses.replace(plan, colour=(rows,)), 0, recipe)
    expected = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_apply_row_leaves_decoded_pixels_as_they_were():
    recipe = dataclasses.replace(RECIPES["crop only, padded"], precision="uint8")
    pixels = images.photo(40, 55)
    before = pixels.copy()
    plan = make_plan(recipe, seed=0, epoch=0, indices=[0], sizes=[(40, 55)])
    apply_row(pixels, plan, 0, recipe)
    np.testing.assert_array_equal(pixels, before)


def test_apply_row_bicubic_float_stays_within_range():
    recipe = Recipe.train(size=64, interpolation="bicubic", mean=0.0, std=1.0)
    edges = np.kron(np.indices((8, 8)).sum(0) % 2, np.ones((6, 6)))[..., None].repeat(3, 2).astype(np.uint8) * 255
    plan = make_plan(recipe, seed=0, epoch=0, indices=range(4), sizes=[edges.shape[:2]] * 4)
    for row in range(4):
        found = apply_row(edges, plan, row, recipe)
        assert found.min() == 0
        assert found.max() == 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_backend_exif_applied_equals_pillows_upright_image(orientation):
    recipe = Recipe.train(size=32, exif="apply")
    record = Record(images.jpeg(images.photo(60, 90), orientation=orientation), label=0, index=5, key="a")
    _, plan = planned(recipe, [record])
    upright = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(record.data))).convert("RGB"))
    found = run(recipe, [record])[0]
    torch.testing.assert_close(found, stock(recipe, plan, 0, upright), rtol=0, atol=1e-6)


def test_backend_exif_ignored_uses_stored_pixels():
    recipe = Recipe.train(size=32)
    record = Record(images.jpeg(images.photo(60, 90), orientation=6), label=0, index=5, key="a")
    _, plan = planned(recipe, [record])
    stored = np.array(Image.open(io.BytesIO(record.data)).convert("RGB"))
    torch.testing.assert_close(run(recipe, [record])[0], stock(recipe, plan, 0, stored), rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def mixed():
    """64 files of many kinds and sizes."""
    files = [*images.jpegs().values(), *images.others().values()]
    more = [images.jpeg(images.photo(40 + 3 * n, 200 - 2 * n, n)) for n in range(64)]
    return records_of((files + more)[:64])


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_backend_batch_size_threads_and_order_leave_every_bit(mixed, precision):
    recipe = dataclasses.replace(RECIPES["train jitter"], precision=precision)
    expected = run(recipe, mixed, batch_size=64, threads=1)
    for batch_size, threads in ((64, 4), (7, 4), (7, 1), (1, 4)):
        assert torch.equal(run(recipe, mixed, batch_size, threads), expected), (batch_size, threads)
    assert torch.equal(run(recipe, mixed, 7, 4, order=[9, 3, 0, 8, 1, 7, 2, 6, 4, 5]), expected)


def test_backend_records_in_another_order_give_the_same_images(mixed):
    recipe = RECIPES["train jitter"]
    expected = run(recipe, mixed)
    shuffled = np.random.default_rng(0).permutation(len(mixed)).tolist()
    assert torch.equal(run(recipe, [mixed[i] for i in shuffled], batch_size=10), expected[shuffled])


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_backend_output_types_are_the_float32_result_rounded(mixed, dtype, memory_format):
    recipe = RECIPES["train"]
    expected = run(recipe, mixed[:10])
    found = run(dataclasses.replace(recipe, output=Output(dtype=dtype, memory_format=memory_format)), mixed[:10], 10)
    assert found.dtype == getattr(torch, dtype)
    assert torch.equal(found, expected.to(found.dtype))


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
def test_backend_memory_format_is_the_one_asked_for(mixed, memory_format):
    recipe = dataclasses.replace(RECIPES["train"], output=Output(memory_format=memory_format))
    headers, plan = planned(recipe, mixed[:5])
    backend = TorchvisionBackend(recipe, device=CPU, batch_size=8, options=Options(threads=1))
    found = backend.submit(mixed[:5], headers, plan).result().images
    backend.close()
    assert found.shape == (5, 3, 32, 32)
    assert found.is_contiguous(memory_format=getattr(torch, memory_format.replace("contiguous", "contiguous_format")))


def test_backend_undecodable_record_is_named_and_its_image_is_zero(mixed):
    recipe = RECIPES["train jitter"]
    whole = mixed[0].data
    cut = images.truncated(images.jpeg(images.photo(200, 300)), 0.5)
    records = [mixed[0], Record(cut, 0, index=7, key="shard/7.jpg", path="/data/a.tar", offset=1536), mixed[1]]
    headers, plan = planned(recipe, records)
    backend = TorchvisionBackend(recipe, device=CPU, batch_size=3, options=Options(threads=2))
    applied = backend.submit(records, headers, plan).result()
    backend.close()
    assert whole == mixed[0].data
    assert list(applied.errors) == [1]
    error = applied.errors[1]
    assert isinstance(error, DecodeError)
    assert (error.index, error.key, error.path, error.offset) == (7, "shard/7.jpg", "/data/a.tar", 1536)
    assert error.backend == "torchvision"
    assert "record 7 ('shard/7.jpg' of /data/a.tar at byte 1536)" in str(error)
    assert not applied.images[1].any()
    expected = run(recipe, [mixed[0], mixed[1]])
    assert torch.equal(applied.images[[0, 2]], expected)


def test_backend_wrong_plan_is_a_backend_error(mixed):
    recipe = RECIPES["train jitter"]
    headers, plan = planned(recipe, mixed[:2])
    plan = dataclasses.replace(plan, window=np.full((2, 2), 10**9, np.int32), size=(10**6, 10**6))
    backend = TorchvisionBackend(recipe, device=CPU, batch_size=2, options=Options(threads=2))
    with pytest.raises(BackendError, match="torchvision backend failed on record"):
        backend.submit(mixed[:2], headers, plan).result()
    backend.close()


@pytest.mark.parametrize("recipe", [RECIPES["train jitter"], RECIPES["eval padded"]], ids=["train", "eval"])
def test_backend_users_torch_defaults_leave_pixels(mixed, recipe):
    expected = run(recipe, mixed[:4])
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        found = run(recipe, mixed[:4])
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_backend_users_thread_count_leaves_every_bit(precision):
    # Large enough that torch's sums (contrast's mean) would be split over intra-op threads.
    recipe = Recipe.train(size=320, jitter=JITTER, precision=precision)
    records = records_of([images.jpeg(images.photo(300, 340, n)) for n in range(6)])
    expected = run(recipe, records)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(run(recipe, records), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_backend_real_photos_uint8_equal_imagefolder_and_stock_v2(photos_dir):
    recipe = Recipe.train(size=224, jitter=JITTER, precision="uint8")
    paths = sorted(photos_dir.glob("*/*"))
    records = [Record(path.read_bytes(), 0, i, path.name, str(path)) for i, path in enumerate(paths)]
    _, plan = planned(recipe, records)
    found = run(recipe, records, batch_size=16)
    for row, path in enumerate(paths):
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
        assert torch.equal(found[row], stock(recipe, plan, row, pixels)), path.name


@pytest.mark.parametrize("name", ["train jitter", "eval"])
@pytest.mark.usefixtures("one_thread")
def test_backend_real_photos_float32_equal_imagefolder_and_stock_v2(photos_dir, name):
    recipe = RECIPES[name]
    paths = sorted(photos_dir.glob("*/*"))[::3]
    records = [Record(path.read_bytes(), 0, i, path.name, str(path)) for i, path in enumerate(paths)]
    _, plan = planned(recipe, records)
    found = run(recipe, records, batch_size=16)
    for row, path in enumerate(paths):
        with Image.open(path) as image:
            pixels = np.array(image.convert("RGB"))
        # After the division by std; see the test of apply_row for the rounding.
        torch.testing.assert_close(found[row], stock(recipe, plan, row, pixels), rtol=0, atol=5e-6)


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is read from /proc, which is Linux's")
def test_backend_200_batches_leave_memory_flat(mixed):
    recipe = Recipe.train(size=96, jitter=JITTER)
    good = [mixed[0], Record(images.truncated(mixed[0].data, 0.9)[:-2], 0, 99, "bad"), *mixed[1:6]] * 2
    headers, plan = planned(recipe, good)
    backend = TorchvisionBackend(recipe, device=CPU, batch_size=14, options=Options(threads=2))
    for number in range(250):
        applied = backend.submit(good, headers, plan).result()
        if number == 49:
            before = resident_bytes()
    grown = resident_bytes() - before
    backend.close()
    assert len(applied.errors) == 2
    # One batch is 1.5 MB, so a batch kept in 20 would be 15 MB; allocators waver by a few.
    assert grown < 8 << 20, f"{grown >> 20} MB more after 200 batches"


@pytest.mark.gpu
def test_backend_cuda_device_gets_the_pixels_of_the_cpu(mixed):
    recipe = RECIPES["train jitter"]
    device = torch.device("cuda", torch.cuda.current_device())
    found = run(recipe, mixed, batch_size=8, device=device)
    assert found.device == device
    assert torch.equal(found.cpu(), run(recipe, mixed))


@pytest.mark.gpu
def test_backend_cuda_batches_stay_intact_on_a_side_stream(mixed):
    recipe = RECIPES["train jitter"]
    device = torch.device("cuda", torch.cuda.current_device())
    expected = run(recipe, mixed[:8]).double().sum().item()
    headers, plan = planned(recipe, mixed[:8])
    backend = TorchvisionBackend(recipe, device=device, batch_size=8, options=Options(threads=2))
    sums = []
    with torch.cuda.stream(torch.cuda.Stream(device)):
        for _ in range(50):
            batch = backend.submit(mixed[:8], headers, plan).result().images
            torch.cuda._sleep(20_000_000)  # the batch is read long after the host has let go of it
            sums.append(batch.double().sum())
            del batch
    backend.close()
    assert [found.item() for found in sums] == pytest.approx([expected] * 50, rel=1e-9)
