"""Each operator on every backend against torchvision's own: how far apart, and what it costs on a CPU.

    python benchmarks/operator_table.py ../shared/data/photos

The photos are decoded and resized to 224 x 224 once, so that all sides get the same pixels and a difference is the
operator's alone; photos that are not there are generated. Differences are in LSB (1/255 before normalisation) over
all values of all photos. A cost is what one more operator adds to an image, in microseconds of CPU time of one thread:
with "torchvision" and "numba" the time of the backend with the operator less that without it, with "batch" the time of
the batched operators in torch that DALI's backend uses, on the CPU.

"dali_operators" says why those are not DALI's own operators: what they make of the same pixels, and how long it takes
on one thread. Writes results/operators.json.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import write_result

import gpupipe as gp
from gpupipe import backends
from gpupipe.backends import numba_cpu
from gpupipe.backends.batch_operators import apply_operations
from gpupipe.backends.erasing import erase_batch
from gpupipe.backends.operators import apply_step
from gpupipe.backends.torchvision_cpu import decode_and_apply
from gpupipe.demo.pictures import make
from gpupipe.headers import Header, scan_record
from gpupipe.plan import make_plan
from gpupipe.records import Plan, Record
from gpupipe.steps.base import Step

SIDE = 224
BATCH = 32
NORMALIZE = gp.Normalize()
AFFINE = {"degrees": 30, "translate": (0.1, 0.1), "scale": (0.8, 1.2), "shear": 10}

# As torchvision calls them.
OPERATORS: dict[str, Step] = {
    "ColorJitter(0.4, 0.4, 0.4, 0.1)": gp.ColorJitter(0.4, 0.4, 0.4, 0.1),
    "Grayscale": gp.Grayscale(),
    "RandomAdjustSharpness(2)": gp.RandomAdjustSharpness(2, p=1.0),
    "RandomPosterize(4)": gp.RandomPosterize(4, p=1.0),
    "RandomSolarize(0.5)": gp.RandomSolarize(0.5, p=1.0),
    "RandomInvert": gp.RandomInvert(p=1.0),
    "RandomAutocontrast": gp.RandomAutocontrast(p=1.0),
    "RandomEqualize": gp.RandomEqualize(p=1.0),
    "GaussianBlur(5)": gp.GaussianBlur(5),
    "GaussianBlur(23)": gp.GaussianBlur(23),
    "RandomRotation(30), nearest": gp.RandomRotation(30),
    "RandomRotation(30), bilinear": gp.RandomRotation(30, interpolation="bilinear"),
    "RandomAffine, nearest": gp.RandomAffine(**AFFINE),
    "RandomAffine, bilinear": gp.RandomAffine(**AFFINE, interpolation="bilinear"),
    "RandomCrop, padding 28, grey": gp.RandomCrop(SIDE, padding=28, fill=0.5),
    "RandomCrop, padding 28, reflect": gp.RandomCrop(SIDE, padding=28, padding_mode="reflect"),
    "TrivialAugmentWide": gp.TrivialAugmentWide(),
    "RandAugment": gp.RandAugment(),
    "AutoAugment": gp.AutoAugment(),
    "RandomErasing": gp.RandomErasing(p=1.0),
    "RandomErasing, random": gp.RandomErasing(p=1.0, value="pixels"),
}

Apply = Callable[[Record, Header, Plan, int, torch.Tensor], None]


def recipe_of(step: Step | None, precision: str) -> gp.Recipe:
    """The operator alone, on pictures that have their size."""
    if step is None:
        return gp.Recipe(steps=(gp.CenterCrop(SIDE), NORMALIZE), precision=precision)
    if step.STAGE == "erase":
        return gp.Recipe(steps=(gp.CenterCrop(SIDE), NORMALIZE, step), precision=precision)
    before = () if isinstance(step, gp.RandomCrop) else (gp.CenterCrop(SIDE),)
    return gp.Recipe(steps=(*before, step, NORMALIZE), precision=precision)


def pictures(folder: Path, limit: int | None) -> list[Record]:
    """Photos as records of pixels, uint8 (224, 224, 3)."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[:limit]
    recipe = gp.Recipe(steps=(gp.Resize(256), gp.CenterCrop(SIDE)), precision="uint8")
    found = []
    for index, path in enumerate(files):
        record = Record(path.read_bytes(), 0, index, path.name)
        header = scan_record(record)
        plan = make_plan(recipe, seed=0, epoch=0, indices=[index], sizes=[(header.height, header.width)])
        image = torch.empty(3, SIDE, SIDE)
        decode_and_apply(recipe, record, header, plan, 0, image)
        pixels = (image * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
        found.append(replace(record, data=pixels))
    return found


def planned(recipe: gp.Recipe, records: Sequence[Record]) -> Plan:
    indices = [record.index for record in records]
    return make_plan(recipe, seed=0, epoch=0, indices=indices, sizes=[(SIDE, SIDE)] * len(records))


# --- how far apart ---


def differences(step: Step, records: list[Record], precision: str) -> dict[str, dict[str, float]]:
    """Backend -> how far it is from the torchvision backend."""
    recipe = recipe_of(step, precision)
    std = 255 * np.array(recipe.normalize.std)[:, None, None]
    reference = images("torchvision", recipe, records)
    found = {}
    for name in ("dali", "numba"):
        difference = np.abs(images(name, recipe, records) - reference) * std
        found[name] = {
            "max_lsb": float(difference.max()),
            "p999_lsb": float(np.quantile(difference, 0.999)),
            "off_share": float((difference > 0.5).mean()),
        }
    return found


def images(name: str, recipe: gp.Recipe, records: list[Record]) -> np.ndarray[Any, Any]:
    """float64 (n, 3, 224, 224), normalised."""
    plan, headers = planned(recipe, records), [scan_record(record) for record in records]
    backend = backends.create(name, recipe, device="cpu", batch_size=BATCH)
    try:
        parts = [slice(first, first + BATCH) for first in range(0, len(records), BATCH)]
        made = [backend.submit(records[part], headers[part], plan.take(part)).result().images for part in parts]
    finally:
        backend.close()
    return torch.cat(made).double().numpy()


# --- what it costs ---


def costs_us(step: Step, records: list[Record], precision: str, rounds: int) -> dict[str, float]:
    """Microseconds of CPU time of one thread that the operator adds to an image; all ways take turns."""
    ways: dict[str, Callable[[], object]] = {}
    for name, one in (("with", step), ("without", None)):
        recipe = recipe_of(one, precision)
        numba_cpu._compile(recipe)
        for backend, apply in (
            ("torchvision", partial(decode_and_apply, recipe)),
            ("numba", numba_cpu._Workers(recipe).apply_row),
        ):
            ways[f"{backend} {name}"] = partial(_all, apply, planned(recipe, records), records)
    plan = planned(recipe_of(step, precision), records)
    pixels = torch.stack([torch.from_numpy(record.data) for record in records]).permute(0, 3, 1, 2).contiguous()
    batch = pixels if precision == "uint8" else pixels.float() / 255

    def batched() -> None:
        apply_operations(batch, (*plan.colour, *plan.operations))
        for erasing in plan.erasing:
            erase_batch(batch, erasing)

    ways["batch"] = batched
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        for name, run in ways.items():
            begin = time.thread_time()
            run()
            if number >= 0:
                taken[name].append((time.thread_time() - begin) / len(records))
    medians = {name: float(np.median(values)) * 1e6 for name, values in taken.items()}
    found = {name: medians[f"{name} with"] - medians[f"{name} without"] for name in ("torchvision", "numba")}
    return {name: round(value, 1) for name, value in (found | {"batch": medians["batch"]}).items()}


def _all(apply: Apply, plan: Plan, records: Sequence[Record]) -> None:
    out = torch.empty(3, SIDE, SIDE)
    for row, record in enumerate(records):
        apply(record, _HEADER, plan, row, out)


_HEADER: Header = scan_record(Record(np.zeros((SIDE, SIDE, 3), np.uint8), 0, 0, "any"))


# --- DALI's own operators ---


def dali_operators(records: list[Record], rounds: int) -> dict[str, dict[str, float]]:
    """What DALI's own operators make of the same uint8 pixels and parameters."""
    from nvidia.dali import fn, types

    moved, blurred = gp.RandomAffine(**AFFINE), gp.GaussianBlur(23)
    matrices = _pixel_matrices(planned(recipe_of(moved, "float32"), records))
    sigma = planned(recipe_of(blurred, "float32"), records).operations[0].parameters[:, 0].astype(np.float32)
    bilinear = gp.RandomAffine(**AFFINE, interpolation="bilinear")

    def warp(interp_type: Any) -> Callable[..., Any]:
        return lambda image, matrix: fn.warp_affine(
            image, matrix=matrix, interp_type=interp_type, fill_value=0.0, dtype=types.FLOAT, inverse_map=True
        )

    ways: dict[str, tuple[Step, Any, Callable[..., Any]]] = {
        "warp_affine, nearest": (moved, matrices, warp(types.INTERP_NN)),
        "warp_affine, linear": (bilinear, matrices, warp(types.INTERP_LINEAR)),
        "gaussian_blur": (blurred, sigma, lambda image, s: fn.gaussian_blur(image, sigma=s, window_size=23)),
        "equalize": (gp.RandomEqualize(p=1.0), sigma, lambda image, _: fn.equalize(image)),
        "solarize by arithmetic": (
            gp.RandomSolarize(128 / 255, p=1.0),
            sigma,
            lambda image, _: image + (image >= 128) * (255 - 2 * fn.cast(image, dtype=types.INT32)),
        ),
    }
    return {
        name: _dali_operator(step, records, parameters, operate, rounds)
        for name, (step, parameters, operate) in ways.items()
    }


def _pixel_matrices(plan: Plan) -> np.ndarray[Any, Any]:
    """float32 (n, 2, 3): from output to input pixels, counted as DALI does: the first one's centre is at 0.5."""
    from gpupipe.backends.batch_operators import _affine_matrices

    half = SIDE / 2
    found = _affine_matrices(plan.operations[0].parameters.T, SIDE, SIDE).reshape(-1, 2, 3) * half
    found[:, :, 2] += half - half * found[:, :, :2].sum(axis=2)
    return found.astype(np.float32)


def _dali_operator(
    step: Step, records: list[Record], parameters: Any, operate: Callable[..., Any], rounds: int
) -> dict[str, float]:
    from nvidia.dali import fn, pipeline_def

    @pipeline_def(batch_size=len(records), num_threads=1, device_id=None)
    def define(*, operator: bool) -> Any:
        image = fn.external_source(lambda: [record.data for record in records], layout="HWC")
        given = fn.external_source(lambda: list(parameters))
        return (operate(image, given), given) if operator else (image, given)

    taken = {}
    for operator in (True, False):
        pipeline = define(operator=operator)
        pipeline.build()
        pipeline.run()
        times = []
        for _ in range(rounds):
            begin = time.perf_counter()
            output = pipeline.run()[0]
            times.append(time.perf_counter() - begin)
        taken[operator] = min(times) / len(records) * 1e6
        if operator:
            made = np.stack([np.asarray(output.at(row)) for row in range(len(records))]).astype(np.float64)
    plan = planned(recipe_of(step, "uint8"), records)
    pixels = [torch.from_numpy(record.data).permute(2, 0, 1).contiguous() for record in records]
    expected = torch.stack([apply_step(image, plan.operations[0], row) for row, image in enumerate(pixels)])
    difference = np.abs(made - expected.permute(0, 2, 3, 1).double().numpy())
    return {
        "max_lsb": float(difference.max()),
        "p999_lsb": float(np.quantile(difference, 0.999)),
        "off_share": float((difference > 1).mean()),
        "us": round(taken[True] - taken[False], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path, nargs="?", help="without: generated pictures")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, help="the first so many photos")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if options.photos is None:
            for _ in make(Path(folder), options.limit or 92):
                pass
        records = pictures(options.photos or Path(folder), options.limit)
    operators = {}
    for name, step in OPERATORS.items():
        print(name, file=sys.stderr)
        operators[name] = {
            precision: {
                "differences": differences(step, records, precision),
                "us": costs_us(step, records[:BATCH], precision, options.rounds),
            }
            for precision in ("float32", "uint8")
        }
    write_result(
        "operators",
        {
            "photos": len(records) if options.photos else 0,
            "operators": operators,
            "dali_operators": dali_operators(records, options.rounds),
            "dali_gpu": "not run",
            "load_average_at_end": round(os.getloadavg()[0], 2),
        },
    )


if __name__ == "__main__":
    main()
