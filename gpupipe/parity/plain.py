"""The pipeline that people run today: stock torchvision operators on PIL images or on uint8 tensors.

It applies the same plans, so that what is left between it and a backend is arithmetic and not luck.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from PIL import Image, ImageOps

from gpupipe.backends.base import Applied
from gpupipe.errors import DecodeError
from gpupipe.headers import Header, name_record
from gpupipe.parity.tolerances import Kind
from gpupipe.pillow import use_image
from gpupipe.recipe import Recipe
from gpupipe.records import Plan, Record

if TYPE_CHECKING:
    import torch


class PlainBackend:
    """A `Backend` of nothing but `torchvision.transforms.v2.functional`; works in the caller's thread.

    Args:
        recipe: What to do. Its precision is not looked at: PIL images and uint8 tensors decide that themselves.
        kind: "PIL" keeps a PIL image until normalisation, as `ImageFolder` with `ToTensor` does; "uint8" makes a
            tensor of it first.
    """

    def __init__(self, recipe: Recipe, kind: Kind) -> None:
        self.recipe, self.kind = recipe, kind

    @property
    def name(self) -> str:
        return f"torchvision on {self.kind}"

    def submit(
        self,
        records: Sequence[Record],
        headers: Sequence[Header],  # noqa: ARG002 - the protocol's; Pillow reads them again
        plan: Plan,
    ) -> Future[Applied]:
        """See `Backend.submit`; the future is already done."""
        import torch

        images, errors = [], {}
        for row, record in enumerate(records):
            try:
                images.append(self._one(record, plan, row))
            except DecodeError as error:
                images.append(torch.zeros(3, *plan.size))
                errors[row] = name_record(error, record)
        output = self.recipe.output
        layout = torch.channels_last if output.memory_format == "channels_last" else torch.contiguous_format
        batch = torch.stack(images).to(getattr(torch, output.dtype), memory_format=layout)
        future: Future[Applied] = Future()
        future.set_result(Applied(batch, errors))
        return future

    def close(self) -> None:
        """Nothing to free."""

    def _one(self, record: Record, plan: Plan, row: int) -> torch.Tensor:
        import torch
        from torchvision.transforms import InterpolationMode
        from torchvision.transforms.v2 import functional as F

        from gpupipe.backends.erasing import erase
        from gpupipe.backends.operators import apply_step

        image: Any = use_image(record.data, _rgb if self.recipe.exif == "ignore" else _upright_rgb)
        if self.kind == "uint8":
            image = F.pil_to_tensor(image)
        image = F.crop(image, *plan.box[row].tolist())
        resized = plan.resized[row].tolist()
        if resized != plan.box[row, 2:].tolist():
            mode = InterpolationMode(self.recipe.interpolation)
            image = F.resize(image, resized, interpolation=mode, antialias=True)
        if resized != list(plan.size) or plan.window[row].any():
            image = F.crop(image, *plan.window[row].tolist(), *plan.size)
        if plan.flip[row, 0]:
            image = F.horizontal_flip(image)
        if plan.flip[row, 1]:
            image = F.vertical_flip(image)
        for step in (*plan.colour, *plan.operations):
            image = apply_step(image, step, row)
        tensor = F.to_dtype(F.to_image(image), torch.float32, scale=True)
        normalize = self.recipe.normalize
        tensor = torch.as_tensor(F.normalize(tensor, list(normalize.mean), list(normalize.std)))
        for erasing in plan.erasing:
            erase(tensor, erasing, row)
        return tensor


def _rgb(opened: Image.Image) -> Image.Image:
    return opened.convert("RGB")


def _upright_rgb(opened: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(opened).convert("RGB")
