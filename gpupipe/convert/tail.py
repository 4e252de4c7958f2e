"""The end of a transform that no recipe can express, run as it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from gpupipe.errors import ConfigError

# Any, because torchvision's functions are not typed strictly.
F: Any = functional


class Tail:
    """Transforms for one finished image, given as the type that they would find there.

    A function for `SampleFunction`, and a transform.

    Args:
        transforms: In order.
        image: What the image is in front of them: "pil", or the name of a tensor's dtype.
        tv_image: Whether a tensor is a tv_tensors.Image.
        full_range: Whether floats are from 0 to 255.

    Attributes:
        name: What stands for the transforms in the identity of a recipe: what they print, or their classes where they
            print nothing that lasts.
    """

    def __init__(self, transforms: Sequence[object], *, image: str, tv_image: bool, full_range: bool) -> None:
        self.transforms = tuple(transforms)
        self.image, self.tv_image, self.full_range = image, tv_image, full_range
        kind = f"{image}{' 0 to 255' if full_range else ''}{' tv_tensors.Image' if tv_image else ''}"
        self.name = f"tail on {kind}: " + ", ".join(map(_shown, transforms))

    def __call__(self, image: torch.Tensor, generator: torch.Generator | None = None) -> torch.Tensor:  # noqa: ARG002
        """The transforms of one image.

        Args:
            image: float32 (3, height, width): in [0, 1], or normalised where that was done before. Or uint8.
            generator: Not used: draws are keyed by whoever calls this, or come from torch's global generator.

        Raises:
            ConfigError: What comes out is no float tensor.
        """
        found: Any = self._entering(image)
        for transform in self.transforms:
            found = cast("Any", transform)(found)
        if not isinstance(found, torch.Tensor) or not found.is_floating_point():
            kind = found.dtype if isinstance(found, torch.Tensor) else type(found).__name__
            raise ConfigError(
                f"the transforms that run as they are end with {kind}, and a batch is of floats: end with ToTensor(), "
                "or with ToImage() and ToDtype(torch.float32, scale=True)",
                field="transform",
                value=[type(transform).__name__ for transform in self.transforms],
                allowed="a float tensor at the end",
            )
        return found.as_subclass(torch.Tensor)

    def _entering(self, image: torch.Tensor) -> Any:
        if self.image in ("pil", "uint8"):
            if image.dtype != torch.uint8:
                image = image.mul(255).round_().to(torch.uint8)
            if self.image == "pil":
                return F.to_pil_image(image)
        else:
            image = image.mul(255) if self.full_range else image
            image = image.to(getattr(torch, self.image))
        return tv_tensors.Image(image) if self.tv_image else image

    def __repr__(self) -> str:
        return f"Tail({self.name})"


def _shown(transform: object) -> str:
    if isinstance(transform, nn.Module) or type(transform).__module__.startswith(("torchvision.", "timm.")):
        shown = " ".join(repr(transform).split())
        if " at 0x" not in shown:
            return shown
    own = transform if hasattr(transform, "__qualname__") else type(transform)
    return f"{own.__module__}.{own.__qualname__}"
