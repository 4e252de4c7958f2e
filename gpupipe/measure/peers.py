"""What people use instead of gpupipe, on the same samples and with the same recipe, as far as it can do that.

Each function returns something to iterate over, once for each epoch, of batches; what it needs is released by the
`ExitStack`. One that cannot run here raises `BackendUnavailable` or `ConfigError`, which say why.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset
from torch.utils.dlpack import from_dlpack
from torchvision.transforms import v2

from gpupipe.convert import to_v2
from gpupipe.errors import BackendUnavailable, ConfigError
from gpupipe.recipe import (
    CenterCrop,
    ColorJitter,
    Normalize,
    RandomHorizontalFlip,
    RandomResizedCrop,
    Recipe,
    Resize,
)
from gpupipe.records import Record
from gpupipe.sources.base import Source

Epochs = Iterable[Any]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be loaded.

    Attributes:
        source: The data set.
        indices: Which samples of it, in this order.
        recipe: What is done to each.
        batch_size: Samples in a batch.
        workers: Processes or threads.
    """

    source: Source
    indices: Sequence[int]
    recipe: Recipe
    batch_size: int
    workers: int


class _Records(Dataset[tuple[Any, Any]]):
    """A source as a torch Dataset of (transformed image, label)."""

    def __init__(self, source: Source, read: Callable[[Any], Any], transform: Callable[[Any], Any]) -> None:
        self._source, self._read, self._transform = source, read, transform

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        record = self._source[index]
        return self._transform(self._read(record.data)), record.label


def pillow(work: Work, stack: ExitStack) -> Epochs:
    """Pillow images, torchvision transforms on them, a DataLoader with worker processes: the yardstick."""
    recipe = work.recipe
    last = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    steps = [to_v2(step) for step in recipe.steps if not isinstance(step, Normalize)]
    return _dataloader(work, _read_pillow, v2.Compose([*steps, *last, *_normalize(recipe)]), stack)


def tensors(work: Work, stack: ExitStack) -> Epochs:
    """torchvision's JPEG decoder and v2 transforms on uint8 tensors, in the same DataLoader."""
    recipe = work.recipe
    steps = [to_v2(step) for step in recipe.steps if not isinstance(step, Normalize)]
    transform = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), *_normalize(recipe)])
    return _dataloader(work, _read_tensor, transform, stack)


def _normalize(recipe: Recipe) -> list[v2.Transform]:
    return [v2.Normalize(list(step.mean), list(step.std)) for step in recipe.steps if isinstance(step, Normalize)]


def _read_pillow(data: Any) -> Any:
    from PIL import Image

    with Image.open(io.BytesIO(data)) as image:
        return image.convert("RGB")


def _read_tensor(data: Any) -> torch.Tensor:
    from torchvision.io import ImageReadMode, decode_image

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchvision announces that its decoders will go
        pixels: torch.Tensor = decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8), ImageReadMode.RGB)
        return pixels


def _dataloader(work: Work, read: Callable[[Any], Any], transform: Any, stack: ExitStack) -> Epochs:
    if any(isinstance(work.source[index].data, np.ndarray) for index in work.indices):
        raise ConfigError(f"it decodes image files, and {work.source.uri} holds pixels", field="source")
    dataset = Subset(_Records(work.source, read, transform), list(work.indices))
    loader: DataLoader[Any] = DataLoader(
        dataset, batch_size=work.batch_size, num_workers=work.workers, persistent_workers=work.workers > 0
    )
    stack.callback(lambda: setattr(loader, "_iterator", None))  # ends the worker processes
    return loader


def dali_native(work: Work, _stack: ExitStack) -> Epochs:
    """DALI's own operators, on the GPU if there is one: its pixels are not torchvision's."""
    try:
        from nvidia import dali
    except Exception as error:
        raise BackendUnavailable(f"nvidia.dali cannot be imported: {error}", missing="nvidia.dali") from error
    files = [work.source[index] for index in work.indices]
    if not all(_is_a_file(record) for record in files):
        raise ConfigError(f"DALI's file reader needs files of their own: {work.source.uri} has none", field="source")
    steps = [step for step in work.recipe.steps if not isinstance(step, Normalize)]
    unknown = [type(step).__name__ for step in steps if not isinstance(step, _NATIVE)]
    if unknown:
        raise ConfigError(f"no operator of DALI is taken for {', '.join(unknown)} here", field="recipe")
    on_gpu = torch.cuda.is_available()
    pipeline = _native_pipeline(work, [str(record.path) for record in files], steps, dali, on_gpu=on_gpu)
    pipeline.build()
    return _NativeEpochs(pipeline, -(-len(files) // work.batch_size))


def _is_a_file(record: Record) -> bool:
    """Whether the record's data are all that its file holds: not so for a part of a store, or for pixels."""
    encoded = not isinstance(record.data, np.ndarray) and record.path is not None and os.path.isfile(record.path)
    return encoded and record.offset is None and os.path.getsize(str(record.path)) == record.size_bytes


_NATIVE = (RandomResizedCrop, Resize, CenterCrop, RandomHorizontalFlip, ColorJitter)


class _NativeEpochs:
    def __init__(self, pipeline: Any, batches: int) -> None:
        self._pipeline, self._batches = pipeline, batches

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        for _ in range(self._batches):
            images, labels = self._pipeline.run()
            yield from_dlpack(images.as_tensor()), from_dlpack(labels.as_tensor())


def _native_pipeline(work: Work, paths: list[str], steps: Sequence[Any], dali: Any, *, on_gpu: bool) -> Any:
    fn, types = dali.fn, dali.types
    recipe = work.recipe
    normalize = recipe.normalize

    @dali.pipeline_def(  # type: ignore[untyped-decorator]
        batch_size=work.batch_size,
        num_threads=work.workers,
        device_id=torch.cuda.current_device() if on_gpu else None,
        exec_dynamic=True,
        prefetch_queue_depth=2,
    )
    def graph() -> Any:
        encoded, labels = fn.readers.file(files=paths, labels=[0] * len(paths), name="files")
        device = "mixed" if on_gpu else "cpu"
        first = steps[0] if steps else None
        if isinstance(first, RandomResizedCrop):
            images = fn.decoders.image_random_crop(
                encoded, device=device, random_area=list(first.scale), random_aspect_ratio=list(first.ratio)
            )
            images = fn.resize(images, size=list(recipe.output_size), antialias=True)
        else:
            images = fn.decoders.image(encoded, device=device, output_type=types.RGB)
        mirror: Any = 0
        for step in steps:
            if isinstance(step, Resize):
                size = {"size": list(step.size)} if isinstance(step.size, tuple) else {"resize_shorter": step.size}
                images = fn.resize(images, antialias=True, **size)
            elif isinstance(step, RandomHorizontalFlip):
                mirror = fn.random.coin_flip(probability=step.p)
            elif isinstance(step, ColorJitter):
                images = _twisted(images, step, fn)
        images = fn.crop_mirror_normalize(
            images,
            crop=list(recipe.output_size),
            mirror=mirror,
            mean=[255 * value for value in normalize.mean],
            std=[255 * value for value in normalize.std],
        )
        return images, labels

    return graph()


def _twisted(images: Any, step: ColorJitter, fn: Any) -> Any:
    names = ("brightness", "contrast", "saturation", "hue")
    ranges = {name: each for name, each in zip(names, step.ranges, strict=True) if each is not None}
    drawn = {
        name: fn.random.uniform(range=[360 * end if name == "hue" else end for end in each])
        for name, each in ranges.items()
    }
    return fn.color_twist(images, **drawn)


PEERS: dict[str, Callable[[Work, ExitStack], Epochs]] = {
    "torchvision": pillow,
    "torchvision-tensors": tensors,
    "dali-native": dali_native,
}
