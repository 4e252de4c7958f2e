"""Images a second on a GPU: the exact pipeline, DALI's own, decoding alone, and a DataLoader on all cores.

"native" is DALI's own random crop, resize, flip and normalisation behind the same decoder with the same settings; its
pixels are not torchvision's. "engine" lets the GPU's JPEG engines decode all that they can; without it the CUDA decoder
does. "nearest" leaves out jpeg_fancy_upsampling, which gpupipe never does. Then the exact pipeline runs on, and GPU
memory is looked at.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from gpu.common import Setup, native, run_through
from harness import interleaved

import gpupipe as gp
from gpupipe.measure.peers import PEERS, Work

EXACT, NATIVE, DECODE, NEAREST = "exact", "native", "decode only", "decode only, nearest"
HOST, LOADER = "exact, decode on the host", "DataLoader"
ENGINE = ", engine"
WARM_SHARE = 10


def exact(at: Setup, stack: ExitStack, **options: Any) -> gp.Loader:
    """The loader, with its pipeline built."""
    loader = gp.Loader(
        at.folder,
        gp.Recipe.train(),
        batch_size=at.batch,
        shuffle=True,
        backend="dali",
        device=str(at.device),
        options=gp.Options(**({"threads": at.workers} | options)),
    )
    stack.callback(loader.close)
    next(iter(loader))
    return loader


def dataloader(at: Setup, stack: ExitStack) -> Callable[[], None]:
    """torchvision and Pillow in as many processes as there are cores; its batches go to the device, pinned or not."""
    source = gp.open_source(at.folder)
    stack.callback(source.close)
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(0)).tolist()
    epochs = PEERS["torchvision"](Work(source, order, gp.Recipe.train(), at.batch, at.workers), stack)

    def run() -> None:
        for images, _ in epochs:
            images.to(at.device)
        at.synchronize()

    return run


def measure(at: Setup) -> dict[str, Any]:
    with ExitStack() as stack:
        loaders = {
            EXACT: exact(at, stack),
            EXACT + ENGINE: exact(at, stack, decode="hardware"),
            HOST: exact(at, stack, decode="cpu"),
        }
        functions: dict[str, Callable[[], object]] = {
            name: lambda loader=loader: run_through(loader, at.synchronize) for name, loader in loaders.items()
        }
        for engine, suffix in ((0.0, ""), (1.0, ENGINE)):
            functions[NATIVE + suffix] = native(at, train=True, engine=engine)
            functions[DECODE + suffix] = native(at, train=False, engine=engine)
            functions[NEAREST + suffix] = native(at, train=False, engine=engine, fancy=False)
        functions[LOADER] = dataloader(at, stack)
        times = interleaved(functions, at.rounds)
        images = len(at.paths())
        speeds = {name: images / each["median_s"] for name, each in times.items()}
        growth_mb = memory_growth_mb(at, loaders[EXACT])
    return {
        "images": images,
        "batch_size": at.batch,
        "workers": at.workers,
        "images_per_s": speeds,
        "ratios": {
            "exact to native": speeds[EXACT] / speeds[NATIVE],
            "exact to native, engine": speeds[EXACT + ENGINE] / speeds[NATIVE + ENGINE],
            "exact to decode only": speeds[EXACT] / speeds[DECODE],
            "exact to decode only, engine": speeds[EXACT + ENGINE] / speeds[DECODE + ENGINE],
            "exact to DataLoader": speeds[EXACT] / speeds[LOADER],
            "host decode to DataLoader": speeds[HOST] / speeds[LOADER],
        },
        "fancy_upsampling_cost_percent": 100 * (speeds[NEAREST] / speeds[DECODE] - 1),
        "fancy_upsampling_cost_percent, engine": 100 * (speeds[NEAREST + ENGINE] / speeds[DECODE + ENGINE] - 1),
        "memory_growth_mb": growth_mb,
        "memory_batches": at.batches,
        "times": times,
    }


def memory_growth_mb(at: Setup, loader: gp.Loader) -> float | None:
    """What all batches but the first tenth took of the GPU's memory and did not give back; None without a GPU."""
    free: list[int] = []
    count = 0
    while count < at.batches:
        for _ in loader:
            count += 1
            if at.on_gpu and count == at.batches // WARM_SHARE:
                at.synchronize()
                free.append(torch.cuda.mem_get_info(at.device)[0])
            if count == at.batches:
                break
    if not at.on_gpu:
        return None
    at.synchronize()
    return (free[0] - torch.cuda.mem_get_info(at.device)[0]) / 1e6
