"""The arithmetic of the numba backend: resize, flip, colour, normalise and store, one row of the output at a time.

All geometry is in two tables of taps, one for the rows and one for the columns of the output: which source pixels an
output pixel is the weighted sum of. A flip is a table in reverse order, and a pixel outside the image has no taps, so
it is black. `render` makes each output row in a line of 3 x width numbers that stays in the first-level cache; only a
contrast step, which needs the mean of the whole image first, sends the rows through `planes` and makes two passes.

Two precisions: the float kernels keep [0, 1] in float32 and may be reordered by the compiler (`fastmath`); the uint8
kernels do operation by operation what torchvision does on uint8 tensors, and may not.

Everything is in this one file because numba's cache on disk looks at the file of the function called, not at those of
the functions that it calls; `operation_kernels`, which takes only decorators and intrinsics from here, is the other.
Nothing is compiled at import.

Two habits that look odd: numba computes in float64 as soon as one operand is a Python float or an int64, hence the
float32 constants; and it checks signed indices for being negative, which costs more than the sums in the inner loop,
hence `U64`.
"""

# ruff: noqa: ARG001, ARG005, FBT003, PLR0913
# numba takes positional arguments only, and an intrinsic's Python arguments are there to be counted.

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import llvmlite.binding as binding  # type: ignore[import-untyped]
import llvmlite.ir as ir  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from numba import extending, njit, types
from numba.core.datamodel import models

# Colour operations; the first four by the numbering of `gpupipe.records.JitterRows`.
BRIGHTNESS, CONTRAST, SATURATION, HUE, GREY = range(5)

# What is written: float32 as it is, or 16 bits of these.
FLOAT16, BFLOAT16 = 0, 1

# Pixels in a group of the horizontal pass; tables and lines are padded to a multiple of it.
GROUP = 4

F32, U64 = np.float32, np.uint64
ZERO, HALF, ONE, TWO, FOUR, FIVE, SIX, THREE = map(F32, (0, 0.5, 1, 2, 4, 5, 6, 3))
SIXTH = F32(1 / 6)
MAX_U8 = F32(255)
PER_LEVEL = F32(1 / 255)
# torchvision turns [0, 1] into uint8 by floor(255.999 x): `to_dtype_image` with its eps of 1e-3.
LEVELS = F32(255 + 1.0 - 1e-3)
# torchvision.transforms.v2.functional.rgb_to_grayscale
RED, GREEN, BLUE = map(F32, (0.2989, 0.587, 0.114))

Function = TypeVar("Function", bound=Callable[..., Any])


# error_model: a check of every division for zero would keep loops from being vectorised.
_OPTIONS: dict[str, Any] = {"error_model": "numpy"}


def kernel(function: Function) -> Function:
    """A function for numba, compiled when something that calls it is."""
    return cast("Function", njit(**_OPTIONS)(function))


def fast_kernel(function: Function) -> Function:
    """As `kernel`; sums may be reordered, and NaN and infinity do not occur."""
    return cast("Function", njit(fastmath=True, **_OPTIONS)(function))


def entry(function: Function) -> Function:
    """A kernel that Python calls, for work of a few microseconds: it keeps the GIL, as handing it over takes longer.

    Compiled at its first call, and kept on disk with all that it calls. Where no directory for the cache is writable
    (the package's own, the user's, NUMBA_CACHE_DIR) every process compiles anew.
    """
    return _cached(function, nogil=False)


def long_entry(function: Function) -> Function:
    """As `entry`, without the GIL."""
    return _cached(function, nogil=True)


def _cached(function: Function, *, nogil: bool) -> Function:
    try:
        return cast("Function", njit(cache=True, nogil=nogil, **_OPTIONS)(function))
    except RuntimeError:  # "no locator available"
        return cast("Function", njit(nogil=nogil, **_OPTIONS)(function))


def intrinsic(function: Callable[..., Any]) -> Any:
    """A function that numba calls for LLVM code, and that other kernels call like one of their own."""
    return extending.intrinsic(function)


# --- four pixels at once ---
#
# A compiler does not see by itself that the red, green and blue of a pixel can be one vector of four, with the next
# pixel's red as the fourth that nobody looks at. Plain loops over the channels took 2.5 times as long.

_I32, _I8 = ir.IntType(32), ir.IntType(8)
_FLOATS, _INTS = ir.VectorType(ir.FloatType(), 4), ir.VectorType(_I32, 4)


class _Vector(types.Type):
    """Four numbers that are one LLVM vector."""

    def __init__(self, name: str, llvm: ir.Type) -> None:
        self.llvm = llvm
        super().__init__(name=name)


@extending.register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, vector: _Vector) -> None:
        super().__init__(manager, vector, vector.llvm)  # type: ignore[no-untyped-call]


_float4, _int4 = _Vector("Float4", _FLOATS), _Vector("Int4", _INTS)


def _splat(builder: Any, scalar: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(scalar.type, 4), ir.Undefined)
    first = builder.insert_element(undefined, scalar, ir.Constant(_I32, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(_INTS, [0] * 4))


def _address(context: Any, builder: Any, array_type: Any, array: Any, position: Any, target: ir.Type) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [position]), target.as_pointer())


@intrinsic
def no_floats(_typing: Any) -> Any:
    """Four zeros of float32."""
    return _float4(), lambda *_: ir.Constant(_FLOATS, [0.0] * 4)


@intrinsic
def four_of(_typing: Any, value: Any) -> Any:
    """An int32, four times."""
    return _int4(types.int32), lambda _context, builder, _signature, arguments: _splat(builder, arguments[0])


@intrinsic
def add_floats(_typing: Any, total: Any, weight: Any, line: Any, position: Any) -> Any:
    """total + weight * line[position : position + 4], in float32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total, weight, line, position = arguments
        values = builder.load(_address(context, builder, signature.args[2], line, position, _FLOATS), align=4)
        product = builder.fmul(_splat(builder, weight), values, flags=("fast",))
        return builder.fadd(total, product, flags=("fast",))

    return _float4(_float4, types.float32, line, types.uintp), generate


@intrinsic
def add_bytes(_typing: Any, total: Any, weight: Any, line: Any, position: Any) -> Any:
    """total + weight * line[position : position + 4], uint8 and int32."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        total, weight, line, position = arguments
        address = _address(context, builder, signature.args[2], line, position, ir.VectorType(_I8, 4))
        values = builder.zext(builder.load(address, align=1), _INTS)
        return builder.add(total, builder.mul(_splat(builder, weight), values))

    return _int4(_int4, types.int32, line, types.uintp), generate


def _planes_of(builder: Any, pixels: Any) -> list[Any]:
    """Four vectors (red, green, blue, anything) as three of the red, green and blue of four pixels."""

    def shuffled(first: Any, second: Any, order: list[int]) -> Any:
        return builder.shuffle_vector(first, second, ir.Constant(_INTS, order))

    low, next_low = (shuffled(pixels[i], pixels[i + 1], [0, 4, 1, 5]) for i in (0, 2))
    high, next_high = (shuffled(pixels[i], pixels[i + 1], [2, 6, 3, 7]) for i in (0, 2))
    red, green = (shuffled(low, next_low, order) for order in ([0, 1, 4, 5], [2, 3, 6, 7]))
    return [red, green, shuffled(high, next_high, [0, 1, 4, 5])]


@intrinsic
def store_floats(_typing: Any, p0: Any, p1: Any, p2: Any, p3: Any, line: Any, position: Any, stride: Any) -> Any:
    """Write four pixels into line[position], line[stride + position] and line[2 stride + position]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *pixels, line, position, stride = arguments
        for plane in _planes_of(builder, pixels):
            builder.store(plane, _address(context, builder, signature.args[4], line, position, _FLOATS), align=4)
            position = builder.add(position, stride)
        return context.get_dummy_value()

    return types.void(*[_float4] * 4, line, types.uintp, types.uintp), generate


@intrinsic
def store_bytes(
    _typing: Any, p0: Any, p1: Any, p2: Any, p3: Any, bits: Any, line: Any, position: Any, stride: Any
) -> Any:
    """As `store_floats`: each number shifted right by `bits` and clamped to [0, 255]."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *pixels, bits, line, position, stride = arguments
        low, high = ir.Constant(_INTS, [0] * 4), ir.Constant(_INTS, [255] * 4)
        bytes4 = ir.VectorType(_I8, 4)
        for plane in _planes_of(builder, pixels):
            value = builder.ashr(plane, _splat(builder, bits))
            value = builder.select(builder.icmp_signed(">", value, low), value, low)
            value = builder.select(builder.icmp_signed("<", value, high), value, high)
            address = _address(context, builder, signature.args[5], line, position, bytes4)
            builder.store(builder.trunc(value, bytes4), address, align=1)
            position = builder.add(position, stride)
        return context.get_dummy_value()

    return types.void(*[_int4] * 4, types.int32, line, types.uintp, types.uintp), generate


@intrinsic
def fused(_typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in float32, rounded once."""
    return types.float32(*[types.float32] * 3), lambda _context, builder, _signature, xyz: builder.fma(*xyz)


@intrinsic
def bits_of(_typing: Any, x: Any) -> Any:
    """The 32 bits of a float32."""
    return (
        types.uint32(types.float32),
        lambda _context, builder, _signature, arguments: builder.bitcast(arguments[0], _I32),
    )


@intrinsic
def float_of(_typing: Any, bits: Any) -> Any:
    """The float32 of 32 bits."""
    return (
        types.float32(types.uint32),
        lambda _context, builder, _signature, arguments: builder.bitcast(arguments[0], ir.FloatType()),
    )


# --- taps ---


@kernel
def filter_weight(distance: Any, bicubic: Any) -> Any:
    """The filter at a distance in source pixels, or in scales when scaling down.

    Bilinear: 1 - |x| for |x| < 1. Bicubic: Keys' kernel with a = -0.5, for |x| < 2.

    Source: ATen/native/cpu/UpSampleKernel.cpp (`aa_filter` of HelperInterpLinear and HelperInterpCubic); Keys, "Cubic
    convolution interpolation for digital image processing", 1981.
    """
    x = abs(distance)
    if not bicubic:
        return max(1.0 - x, 0.0)
    if x < 1.0:
        return (1.5 * x - 2.5) * x * x + 1.0
    if x < 2.0:
        return ((-0.5 * x + 2.5) * x - 4.0) * x + 2.0
    return 0.0


@kernel
def rounded(value: Any, single: Any) -> Any:
    """A float64, rounded to float32 where torch computes in that."""
    return np.float64(F32(value)) if single else value


@kernel
def scale_of(n_in: Any, n_out: Any, single: Any) -> Any:
    """Source pixels for each output pixel."""
    return rounded(np.float64(n_in) / np.float64(n_out), single)


@kernel
def support_of(scale: Any, bicubic: Any) -> Any:
    """How far the filter reaches to each side, in source pixels."""
    return (2.0 if bicubic else 1.0) * max(scale, 1.0)


@kernel
def tap_range(position: Any, n_in: Any, scale: Any, support: Any, single: Any) -> Any:
    """The source pixels [first, last) that an output pixel is made of.

    Source: ATen/native/cpu/UpSampleKernel.cpp (`_compute_indices_min_size_weights_aa`)
    """
    center = rounded(scale * (position + 0.5), single)
    first = max(int(rounded(center - support, single) + 0.5), 0)
    last = min(int(rounded(center + support, single) + 0.5), n_in)
    return center, first, last


@kernel
def tap_weight(source: Any, center: Any, scale: Any, bicubic: Any, single: Any) -> Any:
    """The weight of a source pixel, before the weights of an output pixel are divided by their sum."""
    distance = (rounded(source - center, single) + 0.5) * rounded(1.0 / max(scale, 1.0), single)
    return rounded(filter_weight(rounded(distance, single), bicubic), single)


@entry
def covered(n_in: Any, n_out: Any, first: Any, count: Any, bicubic: Any, single: Any) -> Any:
    """What a window of the resized axis needs of the source.

    Args:
        n_in, n_out: Pixels of the box and of the resized box, along this axis.
        first, count: The window [first, first + count) of the resized box; may reach outside.
        bicubic, single: The filter, and whether torch computes it in float32.

    Returns:
        (begin, end, taps): source pixels, and the most that one output pixel is made of. (0, 0, 1) where the window
        lies outside altogether.
    """
    scale = scale_of(n_in, n_out, single)
    support = support_of(scale, bicubic)
    begin, end, taps = n_in, 0, 1
    for position in range(max(first, 0), min(first + count, n_out)):
        _, low, high = tap_range(position, n_in, scale, support, single)
        begin, end, taps = min(begin, low), max(end, high), max(taps, high - low)
    return min(begin, end), end, taps


@kernel
def place_of(output: Any, tap: Any, taps: Any) -> Any:
    """Where a weight stands: the output pixels in groups of four, and in a group the taps one after another."""
    return (output // GROUP * taps + tap) * GROUP + output % GROUP


class Axis(NamedTuple):
    """One axis of the output, and what it is made of.

    Attributes:
        n_in, n_out: Pixels of the box and of the resized box.
        first, length: The window [first, first + length) of the resized box; may reach outside.
        reverse: Whether the output is flipped.
        begin: The pixel of the box that is the first one of the region that was decoded.
        taps: The most pixels of the box that one output pixel is made of, as `covered` found it.
    """

    n_in: int
    n_out: int
    first: int
    length: int
    reverse: bool
    begin: int
    taps: int


@kernel
def float_taps(axis: Any, bicubic: Any, gain: Any, starts: Any, weights: Any) -> None:
    """The table of one axis, for float32 precision.

    Args:
        axis: An `Axis`.
        bicubic: The filter.
        gain: What all weights are multiplied by.
        starts: uint64, `axis.length` rounded up to a multiple of `GROUP`: the first pixel of each, in the region.
        weights: float32, len(starts) * axis.taps: see `place_of`; zero where a pixel has fewer, or is outside.

    Source: see `tap_range`; torch's kernel for float tensors computes the centres in float32.
    """
    scale = scale_of(axis.n_in, axis.n_out, True)
    support = support_of(scale, bicubic)
    for place in range(len(starts) * axis.taps):
        weights[place] = ZERO
    for output in range(len(starts)):
        starts[output] = U64(0)
        position = axis.first + (axis.length - 1 - output if axis.reverse else output)
        if output >= axis.length or position < 0 or position >= axis.n_out:
            continue
        center, low, high = tap_range(position, axis.n_in, scale, support, True)
        starts[output] = U64(low - axis.begin)
        total = 0.0
        for source in range(low, high):
            total += tap_weight(source, center, scale, bicubic, True)
        for source in range(low, high):
            weight = tap_weight(source, center, scale, bicubic, True) / total
            weights[place_of(output, source - low, axis.taps)] = F32(weight * gain)


@kernel
def uint8_taps(axis: Any, bicubic: Any, starts: Any, weights: Any) -> Any:
    """The table of one axis, for uint8 precision: as `float_taps`, with weights in int32.

    Returns:
        bits: Weights are 2**bits times what they stand for: as large as an int16 takes the largest weight of the whole
        axis, not only of the pixels in the window.

    Source: ATen/native/cpu/UpSampleKernel.cpp (`_compute_index_ranges_int16_weights`), which computes in float64.
    """
    scale = scale_of(axis.n_in, axis.n_out, False)
    support = support_of(scale, bicubic)
    largest = 0.0
    for position in range(axis.n_out):
        center, low, high = tap_range(position, axis.n_in, scale, support, False)
        total = 0.0
        for source in range(low, high):
            total += tap_weight(source, center, scale, bicubic, False)
        for source in range(low, high):
            largest = max(largest, tap_weight(source, center, scale, bicubic, False) / total)
    bits = 0
    while bits < 22 and int(0.5 + largest * (1 << (bits + 1))) < 1 << 15:
        bits += 1
    for place in range(len(starts) * axis.taps):
        weights[place] = 0
    for output in range(len(starts)):
        starts[output] = U64(0)
        position = axis.first + (axis.length - 1 - output if axis.reverse else output)
        if output >= axis.length or position < 0 or position >= axis.n_out:
            continue
        center, low, high = tap_range(position, axis.n_in, scale, support, False)
        starts[output] = U64(low - axis.begin)
        total = 0.0
        for source in range(low, high):
            total += tap_weight(source, center, scale, bicubic, False)
        for source in range(low, high):
            weight = tap_weight(source, center, scale, bicubic, False) / total * (1 << bits)
            weights[place_of(output, source - low, axis.taps)] = int(weight + (0.5 if weight >= 0 else -0.5))
    return bits


# --- resize ---


@fast_kernel
def float_row(pixels: Any, region: Any, row: Any, starts: Any, weights: Any, taps: Any, source: Any) -> None:
    """One row of the output's height and the region's width: source[x] = sum of weight * pixels[., x].

    Args:
        pixels: uint8 (height, 3 * width).
        region: (top, left, height, width) in pixels.
        row: Of the output.
        starts, weights, taps: The table of the rows.
        source: float32, at least 3 * region width.
    """
    top, left, _, width = region
    first = top + np.int64(starts[row])
    for tap in range(taps):
        weight = weights[place_of(row, tap, taps)]
        if tap == 0:
            line = pixels[first, 3 * left : 3 * (left + width)]
            for x in range(len(line)):
                source[x] = weight * F32(line[x])
        elif weight != ZERO:  # a row with fewer taps than others may be the last of the image
            line = pixels[first + tap, 3 * left : 3 * (left + width)]
            for x in range(len(line)):
                source[x] += weight * F32(line[x])


@fast_kernel
def float_columns(sources: Any, starts: Any, weights: Any, taps: Any, lines: Any) -> None:
    """Two rows of interleaved pixels to two lines of three planes, resized.

    Two, because they share the weights: a fifth less time than one after the other.

    Args:
        sources: float32 (2, 3 * (region width + taps) + 1), interleaved; what is behind the region has weight 0.
        starts, weights, taps: The table of the columns.
        lines: float32 (2, 3 * len(starts)): red, green, blue.
    """
    first, second = sources[0], sources[1]
    width = U64(len(starts))
    place = U64(0)
    for x in range(U64(0), width, U64(GROUP)):
        i0, i1, i2, i3 = (
            starts[x] * U64(3),
            starts[x + U64(1)] * U64(3),
            starts[x + U64(2)] * U64(3),
            starts[x + U64(3)] * U64(3),
        )
        p0, p1, p2, p3 = no_floats(), no_floats(), no_floats(), no_floats()
        q0, q1, q2, q3 = no_floats(), no_floats(), no_floats(), no_floats()
        for _ in range(taps):
            w0, w1 = weights[place], weights[place + U64(1)]
            w2, w3 = weights[place + U64(2)], weights[place + U64(3)]
            p0, q0 = add_floats(p0, w0, first, i0), add_floats(q0, w0, second, i0)
            p1, q1 = add_floats(p1, w1, first, i1), add_floats(q1, w1, second, i1)
            p2, q2 = add_floats(p2, w2, first, i2), add_floats(q2, w2, second, i2)
            p3, q3 = add_floats(p3, w3, first, i3), add_floats(q3, w3, second, i3)
            i0, i1, i2, i3 = i0 + U64(3), i1 + U64(3), i2 + U64(3), i3 + U64(3)
            place += U64(GROUP)
        store_floats(p0, p1, p2, p3, lines[0], x, width)
        store_floats(q0, q1, q2, q3, lines[1], x, width)


@fast_kernel
def clamp_line(line: Any) -> None:
    """Bring back to [0, 1] what a bicubic filter overshoots."""
    for x in range(len(line)):
        line[x] = float_clamped(line[x])


@kernel
def uint8_columns(sources: Any, starts: Any, weights: Any, taps: Any, bits: Any, lines: Any) -> None:
    """As `float_columns`, in integers: (2**(bits - 1) + sum of weight * pixel) >> bits, clamped to [0, 255].

    Source: Pillow, "Resample.c" (`ImagingResampleHorizontal_8bpc`); torch's kernel does the same, columns first.
    """
    half = four_of(np.int32(1 << (bits - 1)))
    first, second = sources[0], sources[1]
    width = U64(len(starts))
    place = U64(0)
    for x in range(U64(0), width, U64(GROUP)):
        i0, i1, i2, i3 = (
            starts[x] * U64(3),
            starts[x + U64(1)] * U64(3),
            starts[x + U64(2)] * U64(3),
            starts[x + U64(3)] * U64(3),
        )
        p0, p1, p2, p3 = half, half, half, half
        q0, q1, q2, q3 = half, half, half, half
        for _ in range(taps):
            w0, w1 = weights[place], weights[place + U64(1)]
            w2, w3 = weights[place + U64(2)], weights[place + U64(3)]
            p0, q0 = add_bytes(p0, w0, first, i0), add_bytes(q0, w0, second, i0)
            p1, q1 = add_bytes(p1, w1, first, i1), add_bytes(q1, w1, second, i1)
            p2, q2 = add_bytes(p2, w2, first, i2), add_bytes(q2, w2, second, i2)
            p3, q3 = add_bytes(p3, w3, first, i3), add_bytes(q3, w3, second, i3)
            i0, i1, i2, i3 = i0 + U64(3), i1 + U64(3), i2 + U64(3), i3 + U64(3)
            place += U64(GROUP)
        store_bytes(p0, p1, p2, p3, np.int32(bits), lines[0], x, width)
        store_bytes(q0, q1, q2, q3, np.int32(bits), lines[1], x, width)


@kernel
def uint8_row(narrow: Any, row: Any, starts: Any, weights: Any, taps: Any, bits: Any, sums: Any, line: Any) -> None:
    """One row of the output from rows that `uint8_columns` has made.

    Args:
        narrow: uint8 (at least region height, 3 * padded output width).
        row: Of the output.
        starts, weights, taps, bits: The table of the rows.
        sums: int32 (3 * padded output width), overwritten.
        line: float32 of that length.
    """
    first = np.int64(starts[row])
    width = len(sums)
    half = np.int32(1 << (bits - 1))
    for x in range(width):
        sums[x] = half
    for tap in range(taps):
        weight = weights[place_of(row, tap, taps)]
        if weight != 0:
            values = narrow[first + tap]
            for x in range(width):
                sums[x] += weight * np.int32(values[x])
    for x in range(width):
        line[x] = F32(max(min(sums[x] >> np.int32(bits), np.int32(255)), np.int32(0)))


# --- colour, on one line of three planes: float32 precision, values in [0, 1] ---


@fast_kernel
def float_clamped(value: Any) -> Any:
    return min(max(value, ZERO), ONE)


@fast_kernel
def float_grey(red: Any, green: Any, blue: Any) -> Any:
    """0.2989 R + 0.587 G + 0.114 B. Source: torchvision's `rgb_to_grayscale`."""
    return RED * red + GREEN * green + BLUE * blue


@fast_kernel
def float_brightness(r: Any, g: Any, b: Any, factor: Any) -> None:
    """clamp(factor * x). Source: torchvision's `adjust_brightness`."""
    for x in range(len(r)):
        r[x], g[x], b[x] = float_clamped(r[x] * factor), float_clamped(g[x] * factor), float_clamped(b[x] * factor)


@fast_kernel
def float_contrast(r: Any, g: Any, b: Any, factor: Any, rest: Any, pivot: Any) -> None:
    """clamp(factor * x + (1 - factor) * mean grey of the image). Source: torchvision's `adjust_contrast`."""
    shift = rest * pivot
    for x in range(len(r)):
        r[x] = float_clamped(r[x] * factor + shift)
        g[x] = float_clamped(g[x] * factor + shift)
        b[x] = float_clamped(b[x] * factor + shift)


@fast_kernel
def float_saturation(r: Any, g: Any, b: Any, factor: Any, rest: Any) -> None:
    """clamp(factor * x + (1 - factor) * grey). Source: torchvision's `adjust_saturation`."""
    for x in range(len(r)):
        grey = rest * float_grey(r[x], g[x], b[x])
        r[x] = float_clamped(r[x] * factor + grey)
        g[x] = float_clamped(g[x] * factor + grey)
        b[x] = float_clamped(b[x] * factor + grey)


@fast_kernel
def hue_to_channel(sixths: Any, largest: Any, spread: Any) -> Any:
    """v - v s clamp(min(k, 4 - k), 0, 1) with k = sixths mod 6: one channel of HSV to RGB without branches.

    Source: the closed form at https://en.wikipedia.org/wiki/HSL_and_HSV#HSV_to_RGB_alternative
    """
    k = sixths - SIX * np.floor(sixths * SIXTH)
    return largest - spread * float_clamped(min(k, FOUR - k))


@fast_kernel
def float_hue(r: Any, g: Any, b: Any, turns: Any) -> None:
    """Turn the hue of HSV by a fraction of a turn. Source: torchvision's `adjust_hue`."""
    shift = SIX * turns
    for x in range(len(r)):
        red, green, blue = r[x], g[x], b[x]
        largest = max(max(red, green), blue)
        spread = largest - min(min(red, green), blue)
        per_spread = ONE / (spread if spread > ZERO else ONE)
        if largest == red:
            hue = (green - blue) * per_spread
        elif largest == green:
            hue = (blue - red) * per_spread + TWO
        else:
            hue = (red - green) * per_spread + FOUR
        hue += shift
        r[x] = hue_to_channel(hue + FIVE, largest, spread)
        g[x] = hue_to_channel(hue + THREE, largest, spread)
        b[x] = hue_to_channel(hue + ONE, largest, spread)


@fast_kernel
def float_colour(line: Any, width: Any, colours: Any, pivot: Any) -> None:
    """Colour operations, one after another, on one line.

    Args:
        line: float32 (3 * padded width).
        width: Of the output.
        colours: A `Colours`.
        pivot: Mean grey, for contrast.
    """
    padded = len(line) // 3
    r, g, b = line[:width], line[padded : padded + width], line[2 * padded : 2 * padded + width]
    for number in range(len(colours.operations)):
        operation, factor, rest = colours.operations[number], colours.factors[number], colours.rests[number]
        if operation == BRIGHTNESS:
            float_brightness(r, g, b, factor)
        elif operation == CONTRAST:
            float_contrast(r, g, b, factor, rest, pivot)
        elif operation == SATURATION:
            float_saturation(r, g, b, factor, rest)
        elif operation == HUE:
            float_hue(r, g, b, factor)
        else:  # GREY
            float_saturation(r, g, b, ZERO, ONE)


@fast_kernel
def float_grey_sum(line: Any, width: Any) -> Any:
    """The sum of the grey values of a line."""
    padded = len(line) // 3
    r, g, b = line[:width], line[padded : padded + width], line[2 * padded : 2 * padded + width]
    total = ZERO
    for x in range(width):
        total += float_grey(r[x], g[x], b[x])
    return np.float64(total)


# --- colour, on one line of three planes: uint8 precision, whole numbers in [0, 255] held as float32 ---
#
# torch's `a.add_(b, alpha=c)` is one fused multiply-add where the CPU has it.


@kernel
def uint8_floored(value: Any) -> Any:
    """What `clamp_(0, 255).to(torch.uint8)` makes of a float."""
    return np.floor(min(max(value, ZERO), MAX_U8))


@kernel
def uint8_grey(red: Any, green: Any, blue: Any) -> Any:
    """`float_grey`, as torch computes it for uint8 tensors, rounded down."""
    return np.floor(fused(blue, BLUE, fused(green, GREEN, red * RED)))


@kernel
def uint8_brightness(r: Any, g: Any, b: Any, factor: Any) -> None:
    for x in range(len(r)):
        r[x], g[x], b[x] = uint8_floored(r[x] * factor), uint8_floored(g[x] * factor), uint8_floored(b[x] * factor)


@kernel
def uint8_contrast(r: Any, g: Any, b: Any, factor: Any, rest: Any, pivot: Any) -> None:
    for x in range(len(r)):
        r[x] = uint8_floored(fused(pivot, rest, r[x] * factor))
        g[x] = uint8_floored(fused(pivot, rest, g[x] * factor))
        b[x] = uint8_floored(fused(pivot, rest, b[x] * factor))


@kernel
def uint8_saturation(r: Any, g: Any, b: Any, factor: Any, rest: Any) -> None:
    for x in range(len(r)):
        grey = uint8_grey(r[x], g[x], b[x])
        r[x] = uint8_floored(fused(grey, rest, r[x] * factor))
        g[x] = uint8_floored(fused(grey, rest, g[x] * factor))
        b[x] = uint8_floored(fused(grey, rest, b[x] * factor))


@kernel
def uint8_level(value: Any) -> Any:
    """[0, 1] to uint8, as torchvision's `to_dtype_image` with scale=True."""
    return np.floor(min(max(value, ZERO), ONE) * LEVELS)


@kernel
def uint8_hue(r: Any, g: Any, b: Any, turns: Any) -> None:
    """torchvision's `_rgb_to_hsv`, the shift and `_hsv_to_rgb`, operation by operation."""
    for x in range(len(r)):
        red, green, blue = r[x] * PER_LEVEL, g[x] * PER_LEVEL, b[x] * PER_LEVEL
        largest = max(max(red, green), blue)
        smallest = min(min(red, green), blue)
        grey = largest == smallest
        spread = largest - smallest
        saturation = spread / (ONE if grey else largest)
        divisor = ONE if grey else spread
        rc, gc, bc = (largest - red) / divisor, (largest - green) / divisor, (largest - blue) / divisor
        if largest == red:
            hue = bc - gc
        elif largest == green:
            hue = (rc + TWO) - bc
        else:
            hue = (gc + FOUR) - rc
        hue = hue * SIXTH + ONE
        hue = hue - np.floor(hue)  # fmod(hue, 1), as it is positive
        hue = hue + turns
        hue = hue - ONE if hue >= ONE else (hue + ONE if hue < ZERO else hue)  # remainder(hue, 1)
        sixths = hue * SIX
        sextant = np.floor(sixths)
        part = sixths - sextant
        rest = ONE - saturation
        product = saturation * part
        q = (ONE - product) * largest
        t = (product + rest) * largest
        p = rest * largest
        v = largest
        if sextant == ONE:
            red, green, blue = q, v, p
        elif sextant == TWO:
            red, green, blue = p, v, t
        elif sextant == THREE:
            red, green, blue = p, q, v
        elif sextant == FOUR:
            red, green, blue = t, p, v
        elif sextant == FIVE:
            red, green, blue = v, p, q
        else:  # 0, and 6 where the remainder was rounded up to 1
            red, green, blue = v, t, p
        r[x], g[x], b[x] = uint8_level(red), uint8_level(green), uint8_level(blue)


@kernel
def uint8_colour(line: Any, width: Any, colours: Any, pivot: Any) -> None:
    """As `float_colour`; there is nothing to clamp."""
    padded = len(line) // 3
    r, g, b = line[:width], line[padded : padded + width], line[2 * padded : 2 * padded + width]
    for number in range(len(colours.operations)):
        operation, factor, rest = colours.operations[number], colours.factors[number], colours.rests[number]
        if operation == BRIGHTNESS:
            uint8_brightness(r, g, b, factor)
        elif operation == CONTRAST:
            uint8_contrast(r, g, b, factor, rest, pivot)
        elif operation == SATURATION:
            uint8_saturation(r, g, b, factor, rest)
        elif operation == HUE:
            uint8_hue(r, g, b, factor)
        else:  # GREY
            uint8_saturation(r, g, b, ZERO, ONE)


@kernel
def uint8_grey_sum(line: Any, width: Any) -> Any:
    padded = len(line) // 3
    r, g, b = line[:width], line[padded : padded + width], line[2 * padded : 2 * padded + width]
    total: Any = 0
    for x in range(width):
        total += np.int32(uint8_grey(r[x], g[x], b[x]))
    return np.float64(total)


# --- normalise and store ---


@kernel
def bfloat16_bits(value: Any) -> Any:
    """float32 to bfloat16, to the nearest, ties to even. There are no NaNs here."""
    bits = bits_of(value)
    return np.uint16((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16))


@kernel
def float16_bits(value: Any) -> Any:
    """float32 to float16, to the nearest, ties to even; above 65,504 infinity. There are no NaNs here.

    Source: IEEE 754 binary16. Numbers below 2**-14 have no implicit bit there: added to 0.5, whose last bit is worth
    2**-24 as theirs is, they are rounded by the addition.
    """
    bits = bits_of(value)
    sign = (bits >> np.uint32(16)) & np.uint32(0x8000)
    size = bits & np.uint32(0x7FFFFFFF)
    normal = (size - np.uint32(112 << 23) + np.uint32(0xFFF) + ((size >> np.uint32(13)) & np.uint32(1))) >> np.uint32(
        13
    )
    small = bits_of(float_of(size) + HALF) - bits_of(HALF)
    found = small if size < np.uint32(113 << 23) else normal
    found = np.uint32(0x7C00) if size >= np.uint32(0x477FF000) else found
    return np.uint16(sign | found)


def as_stored(value: Any, kind: Any, out: Any) -> Any:
    """A float32 as the element type of `out`: itself, or its bits as `kind`, for uint16."""


@extending.overload(as_stored, strict=False)
def _as_stored(value: Any, kind: Any, out: Any) -> Any:
    if out.dtype == types.float32:
        return lambda value, kind, out: value
    return lambda value, kind, out: bfloat16_bits(value) if kind == BFLOAT16 else float16_bits(value)


@kernel
def store(line: Any, width: Any, target: Any, row: Any, height: Any) -> None:
    """One line of three planes to its row of an image.

    Args:
        line: float32 (3 * padded width).
        width: Of the output.
        target: A `Target`.
        row, height: Which row, of how many.
    """
    out, kind = target.out, target.kind
    padded = len(line) // 3
    r, g, b = line[:width], line[padded : padded + width], line[2 * padded : 2 * padded + width]
    if target.interleaved:
        pixels = out[3 * row * width : 3 * (row + 1) * width]
        for x in range(width):
            pixels[3 * x] = as_stored(r[x], kind, out)
            pixels[3 * x + 1] = as_stored(g[x], kind, out)
            pixels[3 * x + 2] = as_stored(b[x], kind, out)
        return
    for channel, values in enumerate((r, g, b)):
        first = (channel * height + row) * width
        plane = out[first : first + width]
        for x in range(width):
            plane[x] = as_stored(values[x], kind, out)


@fast_kernel
def float_normalise(line: Any, width: Any, target: Any) -> None:
    """(x - mean) / std. Source: torchvision's `normalize`."""
    padded = len(line) // 3
    for channel in range(3):
        values = line[channel * padded : channel * padded + width]
        scale = ONE / target.std[channel]
        shift = -target.mean[channel] * scale
        for x in range(width):
            values[x] = values[x] * scale + shift


@kernel
def uint8_normalise(line: Any, width: Any, target: Any) -> None:
    """(x / 255 - mean) / std, rounded where torchvision's `to_dtype` and `normalize` round."""
    padded = len(line) // 3
    for channel in range(3):
        values = line[channel * padded : channel * padded + width]
        mean, std = target.mean[channel], target.std[channel]
        for x in range(width):
            values[x] = (values[x] * PER_LEVEL - mean) / std


# --- the whole image ---


@kernel
def copy(values: Any, target: Any) -> None:
    """target[x] = values[x]. Slice assignment in numba checks for overlap, and took three times as long."""
    for x in range(len(values)):
        target[x] = values[x]


class Colours(NamedTuple):
    """Colour operations, one after another.

    Attributes:
        operations: int64 (n,): `BRIGHTNESS` and so on.
        factors: float32 (n,): a factor, or turns for `HUE`.
        rests: float32 (n,): 1 - factor.
    """

    operations: npt.NDArray[np.int64]
    factors: npt.NDArray[np.float32]
    rests: npt.NDArray[np.float32]


class FloatScratch(NamedTuple):
    """Memory that `float_render` works in, its contents arbitrary but finite.

    Attributes:
        row_starts, row_weights, column_starts, column_weights: Tables, see `float_taps`.
        sources: float32 (2, 3 * (region width + column taps) + 1).
        lines: float32 (2, 3 * padded width).
        planes: float32 (height, 3 * padded width).
    """

    row_starts: npt.NDArray[np.uint64]
    row_weights: npt.NDArray[np.float32]
    column_starts: npt.NDArray[np.uint64]
    column_weights: npt.NDArray[np.float32]
    sources: npt.NDArray[np.float32]
    lines: npt.NDArray[np.float32]
    planes: npt.NDArray[np.float32]


class Uint8Scratch(NamedTuple):
    """As `FloatScratch`, for `uint8_render`.

    Attributes:
        row_starts, row_weights, column_starts, column_weights: Tables, see `uint8_taps`.
        sources: uint8 (2, 3 * (region width + column taps) + 1).
        narrow: uint8 (region height + 1, 3 * padded width).
        sums: int32 (3 * padded width).
        line: float32 (3 * padded width).
        planes: uint8 (height, 3 * padded width).
    """

    row_starts: npt.NDArray[np.uint64]
    row_weights: npt.NDArray[np.int32]
    column_starts: npt.NDArray[np.uint64]
    column_weights: npt.NDArray[np.int32]
    sources: npt.NDArray[np.uint8]
    narrow: npt.NDArray[np.uint8]
    sums: npt.NDArray[np.int32]
    line: npt.NDArray[np.float32]
    planes: npt.NDArray[np.uint8]


class Target(NamedTuple):
    """Where an image goes, and how.

    Attributes:
        out: float32 or uint16 (3 * height * width).
        kind: What a uint16 holds: `FLOAT16` or `BFLOAT16`.
        interleaved: Pixels instead of planes.
        mean, std: float32 (3,), for pixels in [0, 1].
    """

    out: npt.NDArray[Any]
    kind: int
    interleaved: bool
    mean: npt.NDArray[np.float32]
    std: npt.NDArray[np.float32]


@long_entry
def float_render(
    pixels: Any,
    region: Any,
    rows: Any,
    columns: Any,
    bicubic: Any,
    colours: Any,
    pivot: Any,
    scratch: Any,
    target: Any,
    first_pass: Any,
    last_pass: Any,
    summing: Any,
) -> Any:
    """All rows of an image, or one pass over them.

    Args:
        pixels: uint8 (height, 3 * width): decoded pixels.
        region: (top, left, height, width) of what is used of them, in pixels.
        rows, columns: An `Axis` each.
        bicubic: The filter.
        colours: `Colours` of this pass.
        pivot: float32: the mean grey that a contrast step among them turns around.
        scratch: A `FloatScratch`.
        target: A `Target`.
        first_pass: Begin with the pixels; else with what the pass before left in `scratch.planes`.
        last_pass: Normalise and write to the target; else leave the rows in `scratch.planes`.
        summing: Add up the grey values after this pass, which is not the last.

    Returns:
        The sum.
    """
    width = columns.length
    if first_pass:
        # Pixels become [0, 1] here, for nothing.
        float_taps(rows, bicubic, 1.0 / 255.0, scratch.row_starts, scratch.row_weights)
        float_taps(columns, bicubic, 1.0, scratch.column_starts, scratch.column_weights)
    total = 0.0
    for pair in range(0, rows.length, 2):
        members = range(pair, min(pair + 2, rows.length))
        if first_pass:
            for row in members:
                source = scratch.sources[row - pair]
                float_row(pixels, region, row, scratch.row_starts, scratch.row_weights, rows.taps, source)
            float_columns(scratch.sources, scratch.column_starts, scratch.column_weights, columns.taps, scratch.lines)
        for row in members:
            line = scratch.lines[row - pair]
            if not first_pass:
                copy(scratch.planes[row], line)
            elif bicubic:
                clamp_line(line)
            float_colour(line, width, colours, pivot)
            if last_pass:
                float_normalise(line, width, target)
                store(line, width, target, row, rows.length)
            else:
                copy(line, scratch.planes[row])
                if summing:
                    total += float_grey_sum(line, width)
    return total


@long_entry
def uint8_render(
    pixels: Any,
    region: Any,
    rows: Any,
    columns: Any,
    bicubic: Any,
    colours: Any,
    pivot: Any,
    scratch: Any,
    target: Any,
    first_pass: Any,
    last_pass: Any,
    summing: Any,
) -> Any:
    """As `float_render`, for uint8 precision and with a `Uint8Scratch`.

    Returns:
        The sum of the grey values, exact: a whole number.
    """
    width, line = columns.length, scratch.line
    row_bits = 0
    if first_pass:
        row_bits = uint8_taps(rows, bicubic, scratch.row_starts, scratch.row_weights)
        column_bits = uint8_taps(columns, bicubic, scratch.column_starts, scratch.column_weights)
        top, left, tall, wide = region
        for pair in range(0, tall, 2):
            for row in range(pair, min(pair + 2, tall)):
                copy(pixels[top + row, 3 * left : 3 * (left + wide)], scratch.sources[row - pair])
            uint8_columns(
                scratch.sources,
                scratch.column_starts,
                scratch.column_weights,
                columns.taps,
                column_bits,
                scratch.narrow[pair : pair + 2],
            )
    total = 0.0
    for row in range(rows.length):
        if first_pass:
            uint8_row(
                scratch.narrow, row, scratch.row_starts, scratch.row_weights, rows.taps, row_bits, scratch.sums, line
            )
        else:
            copy(scratch.planes[row], line)
        uint8_colour(line, width, colours, pivot)
        if last_pass:
            uint8_normalise(line, width, target)
            store(line, width, target, row, rows.length)
        else:
            copy(line, scratch.planes[row])
            if summing:
                total += uint8_grey_sum(line, width)
    return total


# --- where it runs ---


def cpu_name() -> str:
    """The kind of CPU that numba compiles for."""
    return str(binding.get_host_cpu_name())


def cache_directory() -> Path | None:
    """Where compiled kernels are kept; None where no directory is writable."""
    found = float_render.stats.cache_path  # type: ignore[attr-defined]
    return None if found is None else Path(found)
