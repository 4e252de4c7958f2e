"""The arithmetic of operations in the numba backend: tones, sharpness, blur, flips and affine maps of a whole picture.

A picture is its rows, one after another: (height, 3 x padded width), red, green and blue of each row side by side, as
`kernels.float_render` and `kernels.uint8_render` keep it in `planes`. float32 in [0, 1], or uint8.

All but blur and sharpness in float32 precision do operation by operation what torch does, in its order and with its
multiply-adds, so that uint8 pictures come out bit for bit and thresholds fall to the same side. What torch does was
found by comparing bits; `gpupipe.backends.numba_cpu.exact` compares them again on each kind of machine.

From `kernels` come only decorators and intrinsics: the cache on disk looks at this file, not at that one.
"""

# ruff: noqa: ARG001, ARG005
# numba takes positional arguments only, and an overload's Python arguments are there to choose by type.

from __future__ import annotations

from typing import Any

import numpy as np
from numba import extending, types

from gpupipe.backends.numba_cpu.kernels import F32, U64, fast_kernel, fused, kernel, long_entry

ZERO, ONE, FOUR, HALF, THIRTEENTH = map(F32, (0, 1, 4, 0.5, 1 / 13))
MAX_U8 = F32(255)
PER_LEVEL = F32(1 / 255)
LEVELS = F32(255 + 1.0 - 1e-3)  # see kernels.LEVELS

# Adding and subtracting it rounds to the nearest whole number, ties to even, for numbers below 2**22.
ROUNDER = F32(1.5 * 2**23)

# Two ways to add up a blur are closer to each other than this, in levels; 2e-4 was the most found.
BLUR_ERROR = F32(1e-3)


@kernel
def clamped(value: Any, most: Any) -> Any:
    return min(max(value, ZERO), most)


@kernel
def nearest(value: Any) -> Any:
    return (value + ROUNDER) - ROUNDER


def like(value: Any, picture: Any) -> Any:
    """A float32 as an element of the picture: itself, or rounded to uint8."""


@extending.overload(like, strict=False)
def _like(value: Any, picture: Any) -> Any:
    if picture.dtype == types.float32:
        return lambda value, picture: value
    return lambda value, picture: np.uint8(nearest(value))


# --- tones: each number by itself, and what its channel is like ---


@long_entry
def float_invert(picture: Any) -> None:
    """1 - x. Source: torchvision's `invert`."""
    for row in range(len(picture)):
        line = picture[row]
        for x in range(len(line)):
            line[x] = ONE - line[x]


@long_entry
def float_solarize(picture: Any, threshold: Any) -> None:
    """1 - x from the threshold on. Source: torchvision's `solarize`."""
    for row in range(len(picture)):
        line = picture[row]
        for x in range(len(line)):
            line[x] = ONE - line[x] if line[x] >= threshold else line[x]


@long_entry
def float_posterize(picture: Any, levels: Any) -> None:
    """One of so many levels. Source: torchvision's `posterize`."""
    most, size = levels - ONE, ONE / levels
    for row in range(len(picture)):
        line = picture[row]
        for x in range(len(line)):
            line[x] = clamped(np.floor(line[x] * levels), most) * size


@fast_kernel
def float_extremes(line: Any) -> Any:
    low, high = line[0], line[0]
    for x in range(len(line)):
        low, high = min(low, line[x]), max(high, line[x])
    return low, high


@long_entry
def float_autocontrast(picture: Any, width: Any) -> None:
    """Each channel stretched to [0, 1]. Source: torchvision's `autocontrast`."""
    padded = picture.shape[1] // 3
    for channel in range(3):
        first = channel * padded
        low, high = picture[0, first], picture[0, first]
        for row in range(len(picture)):
            lowest, highest = float_extremes(picture[row, first : first + width])
            low, high = min(low, lowest), max(high, highest)
        if low == high:
            continue
        spread = high - low
        for row in range(len(picture)):
            line = picture[row, first : first + width]
            for x in range(width):
                line[x] = clamped((line[x] - low) / spread, ONE)


@kernel
def count_levels(line: Any, counts: Any) -> None:
    """Count the levels of a line of uint8.

    Args:
        line: uint8 (n,).
        counts: int32 (4, 256). Four tables, because neighbours are alike: counting in one, each waits for the last.
    """
    whole = len(line) // 4 * 4
    for x in range(U64(0), U64(whole), U64(4)):
        counts[0, line[x]] += 1
        counts[1, line[x + U64(1)]] += 1
        counts[2, line[x + U64(2)]] += 1
        counts[3, line[x + U64(3)]] += 1
    for x in range(whole, len(line)):
        counts[0, line[x]] += 1


@kernel
def equalizing(counts: Any, total: Any, table: Any) -> None:
    """Which level each level becomes, so that all come about equally often.

    Args:
        counts: int32 (4, 256).
        total: How many numbers were counted.
        table: uint8 (256,), is written.

    Source: torchvision's `equalize`, and Pillow's ImageOps.equalize, which it follows.
    """
    brightest = 0
    for level in range(256):
        if counts[0, level] + counts[1, level] + counts[2, level] + counts[3, level] > 0:
            brightest = level
    of_brightest = counts[0, brightest] + counts[1, brightest] + counts[2, brightest] + counts[3, brightest]
    step = (total - of_brightest) // 255
    below = 0
    for level in range(256):
        if step == 0:
            table[level] = level
            continue
        table[level] = min((below + step // 2) // step, 255) if level > 0 else 0
        below += counts[0, level] + counts[1, level] + counts[2, level] + counts[3, level]


@kernel
def look_up(line: Any, table: Any) -> None:
    for x in range(len(line)):
        line[x] = table[line[x]]


@long_entry
def float_equalize(picture: Any, levels: Any, width: Any) -> None:
    """As `uint8_equalize` of the levels that torchvision makes of floats.

    Args:
        picture: float32.
        levels: uint8 of its shape, overwritten.
        width: Of the picture in pixels.
    """
    padded = picture.shape[1] // 3
    table = np.empty(256, np.uint8)
    for channel in range(3):
        first = channel * padded
        counts = np.zeros((4, 256), np.int32)
        for row in range(len(picture)):
            line, whole = picture[row, first : first + width], levels[row, first : first + width]
            for x in range(width):
                whole[x] = np.uint8(clamped(line[x] * LEVELS, MAX_U8))
            count_levels(whole, counts)
        equalizing(counts, len(picture) * width, table)
        for row in range(len(picture)):
            line, whole = picture[row, first : first + width], levels[row, first : first + width]
            look_up(whole, table)
            for x in range(width):
                line[x] = F32(whole[x]) * PER_LEVEL


@long_entry
def uint8_equalize(picture: Any, width: Any) -> None:
    """Levels about equally often, in each channel. Source: torchvision's `equalize`."""
    padded = picture.shape[1] // 3
    table = np.empty(256, np.uint8)
    for channel in range(3):
        first = channel * padded
        counts = np.zeros((4, 256), np.int32)
        for row in range(len(picture)):
            count_levels(picture[row, first : first + width], counts)
        equalizing(counts, len(picture) * width, table)
        for row in range(len(picture)):
            look_up(picture[row, first : first + width], table)


@long_entry
def uint8_invert(picture: Any) -> None:
    """255 - x."""
    for row in range(len(picture)):
        line = picture[row]
        for x in range(len(line)):
            line[x] = ~line[x]


@long_entry
def uint8_solarize(picture: Any, threshold: Any) -> None:
    """255 - x from the threshold on.

    Args:
        picture: uint8.
        threshold: int64, rounded up.
    """
    for row in range(len(picture)):
        line = picture[row]
        for x in range(len(line)):
            line[x] = ~line[x] if line[x] >= threshold else line[x]


@long_entry
def uint8_posterize(picture: Any, mask: Any) -> None:
    """Only some of the bits.

    Args:
        picture: uint8.
        mask: uint8.
    """
    for row in range(len(picture)):
        line = picture[row]
        for x in range(len(line)):
            line[x] &= mask


@kernel
def uint8_extremes(line: Any) -> Any:
    low, high = line[0], line[0]
    for x in range(len(line)):
        low, high = min(low, line[x]), max(high, line[x])
    return low, high


@long_entry
def uint8_autocontrast(picture: Any, width: Any) -> None:
    """Each channel stretched to [0, 255], rounded down. Source: torchvision's `autocontrast`."""
    padded = picture.shape[1] // 3
    for channel in range(3):
        first = channel * padded
        low, high = picture[0, first], picture[0, first]
        for row in range(len(picture)):
            lowest, highest = uint8_extremes(picture[row, first : first + width])
            low, high = min(low, lowest), max(high, highest)
        if low == high:
            continue
        per_level = (F32(high) - F32(low)) * PER_LEVEL
        for row in range(len(picture)):
            line = picture[row, first : first + width]
            for x in range(width):
                line[x] = np.uint8(clamped((F32(line[x]) - F32(low)) / per_level, MAX_U8))


# --- neighbours ---


@kernel
def add_nine(above: Any, line: Any, below: Any, columns: Any, sums: Any) -> None:
    """Sums of 3 x 3 numbers around all but the first and the last of a row.

    Args:
        above, line, below: (n,): three rows.
        columns: float32 (n,), overwritten.
        sums: float32 (n - 2,), is written.
    """
    for x in range(len(columns)):
        columns[x] = F32(above[x]) + F32(line[x]) + F32(below[x])
    before, middle, behind = columns[:-2], columns[1:-1], columns[2:]
    for x in range(len(sums)):
        sums[x] = before[x] + middle[x] + behind[x]


def sharpen(line: Any, sums: Any, rest: Any, found: Any) -> None:
    """x + (1 - factor) (soft - x), from sums of 3 x 3."""


@fast_kernel
def float_sharpen(line: Any, sums: Any, rest: Any, found: Any) -> None:
    for x in range(len(sums)):
        soft = (sums[x] + FOUR * line[x]) * THIRTEENTH
        found[x] = clamped(line[x] + rest * (soft - line[x]), ONE)


@kernel
def uint8_sharpen(line: Any, sums: Any, rest: Any, found: Any) -> None:
    """torch rounds the soft picture, which lies 1/26 from a tie at least, so that any way of adding up gives it."""
    for x in range(len(sums)):
        value = F32(line[x])
        soft = np.floor((sums[x] + FOUR * value) * THIRTEENTH + HALF)
        found[x] = np.uint8(clamped(fused(soft - value, rest, value), MAX_U8))


@extending.overload(sharpen, strict=False)
def _sharpen(line: Any, sums: Any, rest: Any, found: Any) -> Any:
    chosen = float_sharpen if line.dtype == types.float32 else uint8_sharpen
    return lambda line, sums, rest, found: chosen(line, sums, rest, found)


@long_entry
def sharpness(picture: Any, found: Any, width: Any, rest: Any) -> None:
    """x + (1 - factor) (soft - x), soft being the mean of 3 x 3 with 5 of 13 parts in the middle; edges stay.

    Args:
        picture: float32 or uint8.
        found: Of its shape, is written.
        width: Of the picture in pixels; it and the height are at least 3.
        rest: float32: 1 - factor.

    Source: torchvision's `adjust_sharpness`.
    """
    height, padded = len(picture), picture.shape[1] // 3
    columns, sums = np.zeros(width, np.float32), np.zeros(width - 2, np.float32)
    for row in range(height):
        for channel in range(3):
            first = channel * padded
            last = first + width
            line, target = picture[row, first:last], found[row, first:last]
            for x in range(width):
                target[x] = line[x]
            if 0 < row < height - 1:
                add_nine(picture[row - 1, first:last], line, picture[row + 1, first:last], columns, sums)
                sharpen(line[1:-1], sums, rest, target[1:-1])


@kernel
def reflected(position: Any, length: Any) -> Any:
    """A place outside as the one inside that it mirrors, the edge itself not repeated."""
    inside = -position if position < 0 else position
    return 2 * (length - 1) - inside if inside >= length else inside


@fast_kernel
def blurred_column(picture: Any, row: Any, weights: Any, line: Any) -> None:
    """The weighted sum of the rows around one.

    Args:
        picture: float32 or uint8.
        row: The one in the middle.
        weights: float32 (k,), k odd.
        line: float32 (3 * padded width), is written.
    """
    reach = len(weights) // 2
    for tap in range(len(weights)):
        values, weight = picture[reflected(row + tap - reach, len(picture))], weights[tap]
        if tap == 0:
            for x in range(len(line)):
                line[x] = weight * F32(values[x])
        else:
            for x in range(len(line)):
                line[x] += weight * F32(values[x])


@fast_kernel
def blurred_row(line: Any, weights: Any, wide: Any, sums: Any) -> None:
    """The weighted sum of the numbers around each one.

    Args:
        line: float32 (width,).
        weights: float32 (k,), k odd.
        wide: float32 (width + k - 1), overwritten.
        sums: float32 (width,), is written.
    """
    width, reach = len(line), len(weights) // 2
    for x in range(reach):
        wide[x] = line[reflected(x - reach, width)]
        wide[reach + width + x] = line[reflected(width + x, width)]
    for x in range(width):
        wide[reach + x] = line[x]
        sums[x] = weights[reach] * line[x]
    for tap in range(reach):  # both sides have the same weights
        before, behind, weight = wide[tap:], wide[2 * reach - tap :], weights[tap]
        for x in range(width):
            sums[x] += weight * (before[x] + behind[x])


@kernel
def blurred_exactly(picture: Any, row: Any, x: Any, first: Any, width: Any, kernel_2d: Any) -> Any:
    """One number of a blur as torch's convolution adds it up: row by row, each time a fused multiply-add."""
    up, left = kernel_2d.shape[0] // 2, kernel_2d.shape[1] // 2
    inside = x >= left and x + left < width
    total = ZERO
    for i in range(kernel_2d.shape[0]):
        values = picture[reflected(row + i - up, len(picture)), first : first + width]
        for j in range(kernel_2d.shape[1]):
            place = x + j - left
            total = fused(F32(values[U64(place if inside else reflected(place, width))]), kernel_2d[i, j], total)
    return total


@long_entry
def float_blur(picture: Any, found: Any, width: Any, down: Any, along: Any) -> None:
    """A Gaussian blur, the edges mirrored.

    Args:
        picture: float32; larger than half the kernel.
        found: Of its shape, is written.
        width: Of the picture in pixels.
        down, along: float32 (k,) each, k odd: the weights of rows and of columns, symmetric.

    Source: torchvision's `gaussian_blur`, which multiplies with all of kernel x kernel weights.
    """
    padded = picture.shape[1] // 3
    line = np.zeros(picture.shape[1], np.float32)
    wide = np.zeros(width + len(along) - 1, np.float32)
    for row in range(len(picture)):
        blurred_column(picture, row, down, line)
        for channel in range(3):
            first = channel * padded
            blurred_row(line[first : first + width], along, wide, found[row, first : first + width])


@long_entry
def uint8_blur(picture: Any, found: Any, width: Any, down: Any, along: Any, kernel_2d: Any) -> None:
    """As `float_blur`, rounded as torch rounds: where a sum is close to a tie, it is made again in torch's way.

    Args:
        picture, found, width, down, along: See there; uint8.
        kernel_2d: float32 (k, k): the weights that torch multiplies with.
    """
    padded = picture.shape[1] // 3
    line = np.zeros(picture.shape[1], np.float32)
    wide, sums = np.zeros(width + len(along) - 1, np.float32), np.zeros(width, np.float32)
    for row in range(len(picture)):
        blurred_column(picture, row, down, line)
        for channel in range(3):
            first = channel * padded
            target = found[row, first : first + width]
            blurred_row(line[first : first + width], along, wide, sums)
            close = False
            for x in range(width):
                target[x] = np.uint8(nearest(sums[x]))
                close |= abs(abs(sums[x] - nearest(sums[x])) - HALF) < BLUR_ERROR
            if not close:
                continue
            for x in range(width):
                if abs(abs(sums[x] - nearest(sums[x])) - HALF) < BLUR_ERROR:
                    target[x] = np.uint8(nearest(blurred_exactly(picture, row, x, first, width, kernel_2d)))


# --- places ---


@long_entry
def flip(picture: Any, found: Any, width: Any, horizontally: Any) -> None:
    """Mirror left and right, or else top and bottom.

    Args:
        picture: float32 or uint8.
        found: Of its shape, is written.
        width: Of the picture in pixels.
        horizontally: Which.
    """
    height, padded = len(picture), picture.shape[1] // 3
    for row in range(height):
        if not horizontally:
            line, target = picture[height - 1 - row], found[row]
            for x in range(len(line)):
                target[x] = line[x]
            continue
        for channel in range(3):
            first = channel * padded
            line, target = picture[row, first : first + width], found[row, first : first + width]
            last = U64(width - 1)
            for x in range(U64(0), U64(width)):
                target[x] = line[last - x]


@kernel
def source_places(row: Any, height: Any, width: Any, theta: Any, xs: Any, ys: Any) -> None:
    """Where the pixels of a row of the output come from, in pixels of the input.

    Args:
        row: Of the output.
        height, width: In pixels; together at least 67 pixels, because torch multiplies smaller matrices otherwise.
        theta: float32 (3, 2): places from the centre, times this, are x and y in [-1, 1].
        xs, ys: float32 (width,), are written.

    Source: torchvision's `_affine_grid`; ATen/native/cpu/GridSamplerKernel.cpp with align_corners=False.
    """
    half_width, half_height = F32(width * 0.5), F32(height * 0.5)
    y = F32(row - (height - 1) * 0.5)
    x_of_x, x_of_y, x_shift = theta[0, 0], theta[1, 0], theta[2, 0]
    y_of_x, y_of_y, y_shift = theta[0, 1], theta[1, 1], theta[2, 1]
    first = F32((1 - width) * 0.5)
    for column in range(width):
        x = F32(column) + first
        xs[column] = fused(fused(y, x_of_y, x * x_of_x) + x_shift + ONE, half_width, -HALF)
        ys[column] = fused(fused(y, y_of_y, x * y_of_x) + y_shift + ONE, half_height, -HALF)


@long_entry
def nearest_affine(picture: Any, found: Any, width: Any, theta: Any, fill: Any) -> None:
    """Each pixel from the nearest one of where it comes from.

    Args:
        picture: float32 or uint8.
        found: Of its shape, is written.
        width: Of the picture in pixels.
        theta: See `source_places`.
        fill: (3,) of the picture's type: what comes in from outside.

    Source: see `source_places`; nearest means to the nearest, ties to even.
    """
    height, padded = len(picture), picture.shape[1] // 3
    flat, length = picture.reshape(-1), picture.shape[1]
    xs, ys = np.zeros(width, np.float32), np.zeros(width, np.float32)
    places = np.zeros(width, np.int32)
    last_x, last_y = F32(width - 1), F32(height - 1)
    for row in range(height):
        source_places(row, height, width, theta, xs, ys)
        outside = False
        for x in range(width):
            column, line = nearest(xs[x]), nearest(ys[x])
            inside = column >= ZERO and column <= last_x and line >= ZERO and line <= last_y
            column, line = clamped(column, last_x), clamped(line, last_y)
            place = np.int32(line) * np.int32(length) + np.int32(column)
            places[x] = place if inside else np.int32(-1)
            outside |= not inside
        for channel in range(3):
            target = found[row, channel * padded : channel * padded + width]
            plane = flat[channel * padded :]
            if outside:
                for x in range(width):
                    target[x] = plane[places[x]] if places[x] >= 0 else fill[channel]
            else:
                for x in range(width):
                    target[x] = plane[U64(places[x])]


@long_entry
def bilinear_affine(picture: Any, found: Any, width: Any, theta: Any, fill: Any, filled: Any) -> None:
    """Each pixel from the four around where it comes from.

    Args:
        picture: float32 or uint8.
        found: Of its shape, is written.
        width: Of the picture in pixels.
        theta: See `source_places`.
        fill: float32 (3,), in the picture's units: what comes in from outside.
        filled: Whether it does; else black does, in torchvision's other way.

    Source: see `source_places`; torchvision's `_apply_grid_transform`.
    """
    height, padded = len(picture), picture.shape[1] // 3
    flat, length = picture.reshape(-1), picture.shape[1]
    xs, ys = np.zeros(width, np.float32), np.zeros(width, np.float32)
    places = np.zeros((4, width), np.int32)
    weights = np.zeros((4, width), np.float32)
    shares = np.zeros(width, np.float32)
    last_x, last_y = F32(width - 1), F32(height - 1)
    for row in range(height):
        source_places(row, height, width, theta, xs, ys)
        for x in range(width):
            left, top = np.floor(xs[x]), np.floor(ys[x])
            to_right, to_bottom = xs[x] - left, ys[x] - top
            to_left, to_top = ONE - to_right, ONE - to_bottom
            right, bottom = left + ONE, top + ONE
            # A neighbour outside counts as 0: here by its weight, which leaves the same sum.
            in_left = left >= ZERO and left <= last_x
            in_right = right >= ZERO and right <= last_x
            in_top = top >= ZERO and top <= last_y
            in_bottom = bottom >= ZERO and bottom <= last_y
            weights[0, x] = to_left * to_top if in_left and in_top else ZERO
            weights[1, x] = to_right * to_top if in_right and in_top else ZERO
            weights[2, x] = to_left * to_bottom if in_left and in_bottom else ZERO
            weights[3, x] = to_right * to_bottom if in_right and in_bottom else ZERO
            shares[x] = ((weights[0, x] + weights[1, x]) + weights[2, x]) + weights[3, x]
            first, last = np.int32(clamped(left, last_x)), np.int32(clamped(right, last_x))
            above = np.int32(clamped(top, last_y)) * np.int32(length)
            below = np.int32(clamped(bottom, last_y)) * np.int32(length)
            places[0, x], places[1, x] = above + first, above + last
            places[2, x], places[3, x] = below + first, below + last
        for channel in range(3):
            target = found[row, channel * padded : channel * padded + width]
            plane = flat[channel * padded :]
            for x in range(width):
                value = F32(plane[U64(places[0, x])]) * weights[0, x]
                value = fused(F32(plane[U64(places[1, x])]), weights[1, x], value)
                value = fused(F32(plane[U64(places[2, x])]), weights[2, x], value)
                value = fused(F32(plane[U64(places[3, x])]), weights[3, x], value)
                if filled:
                    value = (value - fill[channel]) * shares[x] + fill[channel]
                target[x] = like(value, picture)
