"""The questions that only a GPU can answer, each in a process of its own, because some answers are a crash.

Each answer says whether the design assumed right ("as designed"), and the numbers behind it.
"""

from __future__ import annotations

import io
import json
import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.dlpack
from gpu.common import U8, Setup, decoded, decoder_arguments, photo, run_in_batches
from PIL import Image

from gpupipe import Recipe, make_plan
from gpupipe.backends.base import Options
from gpupipe.backends.dali import DaliBackend
from gpupipe.headers import scan, upright_size
from gpupipe.records import Record

LIMIT_S = 300
IMAGES, SIDE = 12, 224
JITTER = (0.4, 0.4, 0.4, 0.1)
# Name -> Pillow's arguments. What engines can decode is baseline.
KINDS: dict[str, dict[str, Any]] = {
    **{name: {"subsampling": name} for name in ("4:4:4", "4:2:2", "4:2:0", "4:1:1")},
    "grey": {"mode": "L"},
    "4:2:0 progressive": {"subsampling": "4:2:0", "progressive": True},
}
DECODERS = {"CUDA": 0.0, "engine": 1.0}


def jpeg(pixels: U8, *, mode: str = "RGB", **options: Any) -> U8:
    out = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(out, "JPEG", quality=90, **options)
    return np.frombuffer(out.getvalue(), np.uint8)


def mixture(count: int) -> list[U8]:
    """JPEGs of different sizes and kinds."""
    kinds = list(KINDS.values())
    return [jpeg(photo(n, 150 + 11 * n, 330 - 9 * n), **kinds[n % len(kinds)]) for n in range(count)]


def records_of(files: Sequence[Any]) -> list[Record]:
    return [Record(bytes(data), 0, index, f"{index:03}", None) for index, data in enumerate(files)]


def difference(found: Sequence[U8], expected: Sequence[U8]) -> dict[str, float]:
    """In levels: over all pixels of all images."""
    levels = np.concatenate(
        [np.abs(one.astype(np.int16) - other).ravel() for one, other in zip(found, expected, strict=True)]
    )
    return {"mean": float(levels.mean()), "p999": float(np.quantile(levels, 0.999)), "max": float(levels.max())}


def same(found: Sequence[Any], expected: Sequence[Any]) -> bool:
    return len(found) == len(expected) and all(map(np.array_equal, found, expected))


# The questions


def decoders_differ(at: Setup) -> dict[str, Any]:
    """How far are the pixels of the CUDA decoder and of the JPEG engines from the CPU's, and from each other?"""
    found: dict[str, Any] = {}
    for kind, options in KINDS.items():
        files = [jpeg(photo(seed, SIDE, SIDE), **options) for seed in range(IMAGES)]
        expected = decoded(at, files, place="cpu")
        pixels = {name: decoded(at, files, place="device", engine=load) for name, load in DECODERS.items()}
        nearest = decoded(at, files, place="device", fancy=False)
        found[kind] = {
            **{f"{name} from the CPU": difference(each, expected) for name, each in pixels.items()},
            "engine from CUDA": difference(pixels["engine"], pixels["CUDA"]),
            "CUDA, nearest chroma, from the CPU": difference(nearest, expected),
        }
    if at.folder.is_dir():
        files = at.files(200)
        expected = decoded(at, files, place="cpu")
        found["photos"] = {
            f"{name} from the CPU": difference(decoded(at, files, place="device", engine=load), expected)
            for name, load in DECODERS.items()
        }
    close = all(each["CUDA from the CPU"]["mean"] < 0.5 for each in found.values())
    return {"as designed": close, "levels": found, "design": "the CUDA decoder is within 0.5 levels on average"}


def decoding_depends_on_the_batch(at: Setup) -> dict[str, Any]:
    """Does a file decode to the same pixels whatever is in its batch, in whatever order, with how many threads?"""
    files = mixture(32)
    found: dict[str, bool] = {}
    for name, load in (*DECODERS.items(), ("a share of 0.65", 0.65)):
        expected = decoded(at, files, place="device", engine=load, batch=32)
        ways = {
            "again": decoded(at, files, place="device", engine=load, batch=32),
            "batches of 1": decoded(at, files, place="device", engine=load, batch=1),
            "batches of 7": decoded(at, files, place="device", engine=load, batch=7),
            "backwards": decoded(at, files[::-1], place="device", engine=load, batch=32)[::-1],
            "1 thread": decoded(at, files, place="device", engine=load, batch=32, threads=1),
        }
        found |= {f"{name}, {way}": same(pixels, expected) for way, pixels in ways.items()}
    fixed = all(answer for way, answer in found.items() if not way.startswith("a share"))
    return {"as designed": fixed, "same": found, "design": "with a share of 0 or 1 it does not; with 0.65 it may"}


def reductions_depend_on_the_batch(at: Setup) -> dict[str, Any]:
    """Is the mean of an image the same number, bit for bit, whatever is in its batch?"""
    from nvidia.dali import fn, pipeline_def, types

    rng = np.random.default_rng(0)
    planes = [rng.random((3, 150 + 5 * n, 260 - 3 * n), dtype=np.float32) for n in range(24)]

    def means(batch: int, images: Sequence[Any]) -> list[Any]:
        @pipeline_def(
            batch_size=batch, num_threads=4, device_id=at.device.index, exec_dynamic=True, prefetch_queue_depth=1
        )
        def graph() -> Any:
            image = fn.external_source(name="planes", dtype=types.FLOAT, ndim=3, device="cpu")
            return fn.reductions.mean(image.gpu() if at.on_gpu else image, keep_dims=True)

        return run_in_batches(graph(), images, batch, "planes")

    expected = means(24, planes)
    found = {
        "again": same(means(24, planes), expected),
        "batches of 1": same(means(1, planes), expected),
        "batches of 5": same(means(5, planes), expected),
        "backwards": same(means(24, planes[::-1])[::-1], expected),
    }
    return {"as designed": all(found.values()), "same": found, "design": "yes: contrast must not see the batch"}


def _applied(at: Setup, recipe: Recipe, records: Sequence[Record], batch: int, **options: Any) -> torch.Tensor:
    """All records through gpupipe's graph."""
    headers = [scan(record.data) for record in records]
    sizes = [upright_size(header, recipe.exif) for header in headers]
    plan = make_plan(recipe, seed=1, epoch=2, indices=[record.index for record in records], sizes=sizes)
    backend = DaliBackend(recipe, device=at.device, batch_size=batch, options=Options(threads=4, **options))
    try:
        parts = [slice(first, first + batch) for first in range(0, len(records), batch)]
        futures = [backend.submit(records[part], headers[part], plan.take(part)) for part in parts]
        return torch.cat([future.result().images for future in futures]).cpu()
    finally:
        backend.close()


def raw_and_encoded_mix(at: Setup) -> dict[str, Any]:
    """Do decoded pixels and JPEGs share one graph, each as if it were alone?"""
    raw = []
    for n in range(12):
        out = io.BytesIO()
        Image.fromarray(photo(n, 120 + n, 180)).save(out, "BMP")
        raw.append(np.frombuffer(out.getvalue(), np.uint8))
    mixed = [data for pair in zip(raw, mixture(12), strict=True) for data in pair]
    records, recipe = records_of(mixed), Recipe.train(size=96, jitter=JITTER)
    found: dict[str, bool] = {}
    for decode in ("gpu", "cpu"):
        together = _applied(at, recipe, records, 24, decode=decode)
        kinds = {"raw": records[::2], "JPEG": records[1::2]}
        apart = {kind: _applied(at, recipe, part, 12, decode=decode) for kind, part in kinds.items()}
        found[f"decode={decode}, raw"] = torch.equal(together[::2], apart["raw"])
        found[f"decode={decode}, JPEG"] = torch.equal(together[1::2], apart["JPEG"])
        found[f"decode={decode}, one at a time"] = torch.equal(
            together, _applied(at, recipe, records, 1, decode=decode)
        )
    return {"as designed": all(found.values()), "same": found, "design": "yes, bit for bit"}


def regions_can_be_decoded(at: Setup) -> dict[str, Any]:
    """Does DALI's region decoder work on this GPU, and equal cutting the region out of the whole?"""
    from nvidia.dali import fn, pipeline_def, types

    files, rng = mixture(48), np.random.default_rng(0)
    arguments = decoder_arguments(at, engine=0.0)

    @pipeline_def(batch_size=8, num_threads=4, device_id=at.device.index, exec_dynamic=True, prefetch_queue_depth=1)
    def graph() -> Any:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, device="cpu")
        anchor = fn.external_source(name="anchor", dtype=types.FLOAT, ndim=1, device="cpu")
        shape = fn.external_source(name="shape", dtype=types.FLOAT, ndim=1, device="cpu")
        part = fn.decoders.image_slice(encoded, anchor, shape, axes=(0, 1), **arguments)
        whole = fn.decoders.image(encoded, **arguments)
        return part, fn.slice(whole, anchor, shape, axes=(0, 1))

    pipeline = graph()
    pipeline.build()
    equal = 0
    for first in range(0, len(files), 8):
        shapes = [rng.uniform(0.2, 0.8, 2).astype(np.float32) for _ in range(8)]
        pipeline.feed_input("encoded", files[first : first + 8])
        pipeline.feed_input("shape", shapes)
        pipeline.feed_input("anchor", [(rng.uniform(0, 1, 2) * (1 - shape)).astype(np.float32) for shape in shapes])
        part, cut = (output.as_cpu() for output in pipeline.run())
        equal += sum(np.array_equal(np.array(part[row]), np.array(cut[row])) for row in range(8))
    return {
        "as designed": True,  # gpupipe decodes whole there; this says whether it has to
        "equal": equal,
        "of": len(files),
        "design": "not relied on: a crash or a difference here is why",
    }


def bad_images_pass(at: Setup) -> dict[str, Any]:
    """After a file that cannot be decoded, are the others of its batch and all later batches right?"""
    files = mixture(16)
    damaged = bytearray(files[4])
    at_table = damaged.index(b"\xff\xc4") + 5  # the code lengths of a Huffman table
    damaged[at_table : at_table + 8] = b"\xff" * 8
    recipe = Recipe.train(size=96)
    good, bad = records_of(files), records_of([*files[:4], damaged, *files[5:]])
    headers = [scan(record.data) for record in good]
    sizes = [upright_size(header, "ignore") for header in headers]
    plan = make_plan(recipe, seed=1, epoch=2, indices=list(range(16)), sizes=sizes)
    rows = [row for row in range(16) if row != 4]
    backend = DaliBackend(recipe, device=at.device, batch_size=16, options=Options(threads=4))
    wrong = 0
    try:
        expected = backend.submit(good, headers, plan).result().images
        taken: list[int] = []
        for number in range(50):
            applied = backend.submit(bad, headers, plan).result()
            wrong += list(applied.errors) != [4] or not torch.equal(applied.images[rows], expected[rows])
            wrong += not torch.equal(backend.submit(good, headers, plan).result().images, expected)
            if at.on_gpu and number in (9, 49):
                taken.append(torch.cuda.mem_get_info(at.device)[0])
    finally:
        backend.close()
    growth_mb = (taken[0] - taken[1]) / 1e6 if taken else None
    return {"as designed": wrong == 0, "wrong": wrong, "of": 100, "growth_mb": growth_mb, "design": "yes"}


def copy_costs(at: Setup) -> dict[str, Any]:
    """What the copy into a tensor of torch's takes of a batch, beside the bytes it moves."""
    from nvidia.dali import fn, pipeline_def, types

    height = width = 224 if at.on_gpu else 32

    @pipeline_def(
        batch_size=at.batch, num_threads=2, device_id=at.device.index, exec_dynamic=True, prefetch_queue_depth=1
    )
    def graph() -> Any:
        return fn.constant(fdata=0.5, shape=[3, height, width], dtype=types.FLOAT, device="gpu" if at.on_gpu else "cpu")

    pipeline = graph()
    pipeline.build()
    (batch,) = pipeline.run()
    found: dict[str, Any] = {"batch_mb": at.batch * 3 * height * width * 4 / 1e6}
    view = torch.utils.dlpack.from_dlpack(batch.as_tensor())
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        taken_ms = []
        for _ in range(30):
            at.synchronize()
            begin = time.perf_counter()
            view.to(dtype, copy=True)
            at.synchronize()
            taken_ms.append((time.perf_counter() - begin) * 1e3)
        found[f"{str(dtype).removeprefix('torch.')}_ms"] = float(np.median(taken_ms[5:]))
    return {"as designed": found["float32_ms"] < 5, **found, "design": "far less than a step: about 0.1 ms on an H200"}


QUESTIONS: dict[str, Callable[[Setup], dict[str, Any]]] = {
    function.__name__: function
    for function in (
        decoders_differ,
        decoding_depends_on_the_batch,
        reductions_depend_on_the_batch,
        raw_and_encoded_mix,
        regions_can_be_decoded,
        bad_images_pass,
        copy_costs,
    )
}


def _answer(name: str, at: Setup, answers: Any) -> None:
    """In the process that is made for one question."""
    with open(os.devnull, "w") as nothing:  # libjpeg writes of each damaged file
        os.dup2(nothing.fileno(), 2)
    try:
        found = QUESTIONS[name](at)
    except Exception as error:
        found = {"as designed": False, "ended": f"{type(error).__name__}: {error}"}
    answers.send(json.dumps(found, allow_nan=False))


def asked(name: str, at: Setup) -> dict[str, Any]:
    """The answer; a crash, an exception and a hang are answers too."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(name, at, theirs))
    process.start()
    theirs.close()
    try:
        found: dict[str, Any] = json.loads(ours.recv()) if ours.poll(LIMIT_S) else {}
    except EOFError:
        found = {}
    process.join(LIMIT_S if found else 10)
    if process.is_alive():
        process.kill()
        process.join()
    if not found:
        feared = name == "regions_can_be_decoded"  # a crash there is what the design expects
        found = {"as designed": feared, "ended": f"no answer: exit status {process.exitcode}"}
    return found


def measure(at: Setup) -> dict[str, Any]:
    found = {}
    for name in QUESTIONS:
        found[name] = asked(name, at)
        verdict = "as designed" if found[name]["as designed"] else "NOT AS DESIGNED"
        question = (QUESTIONS[name].__doc__ or "").strip()
        print(f"{question}\n  {verdict}: {found[name].get('ended') or found[name]['design']}", flush=True)
    return found
