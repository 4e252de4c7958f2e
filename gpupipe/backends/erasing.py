"""RandomErasing on finished images, wherever they are."""

from __future__ import annotations

import torch

from gpupipe.records import ErasingRows


def erase(image: torch.Tensor, step: ErasingRows, row: int) -> None:
    """Overwrite a box of one normalised image, in place.

    Args:
        image: (3, height, width) of any float type, on any device.
        step: With the parameters in this `row`.
        row: See `step`.
    """
    top, left, height, width = step.box[row].tolist()
    if height == 0:
        return
    if step.value is None:
        raise NotImplementedError
    box = image[:, top : top + height, left : left + width]
    box.copy_(torch.from_numpy(step.value[row]).view(3, 1, 1).to(image.device).expand_as(box))
