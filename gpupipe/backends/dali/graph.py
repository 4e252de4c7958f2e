"""The DALI graph: one definition for the GPU and, to test it without one, for the CPU.

Importing this module imports nvidia.dali. The graph has no random numbers and no state; all its inputs come from
`gpupipe.backends.dali.feed`, under the names used here. What a recipe does not need is not in its graph, and what a
sample does not need is skipped by a conditional. Operations, and all behind them, are no part of the graph: the
hand-over does them in torch, and says why.

Pixels are floats from 0 to 255: interleaved up to the resize, planes (3, height, width) after it, because arithmetic on
single channels of interleaved pixels is slow. Numbers that differ from sample to sample reach operators as arguments,
which stay on the CPU for GPU operators too; as operands of arithmetic each would be copied to the GPU by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import nvidia.dali

from gpupipe.backends.base import Decode
from gpupipe.backends.dali.convert import WHITE, normalisation, slots
from gpupipe.pillow import silenced
from gpupipe.recipe import Recipe

# Any, because DALI's type stubs lack its enums and call most results optional.
dali: Any = nvidia.dali
fn, math, types = dali.fn, dali.math, dali.types

# A batch of samples in the graph.
Node = Any

# Luma, as torchvision rounds it. Source: torchvision.transforms.v2.functional.rgb_to_grayscale.
_GREY = (0.2989, 0.587, 0.114)

# torchvision's factor from floats in [0, 1] to uint8, which truncates; here for floats in [0, 255].
# Source: torchvision.transforms.v2.functional.to_dtype.
_TO_UINT8 = (WHITE + 1 - 1e-3) / WHITE

# Where red, green and blue are on the circle of hues, in sixths of a turn, as offsets for `_turn_hue`.
_HUE_OFFSETS = np.array([3, 1, -1], np.float32).reshape(3, 1, 1)
# Below this range of a pixel's channels, in 1/255, there is no hue to turn.
_GREY_RANGE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where the graph runs.

    Attributes:
        decode: As in `Options`.
        rest: "cpu" or "gpu": where all that follows runs; a GPU decoder needs "gpu".
        device_id: Number of the GPU; None without one.
    """

    decode: Decode
    rest: Literal["cpu", "gpu"]
    device_id: int | None


def build(recipe: Recipe, placement: Placement, *, batch_size: int, threads: int) -> Any:
    """The pipeline of a recipe, not built yet.

    Args:
        recipe: What to do to each image.
        placement: On which device.
        batch_size: The most samples of a batch.
        threads: DALI's worker threads.

    Returns:
        A pipeline that runs once for each `schedule_run`; any number of runs may be scheduled ahead of `outputs`.
    """
    # From Python 3.13 on, the rewriting of conditionals warns; where warnings are errors, it gives up on them.
    with silenced():
        return _define(
            recipe,
            placement,
            batch_size=batch_size,
            num_threads=threads,
            device_id=placement.device_id,
            exec_dynamic=True,
            # More would make the first `schedule_run` schedule that many runs, with batches that are not there yet.
            # The dynamic executor overlaps scheduled runs all the same (measured).
            prefetch_queue_depth=1,
        )


@dali.pipeline_def(enable_conditionals=True)  # type: ignore[untyped-decorator]
def _define(recipe: Recipe, placement: Placement) -> Node:
    pixels = _pixels(recipe, placement)
    image = _resized(pixels, recipe, placement)
    for number, slot in enumerate(slots(recipe)):
        if slot == "blend":
            image = _blend(image, number, recipe)
        else:
            image = _hue(image, number, recipe, placement)
    return _finished(image, recipe)


def _input(name: str, dtype: Any, ndim: int, layout: str | None = None) -> Node:
    # Without copies: the arrays live until the outputs of their run have come.
    return fn.external_source(name=name, dtype=dtype, ndim=ndim, layout=layout, device="cpu", no_copy=True)


# --- pixels ---


def _pixels(recipe: Recipe, placement: Placement) -> Node:
    """The needed region of each image with its zeros around it: uint8 (height, width, 3)."""
    encoded = _input("encoded", types.UINT8, 1)
    raw = _input("raw", types.UINT8, 3, "HWC")
    corner, extent = _input("region_corner", types.INT32, 1), _input("region_extent", types.INT32, 1)
    if _input("native", types.BOOL, 0):
        pixels = _decoded(encoded, corner, extent, placement)
    else:
        pixels = raw
        if placement.rest == "gpu":
            pixels = raw.gpu()
    if recipe.exif == "apply":
        if _input("transposed", types.BOOL, 0):
            pixels = fn.transpose(pixels, perm=[1, 0, 2], transpose_layout=False)
    margin_corner, margin_extent = _input("margin_corner", types.INT32, 1), _input("margin_extent", types.INT32, 1)
    if _input("margin", types.BOOL, 0):
        pixels = fn.slice(pixels, margin_corner, margin_extent, axes=(0, 1), out_of_bounds_policy="pad")
    return pixels


def _decoded(encoded: Node, corner: Node, extent: Node, placement: Placement) -> Node:
    exact = {
        "adjust_orientation": False,
        "jpeg_fancy_upsampling": True,
        "use_fast_idct": False,
        "output_type": types.RGB,
    }
    if placement.decode == "cpu":
        # Decodes no more than the region, and is equal to cutting it out of the whole, bit for bit.
        pixels = fn.decoders.image_slice(encoded, corner, extent, axes=(0, 1), device="cpu", **exact)
        return pixels.gpu() if placement.rest == "gpu" else pixels
    # The JPEG engines' pixels differ slightly from those of the CUDA decoder: any share between none and all would make
    # a file's decoder depend on its batch.
    load = 1.0 if placement.decode == "hardware" else 0.0
    # The whole image: decoding regions on the GPU fails or crashes with nvImageCodec 0.9.0 (its issue 55).
    whole = fn.decoders.image(encoded, device="mixed", hw_decoder_load=load, affine=False, **exact)
    return fn.slice(whole, corner, extent, axes=(0, 1))


def _resized(pixels: Node, recipe: Recipe, placement: Placement) -> Node:
    """Resize, window and flips: float planes (3, height, width), without a layout."""
    cubic = recipe.interpolation == "bicubic"
    image = fn.resize(
        pixels,
        size=recipe.output_size,
        roi_start=_input("roi_start", types.FLOAT, 1),
        roi_end=_input("roi_end", types.FLOAT, 1),
        interp_type=types.INTERP_CUBIC if cubic else types.INTERP_LINEAR,
        antialias=True,
        dtype=types.FLOAT,
    )
    image = fn.crop_mirror_normalize(image, dtype=types.FLOAT, output_layout="CHW")
    image = fn.reinterpret(image, layout="")
    rows, columns = _input("rows", types.FLOAT, 3), _input("columns", types.FLOAT, 3)
    if _input("weighted", types.BOOL, 0):
        if placement.rest == "gpu":
            image = image * rows.gpu() * columns.gpu()
        else:
            image = image * rows * columns
    if cubic:
        image = _clamped(image)
    if recipe.precision == "uint8":
        image = math.floor(image + 0.5)
    return image


# --- colour ---


def _blend(image: Node, number: int, recipe: Recipe) -> Node:
    weight, mean_weight, grey_weight = (
        _input(f"{name}_{number}", types.FLOAT, 0) for name in ("image", "mean", "grey")
    )
    mixes = _input(f"mixes_{number}", types.BOOL, 0)
    if _input(f"used_{number}", types.BOOL, 0):
        blended = _scaled(image, weight)
        if mixes:
            grey = _grey(image)
            if recipe.precision == "uint8":
                grey = math.floor(grey)
            mean = fn.reductions.mean(grey, keep_dims=True)
            blended = blended + (_scaled(grey, grey_weight) + _scaled(mean, mean_weight))
        blended = _clamped(blended)
        if recipe.precision == "uint8":
            blended = math.floor(blended)
    else:
        blended = image
    return blended


def _hue(image: Node, number: int, recipe: Recipe, placement: Placement) -> Node:
    shift = _input(f"shift_{number}", types.FLOAT, 0)
    if _input(f"used_{number}", types.BOOL, 0):
        turned = _turned(image, shift, placement)
        if recipe.precision == "uint8":
            turned = math.floor(turned * _TO_UINT8)
    else:
        turned = image
    return turned


def _turned(image: Node, shift: Node, placement: Placement) -> Node:
    """A turn of the hue by `shift` sixths, in HSV, without branches.

    Value and range of a pixel stay, and each channel is value - range * w, where w falls from 1 to 0 over one sixth of
    the circle, stays 0 for two and rises again. Where torchvision picks one of six cases, the same is reached by
    measuring the distance on the circle between the pixel's hue and where the channel is darkest.

    Source: torchvision.transforms.v2.functional.adjust_hue; Smith, "Color gamut transform pairs", SIGGRAPH 1978.
    """
    red, green, blue = _planes(image)
    value = math.max(math.max(red, green), blue)
    span = value - math.min(math.min(red, green), blue)
    # The hue times the range, counted in sixths from red, with the precedence red, green, blue where two are largest.
    is_green = green >= value
    from_blue = (red - green) + span * 4.0
    from_green = (blue - red) + span * 2.0
    not_red = from_blue + (from_green - from_blue) * is_green
    hue = not_red + ((green - blue) - not_red) * (red >= value)
    hue = hue / math.max(span, _GREY_RANGE)
    # In [-7, 11]: hue in [-1, 5], shift in [-3, 3], offset in [-3, 3].
    offsets = types.Constant(_HUE_OFFSETS, device=placement.rest)
    position = _scaled(hue, None, shift) + offsets
    # The distance to the nearest multiple of 6 is 3 - | ||position| - 6| - 3 |.
    far = math.abs(math.abs(math.abs(position) - 6.0) - 3.0)
    return value - span * (math.min(math.max(far, 1.0), 2.0) - 1.0)


def _planes(image: Node) -> tuple[Node, Node, Node]:
    red, green, blue = (fn.slice(image, start=(channel,), shape=(1,), axes=(0,)) for channel in range(3))
    return red, green, blue


def _grey(image: Node) -> Node:
    red, green, blue = _planes(image)
    return red * _GREY[0] + green * _GREY[1] + blue * _GREY[2]


def _scaled(image: Node, weight: Node | None, shift: Node | None = None) -> Node:
    """image * weight + shift, with a number for each sample."""
    scaled = fn.brightness_contrast(
        image,
        brightness=1.0 if weight is None else weight,
        brightness_shift=0.0 if shift is None else shift,
        contrast_center=0.0,
        dtype=types.FLOAT,
    )
    return fn.reinterpret(scaled, layout="")  # the operator takes planes without a layout, but calls its output HWC


def _clamped(image: Node) -> Node:
    # math.clamp is seven times slower on the CPU.
    return math.min(math.max(image, 0.0), WHITE)


# --- output ---


def _finished(image: Node, recipe: Recipe) -> Node:
    """What the hand-over gets.

    Without operations: normalised float32, of which it makes other types, as DALI has no bfloat16 and truncates to
    float16 on the CPU. With them: planes from 0 to 255, float32 or, if the recipe rounds, uint8.
    """
    image = fn.reinterpret(image, layout="CHW")
    if recipe.operation_steps:
        dtype = types.UINT8 if recipe.precision == "uint8" else types.FLOAT
        return fn.crop_mirror_normalize(image, dtype=dtype, output_layout="CHW")
    mean, std = normalisation(recipe)
    return fn.crop_mirror_normalize(
        image,
        mean=mean,
        std=std,
        dtype=types.FLOAT,
        output_layout="HWC" if recipe.output.memory_format == "channels_last" else "CHW",
    )
