"""What only a GPU can show. The graph itself is tested on CPU operators, and its definition in test_graph.py."""

import dataclasses

import numpy as np
import pytest
import torch

from gpupipe import CenterCrop, Output, Recipe
from tests import images
from tests.backends.dali.common import (
    CPU,
    assert_within,
    backend,
    lossless,
    lsb,
    photo_records,
    planned,
    records_of,
    references,
    run,
)

pytestmark = pytest.mark.gpu

JITTER = (0.4, 0.4, 0.4, 0.1)
STRONG = (0.8, 0.8, 0.8, 0.5)
TRAIN = Recipe.train(size=96, jitter=JITTER)
DECODE = pytest.mark.parametrize("decode", ["gpu", "hardware", "cpu"])


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def files(count=24):
    kinds = ("4:2:0", "4:4:4", "4:2:2", "4:4:0", "grey")
    found = []
    for n in range(count):
        pixels = images.photo(120 + 9 * n, 300 - 7 * n, n)
        kind = kinds[n % 5]
        found.append(images.jpeg(pixels, subsampling=kind, progressive=n % 7 == 3 and kind != "4:4:0"))
    return records_of([*found, images.encode(images.photo(90, 130), "PNG", "RGBA")])


# Pixels


@pytest.mark.parametrize(
    ("subsampling", "progressive"),
    [
        *((kind, False) for kind in ("4:4:4", "4:2:2", "4:4:0", "4:2:0", "4:1:1", "grey")),
        *((kind, True) for kind in ("4:4:4", "4:2:2", "4:2:0", "grey")),  # what can be generated
    ],
)
def test_gpu_decoder_is_close_to_the_cpus(device, subsampling, progressive, record_property):
    """Bounds that nearest-neighbour chroma breaks; what was measured is in the test report's properties."""
    pixels = [images.photo(224, 224, seed) for seed in range(16)]
    records = records_of([images.jpeg(image, subsampling=subsampling, progressive=progressive) for image in pixels])
    recipe = Recipe(steps=(CenterCrop(224),))
    difference = lsb(run(recipe, records, device=device).cpu(), run(recipe, records), recipe)
    mean, high = difference.mean().item(), np.quantile(difference.numpy(), 0.999)
    record_property("mean_lsb", mean)
    record_property("p999_lsb", high)
    assert mean < 0.5, f"mean {mean:.3f} LSB"
    assert high < 4, f"99.9th percentile {high:.2f} LSB"


def test_gpu_with_host_decode_has_exactly_the_cpus_pixels_before_any_arithmetic(device):
    recipe = Recipe(steps=(CenterCrop(300),))
    records = records_of([*images.jpegs().values(), *images.others().values()])
    found = run(recipe, records, device=device, decode="cpu")
    assert torch.equal((found.cpu() * 255).round(), (run(recipe, records) * 255).round())


@pytest.mark.parametrize(
    ("recipe", "limit"),
    [
        (Recipe.train(), 0.1),
        (Recipe.train(jitter=JITTER), 0.1),
        (Recipe.train(jitter=STRONG), 0.1),
        (Recipe.train(interpolation="bicubic"), 0.3),
        (Recipe.eval(), 0.1),
        (Recipe.eval(resize=224), 0.1),
        (Recipe.eval(size=(300, 200), resize=224), 0.1),
        (Recipe.eval(interpolation="bicubic"), 0.3),
    ],
    ids=["train", "jitter", "strong jitter", "bicubic", "eval", "eval 224", "eval over the edge", "eval bicubic"],
)
def test_gpu_chain_on_the_same_decoded_pixels_equals_torchvision(device, photos_dir, recipe, limit):
    records = photo_records(photos_dir)
    _, plan = planned(recipe, records)
    found = run(recipe, records, plan, device=device, decode="cpu").cpu()
    assert_within(found, references(records, plan, recipe), recipe, limit, p999=limit / 3)


@DECODE
def test_gpu_raw_pixels_take_the_same_way_as_decoded_ones(device, decode):
    rng = np.random.default_rng(0)
    records = lossless([rng.integers(0, 256, (60 + n, 90, 3), dtype=np.uint8) for n in range(12)])
    found = run(TRAIN, records, device=device, decode=decode).cpu()
    assert_within(found, references(records, planned(TRAIN, records)[1], TRAIN), TRAIN, 0.1)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
def test_gpu_equals_dalis_own_cpu_operators(device, precision):
    recipe = dataclasses.replace(Recipe.train(size=96), precision=precision)
    found, expected = run(recipe, files(), device=device, decode="cpu").cpu(), run(recipe, files())
    assert_within(found, expected, recipe, 0.05 if precision == "float32" else 1.001)


@DECODE
def test_gpu_orientation_is_applied(device, decode):
    recipe = Recipe.train(size=48, exif="apply")
    records = records_of([images.jpeg(images.photo(60, 90), orientation=n, subsampling="4:4:4") for n in range(1, 9)])
    found = run(recipe, records, device=device, decode=decode).cpu()
    difference = lsb(found, references(records, planned(recipe, records)[1], recipe), recipe)
    assert difference.mean() < (0.01 if decode == "cpu" else 1)


@DECODE
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_gpu_output_has_the_type_and_place_asked_for(device, dtype, memory_format, decode):
    recipe = dataclasses.replace(TRAIN, output=Output(dtype=dtype, memory_format=memory_format))
    found = run(recipe, files(), device=device, decode=decode)
    assert (found.device, found.dtype) == (device, getattr(torch, dtype))
    assert found.is_contiguous(memory_format=getattr(torch, memory_format.replace("contiguous", "contiguous_format")))
    assert torch.equal(found, run(TRAIN, files(), device=device, decode=decode).to(found.dtype))


@DECODE
def test_gpu_images_do_not_depend_on_the_batch_or_the_threads(device, decode):
    records = files(40)
    expected = run(TRAIN, records, batch_size=41, device=device, decode=decode)
    for batch_size, threads in ((41, 4), (7, 4), (1, 2)):
        found = run(TRAIN, records, None, batch_size, threads, device, decode=decode)
        assert torch.equal(found, expected), (batch_size, threads)


# Streams, memory, devices


@DECODE
def test_gpu_batches_stay_intact_while_a_side_stream_still_reads_them(device, decode):
    records = files(8)
    headers, plan = planned(TRAIN, records)
    with backend(TRAIN, batch_size=9, device=device, decode=decode) as dali:
        expected = dali.submit(records, headers, plan).result().images.double().sum().item()
        sums = []
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(50):
                batch = dali.submit(records, headers, plan).result().images
                torch.cuda._sleep(20_000_000)  # the batch is read long after the host has let go of it
                sums.append(batch.double().sum())
                del batch
    assert [found.item() for found in sums] == pytest.approx([expected] * 50, rel=1e-9)


def test_gpu_batches_are_complete_when_their_future_is(device):
    """Whatever stream reads: none of these waits for the stream of the copy."""
    records = files(8)
    headers, plan = planned(TRAIN, records)
    with backend(TRAIN, batch_size=9, device=device) as dali:
        expected = dali.submit(records, headers, plan).result().images.clone()
        streams = [torch.cuda.Stream(device) for _ in range(4)]
        torch.cuda.synchronize(device)
        for number in range(40):
            with torch.cuda.stream(streams[number % 4]):
                assert torch.equal(dali.submit(records, headers, plan).result().images, expected)


def test_gpu_copy_does_not_wait_for_the_callers_queue(device):
    records = files(8)
    headers, plan = planned(TRAIN, records)
    with backend(TRAIN, batch_size=9, device=device) as dali:
        dali.submit(records, headers, plan).result()
        torch.cuda._sleep(2_000_000_000)  # about a second of a "training step"
        busy = torch.cuda.Event()
        busy.record()
        dali.submit(records, headers, plan).result()
        assert not busy.query(), "the batch came only after the work that was queued before it"


@DECODE
def test_gpu_batches_that_are_kept_survive_later_runs_and_close(device, decode):
    records = files(8)
    headers, plan = planned(TRAIN, records)
    held, copies = [], []
    with backend(TRAIN, batch_size=9, device=device, decode=decode) as dali:
        for number in range(60):
            rows = slice(0, 9 - number % 4)
            found = dali.submit(records[rows], headers[rows], plan.take(rows)).result().images
            if number % 3 == 0:
                held.append(found)
                copies.append(found.clone())
    torch.cuda.synchronize(device)
    assert all(map(torch.equal, held, copies))


def test_gpu_bad_files_are_named_and_the_others_leave_as_ever(device):
    records = files(8)
    whole = bytearray(images.jpeg(images.photo(90, 120)))
    at = whole.index(b"\xff\xc4") + 5
    whole[at : at + 8] = b"\xff" * 8
    bad = [
        dataclasses.replace(record, data=bytes(whole)) if row in (2, 5) else record
        for row, record in enumerate(records)
    ]
    with backend(TRAIN, batch_size=9, device=device) as dali:
        headers, plan = planned(TRAIN, records)
        expected = dali.submit(records, headers, plan).result().images
        bad_headers, bad_plan = planned(TRAIN, bad)
        for _ in range(3):
            first = dali.submit(bad, bad_headers, bad_plan)
            second = dali.submit(records, headers, plan)
            applied = first.result()
            assert sorted(applied.errors) == [2, 5]
            assert not applied.images[[2, 5]].any()
            others = [0, 1, 3, 4, 6, 7, 8]
            assert torch.equal(applied.images[others], expected[others])
            assert torch.equal(second.result().images, expected)


def test_gpu_current_device_of_the_caller_is_left_alone():
    last = torch.device("cuda", torch.cuda.device_count() - 1)
    before = torch.cuda.current_device()
    found = run(TRAIN, files(8), device=last)
    assert found.device == last
    assert torch.cuda.current_device() == before
    unnamed = run(TRAIN, files(8), device=torch.device("cuda"))
    assert unnamed.device.index == before


@DECODE
def test_gpu_2000_batches_leave_memory_flat(device, decode):
    records = files(32)
    headers, plan = planned(TRAIN, records)
    with backend(TRAIN, batch_size=33, device=device, decode=decode) as dali:
        for number in range(2000):
            dali.submit(records, headers, plan).result()
            if number == 199:
                torch.cuda.synchronize(device)
                before = torch.cuda.mem_get_info(device)[0]
        torch.cuda.synchronize(device)
        taken = before - torch.cuda.mem_get_info(device)[0]
    assert taken < 32 << 20, f"{taken >> 20} MB more after 1800 batches"


def test_gpu_and_cpu_backends_work_side_by_side(device):
    records = files(8)
    headers, plan = planned(TRAIN, records)
    with backend(TRAIN, device=device, decode="cpu") as gpu, backend(TRAIN, device=CPU) as cpu:
        pairs = [(gpu.submit(records, headers, plan), cpu.submit(records, headers, plan)) for _ in range(5)]
        for one, other in pairs:
            assert_within(one.result().images.cpu(), other.result().images, TRAIN, 0.1)
