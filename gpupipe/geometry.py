"""Where the pixels of an image went, so that boxes and points can follow them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError
from gpupipe.records import Operation, OperationRows, Plan

if TYPE_CHECKING:
    import torch


def affines(plan: Plan) -> npt.NDArray[np.float32]:
    """From places in the original image to places in the output: the field "affine" of a Loader.

    Args:
        plan: n rows.

    Returns:
        float32 (n, 2, 3): x and y in the output are ``matrix @ (x, y, 1)``, in pixels from the top left corner of the
        image as the plan's box counts them (upright, with exif="apply"). Operations that move pixels (turns, shears,
        shifts, flips) are in it; functions of people's own and mixing are not.
    """
    top, left, height, width = plan.box.T.astype(np.float64)
    found = np.zeros((len(plan), 2, 3))
    for axis, (first, length, side) in enumerate(((left, width, 1), (top, height, 0))):
        scale = plan.resized[:, side] / length
        shift = -first * scale - plan.window[:, side]
        flipped = plan.flip[:, axis]
        found[:, axis, axis] = np.where(flipped, -scale, scale)
        found[:, axis, 2] = np.where(flipped, plan.size[side] - shift, shift)
    for step in plan.operations:
        if isinstance(step, OperationRows):
            moved = np.isin(step.operation, _MOVING)
            if moved.any():
                linear, shift = _moves(step.take(np.flatnonzero(moved)), plan.size)
                found[moved] = linear @ found[moved]
                found[moved, :, 2] += shift
    return found.astype(np.float32)


_MOVING = (Operation.ROTATE, Operation.AFFINE, Operation.HORIZONTAL_FLIP, Operation.VERTICAL_FLIP)


def _moves(step: OperationRows, size: tuple[int, int]) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Where operations that move pixels put the places of a picture of (height, width).

    Returns:
        float64 (n, 2, 2) and (n, 2): a place (x, y) goes to ``linear @ place + shift``.

    Source: torchvision.transforms.v2.functional._geometry, `_get_inverse_affine_matrix`, which this is the inverse of.
    """
    height, width = size
    angle, right, down, scale, shear_x, shear_y, x, y = step.parameters.T.copy()
    turned = step.operation == Operation.ROTATE  # (angle, x, y) counter-clockwise, and AFFINE is clockwise
    x[turned], y[turned] = right[turned], down[turned]
    angle[turned] *= -1
    right[turned] = down[turned] = 0
    scale[turned] = 1
    turn, along_x, along_y = np.radians((angle, shear_x, shear_y))
    across, up = np.cos(turn - along_y) / np.cos(along_y), np.sin(turn - along_y) / np.cos(along_y)
    linear = np.empty((len(step.operation), 2, 2))
    linear[:, 0, 0], linear[:, 0, 1] = across, -across * np.tan(along_x) - np.sin(turn)
    linear[:, 1, 0], linear[:, 1, 1] = up, -up * np.tan(along_x) + np.cos(turn)
    linear *= scale[:, None, None]
    about = np.stack([x, y], axis=1)
    shift = about + np.stack([right, down], axis=1) - (linear @ about[:, :, None])[:, :, 0]
    for operation, axis, side in ((Operation.HORIZONTAL_FLIP, 0, width), (Operation.VERTICAL_FLIP, 1, height)):
        flipped = step.operation == operation
        linear[flipped], shift[flipped] = np.eye(2), 0
        linear[flipped, axis, axis], shift[flipped, axis] = -1, side
    return linear, shift


def transform_boxes(
    boxes: torch.Tensor,
    affine: torch.Tensor,
    *,
    offsets: torch.Tensor | None = None,
    size: tuple[int, int] | None = None,
) -> torch.Tensor:
    """Let boxes follow the pixels of their images through crop, resize, flips, turns and shears.

    A box that was turned becomes the smallest upright one around it.

    Args:
        boxes: x1, y1, x2, y2 in pixels of the original image (upright, with exif="apply"): (n, k, 4), as `Pad` makes
            them, or (total, 4) with `offsets`, as `Ragged` does.
        affine: float32 (n, 2, 3): the field "affine" of the same batch. It means nothing for rows that are not valid
            because on_error="ignore" put zeros in their place.
        offsets: int64 (n + 1,).
        size: (height, width) of the output, to cut boxes at its edges: those that are outside then have no area.
            None: they stay as they are.

    Returns:
        x1, y1, x2, y2 in pixels of the output, of the same shape; in the boxes' dtype where that is a float, else
        float32.

    Raises:
        ConfigError: Shapes that do not fit together.

    Source: torchvision.transforms.v2.functional: crop, resize and flips of BoundingBoxes.

    >>> import torch
    >>> half = torch.tensor([[[0.5, 0.0, -10.0], [0.0, 0.5, 0.0]]])
    >>> transform_boxes(torch.tensor([[[10, 20, 60, 40]]]), half, size=(224, 224)).tolist()
    [[[0.0, 10.0, 20.0, 20.0]]]
    """
    import torch

    rows = len(affine)
    fits = boxes.ndim == 3 and len(boxes) == rows if offsets is None else boxes.ndim == 2 and len(offsets) == rows + 1
    if boxes.shape[-1:] != (4,) or affine.shape[1:] != (2, 3) or not fits:
        shapes = tuple(None if each is None else tuple(each.shape) for each in (boxes, affine, offsets))
        raise ConfigError(
            f"boxes of shape {shapes[0]}, affine of shape {shapes[1]} and offsets of shape {shapes[2]} do not fit: "
            "they must be (n, k, 4) and (n, 2, 3), or with offsets (total, 4), (n, 2, 3) and (n + 1,)",
            field="boxes",
            value=shapes,
            allowed="(n, k, 4), (n, 2, 3) or (total, 4), (n, 2, 3), (n + 1,)",
        )
    if offsets is None:
        each = affine[:, None]
    else:
        of_image = torch.arange(rows, device=affine.device).repeat_interleave(offsets.diff(), output_size=len(boxes))
        each = affine[of_image]
    x1, y1, x2, y2 = boxes.to(torch.float32).unbind(-1)
    corners = torch.stack([torch.stack(corner, -1) for corner in ((x1, y1), (x2, y1), (x1, y2), (x2, y2))], -2)
    corners = corners @ each[..., :2].transpose(-1, -2) + each[..., None, :, 2]
    found = torch.cat([corners.amin(dim=-2), corners.amax(dim=-2)], dim=-1)
    if size is not None:
        limits = (size[1], size[0], size[1], size[0])
        found = torch.stack(
            [side.clamp(0, limit) for side, limit in zip(found.unbind(-1), limits, strict=True)], dim=-1
        )
    return found.to(boxes.dtype) if boxes.dtype.is_floating_point else found
