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
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from gpupipe.backends.numba_cpu import kernels
from gpupipe.backends.numba_cpu.render import Renderer
from gpupipe.plan import make_plan
from gpupipe.recipe import Recipe
from gpupipe.steps import CenterCrop, ColorJitter, Grayscale, RandomGrayscale, RandomResizedCrop
from gpupipe.steps.base import Interpolation

U8 = npt.NDArray[np.uint8]

# Height and width of the pictures; the last is large enough for sums that float32 rounds.
_SIZES = ((61, 43), (150, 200), (333, 500), (700, 620))

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
    key = _key()
    path = _answers_path()
    known = _read(path)
    if key not in known:
        known[key] = _compare()
        _write(path, known)
    return known[key]


def _compare() -> bool:
    from gpupipe.backends import torchvision_cpu

    telling = np.array(_TELLING_COLOURS, np.uint8)[None]
    for number, recipe in enumerate(_recipes()):
        renderer = Renderer(recipe)
        pictures = [telling, *(_picture(*size, seed=number) for size in _SIZES)]
        sizes = [picture.shape[:2] for picture in pictures]
        plan = make_plan(recipe, seed=number, epoch=0, indices=range(len(pictures)), sizes=sizes)
        for row, picture in enumerate(pictures):
            found = np.empty(3 * recipe.output_size[0] * recipe.output_size[1], np.float32)
            renderer.render_whole(picture, plan, row, found)
            expected = torchvision_cpu.apply_row(picture, plan, row, recipe)
            if not np.array_equal(found, expected.numpy().reshape(-1)):
                return False
    return True


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
    source = hashlib.sha256(Path(kernels.__file__).read_bytes()).hexdigest()
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
