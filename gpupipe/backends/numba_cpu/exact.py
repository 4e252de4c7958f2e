"""Whether the uint8 kernels give torchvision's pixels on this machine, bit for bit.

They do what torch's vectorised operators for x86 CPUs do. Other CPUs and builds take other ways to the same end, which
may round differently, so the promise is tested before it is made, and the answer is kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpupipe.backends.numba_cpu import kernels, operation_kernels
from gpupipe.backends.numba_cpu.render import Renderer
from gpupipe.plan import make_plan
from gpupipe.recipe import Recipe
from gpupipe.steps import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    RandAugment,
    RandomAdjustSharpness,
    RandomAffine,
    RandomGrayscale,
    RandomResizedCrop,
    TrivialAugmentWide,
)
from gpupipe.steps.base import Interpolation
from gpupipe.steps.operations import Sampling

U8 = npt.NDArray[np.uint8]

# Height and width of the pictures; the last is large enough for sums that float32 rounds.
_SIZES = ((61, 43), (150, 200), (333, 500), (700, 620))
_OPERATED = 16  # pictures for each recipe with operations

# All colours whose grey value comes out otherwise where a multiply-add is rounded twice.
_TELLING_COLOURS = (
    *((20, 152, 7), (40, 244, 244), (40, 252, 80), (110, 111, 26), (140, 160, 81), (140, 236, 23), (140, 252, 195)),
    *((170, 61, 170), (190, 175, 206), (220, 222, 52), (230, 225, 177), (240, 222, 175), (250, 9, 228), (250, 17, 64)),
    *((250, 47, 199), (250, 55, 35), (250, 95, 215), (250, 117, 14), (250, 133, 186), (250, 171, 157), (250, 247, 99)),
)
_ANSWERS = "gpupipe-uint8-is-exact.json"


def uint8_is_exact() -> bool:
    """Whether `precision="uint8"` can be had from the kernels here; 0.3 s the first time, plus torchvision's import.

    The answer is kept beside the compiled kernels, for this version of torch, torchvision, numba and gpupipe on this
    kind of CPU.
    """
    return _remembered(_key(), _compare)


def uint8_operations_are_exact() -> bool:
    """The same of the kernels for operations; 1 s the first time, and their compilation."""
    return _remembered(f"operations; {_key()}", _compare_operations)


def _remembered(key: str, find_out: Callable[[], bool]) -> bool:
    path = _answers_path()
    known = _read(path)
    if key not in known:
        known[key] = find_out()
        _write(path, known)
    return known[key]


def _compare() -> bool:
    telling = np.array(_TELLING_COLOURS, np.uint8)[None]
    return all(
        _is_exact(recipe, [telling, *(_picture(*size, seed=number) for size in _SIZES)], number)
        for number, recipe in enumerate(_recipes())
    )


def _compare_operations() -> bool:
    pictures = [_picture(*_SIZES[number % 3], seed=number) for number in range(_OPERATED)]
    return all(_is_exact(recipe, pictures, number) for number, recipe in enumerate(_operating_recipes()))


def _is_exact(recipe: Recipe, pictures: list[U8], seed: int) -> bool:
    from gpupipe.backends import torchvision_cpu

    renderer = Renderer(recipe)
    sizes = [picture.shape[:2] for picture in pictures]
    plan = make_plan(recipe, seed=seed, epoch=0, indices=range(len(pictures)), sizes=sizes)
    for row, picture in enumerate(pictures):
        found = np.empty(3 * recipe.output_size[0] * recipe.output_size[1], np.float32)
        renderer.render_whole(picture, plan, row, found)
        expected = torchvision_cpu.apply_row(picture, plan, row, recipe)
        if not np.array_equal(found, expected.numpy().reshape(-1)):
            return False
    return True


def _operating_recipes() -> Iterator[Recipe]:
    filters: tuple[Sampling, ...] = ("nearest", "bilinear")
    for side in (97, 224):
        for interpolation in filters:
            affine = RandomAffine(40, translate=(0.2, 0.2), scale=(0.7, 1.4), shear=20, interpolation=interpolation)
            for step in (
                TrivialAugmentWide(interpolation=interpolation),
                RandAugment(3, 14, interpolation=interpolation, fill=(0.1, 0.5, 0.9)),
                affine,
            ):
                yield Recipe(steps=(RandomResizedCrop((side, side - 3)), step), precision="uint8")
        for size in (5, 23):
            yield Recipe(steps=(RandomResizedCrop(side), GaussianBlur(size, (0.5, 3.0))), precision="uint8")
        yield Recipe(steps=(RandomResizedCrop(side), RandomAdjustSharpness(1.7, 1.0)), precision="uint8")


def _recipes() -> Iterator[Recipe]:
    colour = ColorJitter((0.2, 1.8), (0.2, 1.8), (0.2, 1.8), 0.5)
    yield Recipe(steps=(CenterCrop((1, len(_TELLING_COLOURS))), Grayscale()), precision="uint8")
    filters: tuple[Interpolation, ...] = ("bilinear", "bicubic")
    for interpolation in filters:
        for size in (65, 224, 300):
            crop = RandomResizedCrop(size, interpolation=interpolation)
            yield Recipe(steps=(crop, colour, RandomGrayscale(0.3)), precision="uint8")


def _picture(height: int, width: int, seed: int) -> U8:
    """Noise around a ramp of every hue: all levels, and all orders of red, green and blue."""
    noise = np.random.default_rng(seed).integers(-40, 41, (height, width, 3))
    ramp = np.linspace(0, 2 * np.pi, width)[None, :, None] + np.linspace(0, 2 * np.pi, 3, endpoint=False)
    light = np.linspace(20, 250, height)[:, None, None]
    picture: U8 = (light * (0.5 + 0.5 * np.sin(ramp)) + noise).clip(0, 255).astype(np.uint8)
    return picture


def _key() -> str:
    versions = [f"{name} {metadata.version(name)}" for name in ("torchvision", "numba", "numpy")]
    files = (kernels.__file__, operation_kernels.__file__)
    source = hashlib.sha256(b"".join(Path(file).read_bytes() for file in files)).hexdigest()
    cpu = f"{platform.machine()} {kernels.cpu_name()} {torch.backends.cpu.get_cpu_capability()}"
    return "; ".join([f"torch {torch.__version__}", *versions, cpu, f"kernels {source}"])


def _answers_path() -> Path | None:
    directory = kernels.cache_directory()
    return None if directory is None else directory / _ANSWERS


def _read(path: Path | None) -> dict[str, bool]:
    """What is known; nothing, where there is no file or something else in it."""
    if path is None:
        return {}
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: value for key, value in found.items() if isinstance(value, bool)}


def _write(path: Path | None, known: dict[str, bool]) -> None:
    """Keep it, if possible; whole, though other processes may do the same."""
    if path is None:
        return
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "w") as file:
            json.dump(known, file)
        os.replace(temporary, path)
    except OSError:
        return
