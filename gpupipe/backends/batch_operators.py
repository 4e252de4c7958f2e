"""Operations on a whole batch at once, in torch, on whatever device the batch is.

Rows are grouped by what is to be done to them, and a group is one call with a number for each row: on a GPU, a call for
each row would cost more than its pixels. TrivialAugmentWide on 256 small images is 116 calls, RandAugment 230.
Everything is element by element or a reduction of one image, never a convolution or a matrix product: those round
differently with the size of the batch, and on a GPU to TF32 where the user allows that. So a row's pixels do not depend
on the rows beside it.

The arithmetic is that of torchvision's functions, in their order of operations where that decides how uint8 pixels
round. This module does not import torchvision.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.nn.functional import grid_sample, pad

from gpupipe.records import ColourRows, GreyRows, JitterRows, Operation, OperationRows

Tensor = torch.Tensor
F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Ints = npt.NDArray[np.intp]

Kernel = Callable[[Tensor, Tensor], Tensor]
"""Images (m, 3, height, width) and float32 numbers (m, k) to images of the same type and shape."""

_LEVELS = 255
# Source of the luma weights and the factor to uint8: torchvision.transforms.v2.functional
_GREY = (0.2989, 0.587, 0.114)
_TO_UINT8 = _LEVELS + 1 - 1e-3

# How much of a group is worked on at a time, as float32: it bounds the temporaries (some ten times this much). On a CPU
# an image or two stay in its cache; on a GPU as many launches as would cover 55 images of 224 x 224.
_CPU_BYTES, _GPU_BYTES = 1 << 20, 32 << 20


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows to which the same is done.

    Attributes:
        kernel: What.
        rows: Which rows of the batch, (m,).
        values: float32 (m, k): its numbers for each of them.
    """

    kernel: Kernel
    rows: Ints
    values: F32


def apply_operations(images: Tensor, steps: Sequence[ColourRows | OperationRows]) -> None:
    """What operations, and colour steps among them, do to a batch; in place.

    Args:
        images: float32 in [0, 1] or uint8, (n, 3, height, width), on any device. On a CUDA device all work is queued
            on the current stream.
        steps: With n rows each.

    Parity:
        Against `gpupipe.backends.operators` on a CPU. uint8: bit-identical, but for a Gaussian blur, whose sum is
        made in another order (1 level, fewer than 1 pixel in 1,000). float32: 0.001/255; where an operation has a
        threshold, the same decision for all but 1 pixel in 1,000.

    Source: torchvision.transforms.v2.functional
    """
    height, width = images.shape[2:]
    groups = [group for step in steps for group in _groups(step, height, width)]
    if not groups:
        return
    # Two transfers for all groups.
    rows = torch.from_numpy(np.concatenate([group.rows for group in groups])).to(images.device)
    values = torch.from_numpy(np.concatenate([group.values.ravel() for group in groups])).to(images.device)
    at_once = max(1, (_CPU_BYTES if images.device.type == "cpu" else _GPU_BYTES) // (4 * images[0].numel()))
    row, value = 0, 0
    for group in groups:
        count, numbers = group.values.shape
        of_group = values[value : value + count * numbers].view(count, numbers)
        for first in range(0, count, at_once):
            last = min(first + at_once, count)
            which = rows[row + first : row + last]
            images.index_copy_(0, which, group.kernel(images.index_select(0, which), of_group[first:last]))
        row, value = row + count, value + count * numbers


def _groups(step: ColourRows | OperationRows, height: int, width: int) -> Iterator[_Group]:
    """The groups of one step, in the order in which they have to be done."""
    if isinstance(step, GreyRows):
        yield from _some(_grey_picture, step.apply, np.zeros((len(step.apply), 0)))
    elif isinstance(step, JitterRows):
        for operation in step.order.T:
            for number, (kernel, numbers) in enumerate(_JITTER):
                if step.used[number]:
                    yield from _some(kernel, step.apply & (operation == number), numbers(step.factors[:, number]))
    else:
        for operation in np.unique(step.operation).tolist():
            if operation != Operation.NONE:
                kernel, values = _operation(Operation(operation), step, height, width)
                yield from _some(kernel, step.operation == operation, values)


def _some(kernel: Kernel, which: npt.NDArray[np.bool_], values: F64) -> Iterator[_Group]:
    if which.any():
        yield _Group(kernel, np.flatnonzero(which), values[which].astype(np.float32))


def _operation(operation: Operation, step: OperationRows, height: int, width: int) -> tuple[Kernel, F64]:
    """The kernel of an operation, and its numbers for all rows, of which those of other operations do not count."""
    given = step.parameters
    match operation:
        case Operation.BRIGHTNESS:
            return _brightness, given[:, :1]
        case Operation.CONTRAST:
            return _contrast, _weights(given[:, 0])
        case Operation.SATURATION:
            return _saturation, _weights(given[:, 0])
        case Operation.SHARPNESS:
            return _sharpness, 1 - given[:, :1]
        case Operation.POSTERIZE:
            return _posterize, np.exp2(given[:, :1])
        case Operation.SOLARIZE:
            # For uint8 and for floats; the former rounded as in `gpupipe.backends.operators`.
            return _solarize, np.stack([np.round(_LEVELS * given[:, 0], 6), given[:, 0]], axis=1)
        case Operation.BLUR:
            return partial(_blur, kernel_size=step.kernel_size), _blur_weights(given[:, 0], step.kernel_size)
        case Operation.ROTATE:
            still = np.zeros_like(given[:, 0])
            # Its angles count the other way round.
            moves = (-(given[:, 0] % 360), still, still, still + 1, still, still, given[:, 1], given[:, 2])
            return _sampling(step), _affine_matrices(moves, height, width)
        case Operation.AFFINE:
            return _sampling(step), _affine_matrices(given.T, height, width)
        case Operation.BORDER:
            return partial(_border, mode=step.padding_mode, fill=step.fill), given[:, :4]
    return _WITHOUT_NUMBERS[operation], given[:, :0]


# Colours


def _per_image(values: Tensor, column: int) -> Tensor:
    """(m, 1, 1, 1)."""
    return values[:, column].view(-1, 1, 1, 1)


def _white(images: Tensor) -> int:
    return _LEVELS if images.dtype == torch.uint8 else 1


def _unit(images: Tensor) -> Tensor:
    """Floats in [0, 1]."""
    return images if images.is_floating_point() else images.float().mul_(1 / _LEVELS)


def _like(result: Tensor, images: Tensor) -> Tensor:
    """Floats in [0, 1] as what the images are."""
    return result if images.is_floating_point() else result.mul(_TO_UINT8).to(torch.uint8)


def _grey(images: Tensor) -> Tensor:
    """float32 (m, 1, height, width), not rounded."""
    red, green, blue = images[:, :1], images[:, 1:2], images[:, 2:]
    grey: Tensor = red.mul(_GREY[0]).add_(green, alpha=_GREY[1]).add_(blue, alpha=_GREY[2])
    return grey


def _whole_grey(images: Tensor) -> Tensor:
    """Rounded down where the images are uint8."""
    grey = _grey(images)
    return grey if images.is_floating_point() else grey.floor_()


def _grey_picture(images: Tensor, values: Tensor) -> Tensor:  # noqa: ARG001 - a Kernel
    return _grey(images).to(images.dtype).expand_as(images)


def _weights(factor: F64) -> F64:
    """(m, 2): of the image, and of what it is blended with."""
    return np.stack([factor, 1 - factor], axis=1)


def _blend(images: Tensor, other: Tensor, values: Tensor) -> Tensor:
    # addcmul rounds once, as torch's add with a factor does; a product and a sum would round twice, and truncate to
    # another level in up to 19 % of uint8 pixels.
    mixed = torch.addcmul(images.mul(_per_image(values, 0)), other, _per_image(values, 1))
    return mixed.clamp_(0, _white(images)).to(images.dtype)


def _brightness(images: Tensor, values: Tensor) -> Tensor:
    return images.mul(_per_image(values, 0)).clamp_(0, _white(images)).to(images.dtype)


def _contrast(images: Tensor, values: Tensor) -> Tensor:
    # In float64, because the order of a float32 sum, and so its rounding, would depend on the rows beside it.
    mean = _whole_grey(images).mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64)
    return _blend(images, mean.float(), values)


def _saturation(images: Tensor, values: Tensor) -> Tensor:
    return _blend(images, _whole_grey(images), values)


def _hue(images: Tensor, values: Tensor) -> Tensor:
    """A turn of the hue in HSV, by a share of the circle.

    Source: torchvision.transforms.v2.functional.adjust_hue; Smith, "Color gamut transform pairs", SIGGRAPH 1978.
    """
    pixels = _unit(images)
    low, value = torch.aminmax(pixels, dim=1, keepdim=True)
    span = value - low
    is_grey = span == 0
    saturation = span / torch.where(is_grey, 1.0, value)
    # How far each channel is below the largest, in shares of the range.
    below = (value - pixels) / torch.where(is_grey, 1.0, span)
    red, green, blue = below[:, :1], below[:, 1:2], below[:, 2:]
    is_red, is_green = pixels[:, :1] == value, pixels[:, 1:2] == value
    sixths = torch.where(is_red, blue - green, torch.where(is_green, red + 2 - blue, green + 4 - red))
    turned = (sixths.mul(1 / 6) + 1).fmod_(1).add_(_per_image(values, 0)).remainder_(1).mul_(6)
    sector = turned.floor()
    rising = turned.sub_(sector).mul_(saturation)
    falling = (1 - rising).mul_(value).clamp_(0, 1)
    lowest = 1 - saturation
    rising = rising.add_(lowest).mul_(value).clamp_(0, 1)
    lowest = lowest.mul_(value).clamp_(0, 1)
    # Green and blue do what red does, a third and two thirds of the circle later.
    delay = torch.tensor([0, 2, 4], dtype=torch.float32, device=images.device).view(1, 3, 1, 1)
    place = (sector - delay).remainder_(6)
    found = torch.where(place == 1, falling, torch.where(place == 4, rising, lowest))
    return _like(torch.where((place == 0) | (place == 5), value, found), images)


def _sharpness(images: Tensor, values: Tensor) -> Tensor:
    """Away from, or towards, the image smoothed by a kernel of 1 around 5, all inside of the outermost pixels.

    Source: torchvision.transforms.v2.functional.adjust_sharpness
    """
    if min(images.shape[2:]) <= 2:
        return images
    result = images.to(torch.float32, copy=True)
    inside = result[..., 1:-1, 1:-1]
    columns = result[..., :-2, :] + result[..., 1:-1, :] + result[..., 2:, :]
    box = columns[..., :-2] + columns[..., 1:-1] + columns[..., 2:]
    smooth = box.add_(inside, alpha=4).div_(13)
    if images.dtype == torch.uint8:
        smooth.round_()
    inside.addcmul_(smooth.sub_(inside), _per_image(values, 0))
    return result.clamp_(0, _white(images)).to(images.dtype)


# Tones


def _posterize(images: Tensor, values: Tensor) -> Tensor:
    levels = _per_image(values, 0)
    if images.dtype == torch.uint8:
        return images & (_LEVELS + 1 - (_LEVELS + 1) / levels).to(torch.uint8)
    return torch.minimum(images.mul(levels).floor_(), levels - 1).div_(levels)


def _invert(images: Tensor, values: Tensor) -> Tensor:  # noqa: ARG001 - a Kernel
    return _white(images) - images


def _solarize(images: Tensor, values: Tensor) -> Tensor:
    threshold = _per_image(values, 0 if images.dtype == torch.uint8 else 1)
    return torch.where(images >= threshold, _white(images) - images, images)


def _autocontrast(images: Tensor, values: Tensor) -> Tensor:  # noqa: ARG001 - a Kernel
    white = _white(images)
    low, high = images.amin(dim=(2, 3), keepdim=True).float(), images.amax(dim=(2, 3), keepdim=True).float()
    flat = low == high
    scale = torch.where(flat, 1.0, (high - low).mul_(1 / white))
    return images.sub(torch.where(flat, 0.0, low)).div_(scale).clamp_(0, white).to(images.dtype)


def _equalize(images: Tensor, values: Tensor) -> Tensor:  # noqa: ARG001 - a Kernel
    """A table for each channel that makes its histogram even.

    Source: torchvision.transforms.v2.functional.equalize, which follows Pillow's ImageOps.equalize.
    """
    level = (images if images.dtype == torch.uint8 else images.mul(_TO_UINT8).to(torch.uint8)).flatten(2).long()
    histogram = torch.zeros(*level.shape[:2], _LEVELS + 1, dtype=torch.int32, device=images.device)
    histogram.scatter_add_(2, level, torch.ones(1, dtype=torch.int32, device=images.device).expand_as(level))
    brightest = histogram.gather(2, level.amax(dim=2, keepdim=True))
    step = (level.shape[2] - brightest).div(_LEVELS, rounding_mode="floor")
    below = histogram.cumsum(2) - histogram
    table = (below + step // 2).div_(step.clamp(min=1), rounding_mode="floor").clamp_(0, _LEVELS)
    table = torch.where(step == 0, torch.arange(_LEVELS + 1, device=images.device), table).to(torch.uint8)
    even = table.gather(2, level).view_as(images)
    return even if images.dtype == torch.uint8 else _unit(even)


# Neighbours


def _blur_weights(sigma: F64, kernel_size: tuple[int, int]) -> F64:
    """(m, height + width): the weights of a column and of a row."""
    return np.concatenate([_gaussian(side, sigma) for side in kernel_size], axis=1)


def _gaussian(side: int, sigma: F64) -> F64:
    """(m, side); they sum to 1."""
    offset = np.arange(side) - (side - 1) / 2
    with np.errstate(divide="ignore", over="ignore"):  # rows of other operations, with a sigma of 0
        weight = np.exp(-0.5 * (offset / np.where(sigma > 0, sigma, 1.0)[:, None]) ** 2)
    found: F64 = weight / weight.sum(axis=1, keepdims=True)
    return found


def _blur(images: Tensor, values: Tensor, *, kernel_size: tuple[int, int]) -> Tensor:
    """Rows, then columns, weight by weight."""
    height, width = kernel_size
    down, right = height // 2, width // 2
    pixels = pad(images.float(), [right, right, down, down], mode="reflect")
    pixels = _weighted(pixels, values[:, height:], dim=3)
    pixels = _weighted(pixels, values[:, :height], dim=2)
    return pixels.round_().to(torch.uint8) if images.dtype == torch.uint8 else pixels


def _weighted(pixels: Tensor, weights: Tensor, dim: int) -> Tensor:
    side = pixels.shape[dim] - weights.shape[1] + 1
    total = pixels.narrow(dim, 0, side) * _per_image(weights, 0)
    for tap in range(1, weights.shape[1]):
        total.addcmul_(pixels.narrow(dim, tap, side), _per_image(weights, tap))
    return total


# Places


def _horizontal_flip(images: Tensor, values: Tensor) -> Tensor:  # noqa: ARG001 - a Kernel
    return images.flip(3)


def _vertical_flip(images: Tensor, values: Tensor) -> Tensor:  # noqa: ARG001 - a Kernel
    return images.flip(2)


def _affine_matrices(moves: Sequence[F64] | F64, height: int, width: int) -> F64:
    """From where in the image an output pixel comes.

    Args:
        moves: Columns (m,) as the parameters of `Operation.AFFINE`.
        height, width: Of the image in pixels.

    Returns:
        (m, 6): the two rows of the inverse map, for pixels counted from the centre, in halves of the image's sides;
        rounded to float32 before and after that division, as torchvision does.

    Source: torchvision.transforms.v2.functional.affine
    """
    angle, right, down, scale, shear_x, shear_y, center_x, center_y = moves
    turn, along_x, along_y = np.radians(angle), np.radians(shear_x), np.radians(shear_y)
    scale = np.where(scale > 0, scale, 1.0)  # rows of other operations
    # The map is shift * centre * turn * scale * shear * (back from the centre).
    a, c = np.cos(turn - along_y) / np.cos(along_y), np.sin(turn - along_y) / np.cos(along_y)
    b, d = -(a * np.tan(along_x) + np.sin(turn)), np.cos(turn) - c * np.tan(along_x)
    x, y = center_x - width * 0.5, center_y - height * 0.5
    rows = []
    for first, second, center, half in ((d, -b, x, 0.5 * width), (-c, a, y, 0.5 * height)):
        first, second = first / scale, second / scale
        third = center - first * (x + right) - second * (y + down)
        rows += [np.float32(value) / np.float32(half) for value in (first, second, third)]
    found: F64 = np.stack(rows, axis=1).astype(np.float64)
    return found


def _sampling(step: OperationRows) -> Kernel:
    # Nearest pixels outside are 0 already: no mask is needed for black.
    fill = None if step.interpolation == "nearest" and step.fill == (0.0, 0.0, 0.0) else step.fill
    return partial(_sampled, interpolation=step.interpolation, fill=fill)


def _sampled(
    images: Tensor,
    values: Tensor,
    *,
    interpolation: Literal["nearest", "bilinear"],
    fill: tuple[float, float, float] | None,
) -> Tensor:
    """The images as an affine map sees them.

    Source: torchvision.transforms.v2.functional.affine
    """
    pixels = images.float()
    height, width = images.shape[2:]
    if fill is not None:
        pixels = torch.cat([pixels, pixels.new_ones(1, 1, height, width).expand(len(images), -1, -1, -1)], dim=1)
    x, y = (torch.arange(side, dtype=torch.float32, device=images.device) - (side - 1) / 2 for side in (width, height))
    y = y.unsqueeze(1)
    numbers = values.view(-1, 6, 1, 1).unbind(1)
    # In this order of operations it is what torchvision's matrix product gives.
    grid = torch.stack([torch.addcmul(x * first, y, second) + third for first, second, third in _threes(numbers)], 3)
    pixels = grid_sample(pixels, grid, mode=interpolation, padding_mode="zeros", align_corners=False)
    if fill is not None:
        pixels, mask = pixels[:, :3], pixels[:, 3:]
        colour = _colour(fill, images)
        if interpolation == "nearest":
            pixels = torch.where(mask < 0.5, colour, pixels)
        else:
            pixels = (pixels - colour).mul_(mask).add_(colour)
    return pixels.round().to(torch.uint8) if images.dtype == torch.uint8 else pixels


def _threes(numbers: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    return numbers[:3], numbers[3:]


def _colour(fill: tuple[float, float, float], images: Tensor) -> Tensor:
    """float32 (1, 3, 1, 1) in the units of the images; levels rounded as in `gpupipe.backends.operators`."""
    channels = [round(_LEVELS * value, 6) for value in fill] if images.dtype == torch.uint8 else list(fill)
    return torch.tensor(channels, dtype=torch.float32, device=images.device).view(1, 3, 1, 1)


def _border(images: Tensor, values: Tensor, *, mode: str, fill: tuple[float, float, float] | None) -> Tensor:
    """The part of each image that is its picture, and around it what is made from that."""
    corners = values.long()
    height, width = images.shape[2:]
    rows, above = _sources(corners[:, 0], corners[:, 2], height, mode)
    columns, beside = _sources(corners[:, 1], corners[:, 3], width, mode)
    found = images.gather(2, rows.view(-1, 1, height, 1).expand_as(images))
    found = found.gather(3, columns.view(-1, 1, 1, width).expand_as(images))
    if mode != "constant":
        return found
    outside = above.view(-1, 1, height, 1) | beside.view(-1, 1, 1, width)
    return torch.where(outside, _colour(fill or (0.0, 0.0, 0.0), images).to(images.dtype), found)


def _sources(first: Tensor, count: Tensor, side: int, mode: str) -> tuple[Tensor, Tensor]:
    """Where each of `side` pixels comes from, (m, side); and whether it is outside of the `count` from `first` on."""
    first, last = first.unsqueeze(1), (count - 1).clamp(min=0).unsqueeze(1)
    place = torch.arange(side, device=count.device) - first
    outside = (place < 0) | (place >= count.unsqueeze(1))
    if mode == "reflect":
        place = place.abs()
        place = last - (last - place).abs()
    elif mode == "symmetric":
        place = torch.where(place < 0, -1 - place, place)
        place = torch.where(place > last, 2 * last + 1 - place, place)
    return torch.minimum(place.clamp(min=0), last) + first.clamp(max=side - 1), outside


# By the numbering of `JitterRows.order`: the kernel, and its numbers from the factor.
_JITTER: tuple[tuple[Kernel, Callable[[F64], F64]], ...] = (
    (_brightness, lambda factor: factor[:, None]),
    (_contrast, _weights),
    (_saturation, _weights),
    (_hue, lambda turns: turns[:, None]),
)

_WITHOUT_NUMBERS: dict[Operation, Kernel] = {
    Operation.AUTOCONTRAST: _autocontrast,
    Operation.EQUALIZE: _equalize,
    Operation.INVERT: _invert,
    Operation.HORIZONTAL_FLIP: _horizontal_flip,
    Operation.VERTICAL_FLIP: _vertical_flip,
}
