"""A ResNet-50 training step in bf16 fed by the loader, against the same step on one synthetic batch.

What the loader costs is what the step takes longer: it has to hide behind the step. All ways to decode are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from gpu.common import Setup
from gpu.throughput import ENGINE
from harness import interleaved
from torch import nn
from torchvision.models import resnet50

import gpupipe as gp
from gpupipe.backends.base import Decode

WAYS: dict[str, Decode] = {
    "decode on the GPU": "gpu",
    "decode on the GPU" + ENGINE: "hardware",
    "decode on the host": "cpu",
}
SYNTHETIC = "synthetic"


def training(at: Setup) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """One step of SGD with momentum, channels last, bf16 autocast."""
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    model = resnet50(num_classes=1000).to(at.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loss_of = nn.CrossEntropyLoss()

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        with torch.autocast(at.device.type, dtype=torch.bfloat16):
            loss = loss_of(model(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def forever(loader: gp.Loader) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    while True:
        yield from loader


def measure(at: Setup) -> dict[str, Any]:
    recipe = gp.Recipe.train(output=gp.Output(memory_format="channels_last"))
    step = training(at)
    images = torch.randn(at.batch, 3, 224, 224, device=at.device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (at.batch,), device=at.device)

    def synthetic() -> None:
        for _ in range(at.steps):
            step(images, labels)
        at.synchronize()

    functions: dict[str, Callable[[], object]] = {SYNTHETIC: synthetic}
    with ExitStack() as stack:
        for name, decode in WAYS.items():
            loader = gp.Loader(
                at.folder,
                recipe,
                batch_size=at.batch,
                shuffle=True,
                drop_last=True,
                backend="dali",
                device=str(at.device),
                options=gp.Options(threads=at.workers, decode=decode),
            )
            stack.callback(loader.close)
            next(iter(loader))
            batches = forever(loader)

            def fed(batches: Iterator[tuple[torch.Tensor, torch.Tensor]] = batches) -> None:
                for _ in range(at.steps):
                    step(*next(batches))
                at.synchronize()

            functions[name] = fed
        times = interleaved(functions, at.rounds)
    ratios = {name: times[name]["median_s"] / times[SYNTHETIC]["median_s"] for name in WAYS}
    return {
        "batch_size": at.batch,
        "steps": at.steps,
        "images_per_s": {name: at.batch * at.steps / each["median_s"] for name, each in times.items()},
        "over_synthetic": ratios,
        # gpupipe's default, whatever the others are.
        "loader_over_synthetic": ratios["decode on the GPU"],
        "times": times,
    }
