"""Where each output image comes from: one formula for random crops, whole-image resizes and padded centre crops.

The output window, laid back into the box, is a rectangle with fractional corners, which DALI's resize takes as its
region of interest. What DALI does otherwise than torchvision at the edge of the box is put right by two vectors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpupipe.records import Plan
from gpupipe.steps.base import Interpolation

Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int32]
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]

# Half the width of each filter when it does not scale down, in pixels.
_SUPPORT_PX = {"bilinear": 1.0, "bicubic": 2.0}

# DALI reads its cubic filter (Keys, a = -0.5, as torch) from a table of 129 entries and draws straight lines in
# between: up to 6e-4 off, which is where the 0.3 LSB of bicubic come from. Source: resampling_filters.cu of DALI.
_CUBIC_KNOTS = np.linspace(-2, 2, 129)

# The taps that are summed at a time, to bound the memory for enormous images that become a few pixels.
_TAPS_AT_ONCE = 1 << 20


@dataclass(frozen=True, slots=True)
class Geometry:
    """Crop, resize, window and flips of n images, as the graph takes them.

    Attributes:
        region: int32 (n, 4): top, left, height, width of the pixels that are needed, in the image.
        before, after: bool (n, 2): whether a row and a column of zeros goes in front of the region, and behind it.
        start, end: float32 (n, 2): corners of the output window, (y, x) from the corner of the region with its zeros;
            start > end means flipped.
        rows, columns: float32 (n, height) and (n, width): what the resized image is multiplied by.
    """

    region: Ints
    before: Bools
    after: Bools
    start: F32
    end: F32
    rows: F32
    columns: F32

    def __len__(self) -> int:
        return len(self.region)


def locate(plan: Plan, interpolation: Interpolation) -> Geometry:
    """The geometry of planned samples.

    DALI repeats the edge of the region where a filter reaches beyond it; torchvision leaves those taps out and divides
    by the weight that remains. With zeros at the edge of the box the taps contribute nothing; the division is left to
    `rows` and `columns`. One row of zeros is enough, as it is then the edge that DALI repeats. Where nothing is scaled
    down, a bilinear filter reads at most one tap beyond the edge, and repeating it gives the same as leaving it out.

    Args:
        plan: n rows.
        interpolation: The filter of the resize.

    Source:
        torchvision.transforms.v2.functional.resize with antialias=True (ATen/native/cpu/UpSampleKernel.cpp);
        dali/kernels/imgproc/resample/resampling_setup.cc
    """
    box = plan.box.astype(np.float64)
    extent, resized, window = box[:, 2:], plan.resized.astype(np.float64), plan.window.astype(np.float64)
    scale = extent / resized
    radius = _SUPPORT_PX[interpolation] * np.maximum(scale, 1)

    # One pixel more than the filter needs: DALI computes positions in float32.
    first = np.floor(scale * (window + 0.5) - radius) - 1
    last = np.ceil(scale * (window + np.array(plan.size) - 0.5) + radius) + 1
    low = np.clip(first, 0, extent - 1)
    high = np.clip(last, low + 1, extent)
    renormalised = (scale > 1) | ((scale < 1) & (interpolation == "bicubic"))
    before, after = renormalised & (first < 0), renormalised & (last > extent)

    start = scale * window - low + before
    end = start + scale * np.array(plan.size)
    flipped = plan.flip[:, ::-1]
    weights = [
        _weights(plan, axis, scale[:, axis], radius[:, axis], renormalised[:, axis], interpolation) for axis in (0, 1)
    ]
    for axis in (0, 1):
        weights[axis] = np.where(flipped[:, axis, None], weights[axis][:, ::-1], weights[axis])
    return Geometry(
        region=np.concatenate([box[:, :2] + low, high - low], axis=1).astype(np.int32),
        before=before,
        after=after,
        start=np.where(flipped, end, start).astype(np.float32),
        end=np.where(flipped, start, end).astype(np.float32),
        rows=weights[0].astype(np.float32),
        columns=weights[1].astype(np.float32),
    )


def _weights(plan: Plan, axis: int, scale: F64, radius: F64, renormalised: Bools, interpolation: Interpolation) -> F64:
    """What the outputs along one axis are multiplied by: (n, size of the axis).

    Zero outside of the resized box, where the window is padded with black; elsewhere the weight of all taps divided by
    the weight of those inside the box.
    """
    extent, resized = plan.box[:, 2 + axis], plan.resized[:, axis, None]
    position = plan.window[:, axis, None] + np.arange(plan.size[axis])
    inside = (position >= 0) & (position < resized)
    center = scale[:, None] * (position + 0.5)
    reaches_out = (center - radius[:, None] < 0) | (center + radius[:, None] > extent[:, None])
    weights = inside.astype(np.float64)
    sample, output = np.nonzero(inside & reaches_out & renormalised[:, None])
    if len(sample) == 0:
        return weights
    taps = int(np.ceil(2 * radius[sample].max())) + 2
    step = max(1, _TAPS_AT_ONCE // taps)
    for begin in range(0, len(sample), step):
        some, outputs = sample[begin : begin + step], output[begin : begin + step]
        middle = center[some, outputs, None]
        tap = np.floor(middle - radius[some, None]) + np.arange(taps)
        weight = _filter(interpolation, (tap + 0.5 - middle) / np.maximum(scale[some, None], 1))
        kept = weight * ((tap >= 0) & (tap < extent[some, None]))
        weights[some, outputs] = weight.sum(axis=1) / kept.sum(axis=1)
    return weights


def _filter(interpolation: Interpolation, distance: F64) -> F64:
    if interpolation == "bilinear":
        triangle: F64 = np.maximum(1 - np.abs(distance), 0)
        return triangle
    return np.interp(distance, _CUBIC_KNOTS, _cubic(np.abs(_CUBIC_KNOTS)), left=0, right=0)


def _cubic(distance: F64) -> F64:
    """Keys' filter for a = -0.5 (torch's antialiased one), up to distance 2."""
    near = (1.5 * distance - 2.5) * distance * distance + 1
    far = ((2.5 - 0.5 * distance) * distance - 4) * distance + 2
    return np.where(distance < 1, near, far)


# For EXIF orientation 0 (unused) to 8: whether the image as stored has to be transposed to be upright, and which of
# its axes have to be reversed after that, (vertically, horizontally). Source: PIL.ImageOps.exif_transpose.
_TRANSPOSED = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1], np.bool_)
_MIRRORED = np.array(
    [[0, 0], [0, 0], [0, 1], [1, 1], [1, 0], [0, 0], [0, 1], [1, 1], [1, 0]],
    np.bool_,
)


def as_stored(geometry: Geometry, sizes: Ints, orientation: Ints) -> tuple[Geometry, Ints, Bools]:
    """The same pixels, for images that are decoded as they are stored and have an orientation to be applied.

    The region is cut out of the stored image and transposed where needed. What then still is mirrored is undone by the
    resize, which reads backwards. Nothing is turned pixel by pixel that need not be.

    Args:
        geometry: In upright images.
        sizes: int32 (n, 2): height and width of the upright images.
        orientation: Integers (n,): EXIF orientation, 1 to 8.

    Returns:
        The geometry from the transposed region on; int32 (n, 4): the region in the stored image; bool (n,): which
        regions have to be transposed.
    """
    transposed, mirrored = _TRANSPOSED[orientation], _MIRRORED[orientation]
    corner, extent = geometry.region[:, :2], geometry.region[:, 2:]
    region = np.concatenate([np.where(mirrored, sizes - corner - extent, corner), extent], axis=1)
    whole = (extent + geometry.before + geometry.after).astype(np.float32)
    turned = Geometry(
        region=region,
        before=np.where(mirrored, geometry.after, geometry.before),
        after=np.where(mirrored, geometry.before, geometry.after),
        start=np.where(mirrored, whole - geometry.start, geometry.start),
        end=np.where(mirrored, whole - geometry.end, geometry.end),
        rows=geometry.rows,
        columns=geometry.columns,
    )
    return turned, np.where(transposed[:, None], region[:, [1, 0, 3, 2]], region), transposed
