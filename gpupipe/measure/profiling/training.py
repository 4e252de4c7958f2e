"""Training steps to measure with: those of the user, or a ResNet's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gpupipe.errors import ConfigError

TrainingStep = Callable[[Any], object]
"""Takes a batch, and trains on it."""

NAMES = ("resnet18", "resnet50")


def training_step(step: str | TrainingStep | None, device: Any) -> TrainingStep | None:
    """The step itself, from what the user gave.

    Args:
        step: A callable, the name of a network, or None.
        device: Where a named network trains: with bfloat16 autocast on a GPU, in float32 on a CPU.

    Raises:
        ConfigError: An unknown name.
    """
    if step is None or callable(step):
        return step
    if step not in NAMES:
        raise ConfigError(
            f"step={step!r} is not valid: it must be one of {', '.join(map(repr, NAMES))}, or a callable that takes a "
            "batch and trains on it",
            field="step",
            value=step,
            allowed=NAMES,
        )
    return _resnet(step, device)


def _resnet(name: str, device: Any) -> TrainingStep:
    import torch
    from torchvision import models

    model = getattr(models, name)(weights=None).to(device)
    if device.type == "cuda":
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    classes = model.fc.out_features

    def step(batch: Any) -> None:
        images, labels = batch[0], batch[1]
        images = images.to(device, non_blocking=True)
        # Any labels will do; those of the data set may be none, or soft.
        targets = torch.as_tensor(labels).reshape(len(images), -1)[:, 0].to(device, torch.int64) % classes
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = torch.nn.functional.cross_entropy(model(images), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def synchronize(device: Any) -> None:
    """Wait until a GPU has done what was asked of it."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
