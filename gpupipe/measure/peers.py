"""What people use instead of gpupipe, on the same samples and with the same recipe, as far as it can do that.

Each function returns something to iterate over, once for each epoch, of batches; what it needs is released by the
`ExitStack`. One that cannot run here raises `BackendUnavailable` or `ConfigError`, which say why.
"""

from __future__ import annotations

import importlib
import io
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Subset, default_collate
from torch.utils.dlpack import from_dlpack
from torchvision.transforms import v2

from gpupipe.backends.intra_op import use_one_intra_op_thread
from gpupipe.convert import to_v2
from gpupipe.errors import BackendUnavailable, ConfigError
from gpupipe.recipe import Recipe
from gpupipe.records import Record
from gpupipe.sources.base import Source
from gpupipe.steps import CenterCrop, ColorJitter, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize

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
    """A source as a torch Dataset of (transformed image, label), or (transformed image, index)."""

    def __init__(
        self, source: Source, read: Callable[[Any], Any], transform: Callable[[Any], Any], *, labelled: bool = True
    ) -> None:
        self._source, self._read, self._transform, self._labelled = source, read, transform, labelled

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        record = self._source[index]
        return self._transform(self._read(record.data)), record.label if self._labelled else index


def pillow(work: Work, stack: ExitStack) -> Epochs:
    """Pillow images, torchvision transforms on them, a DataLoader with worker processes: the yardstick."""
    return _dataloader(work, _read_pillow, _pillow_transform(work.recipe), stack)


def tensors(work: Work, stack: ExitStack) -> Epochs:
    """torchvision's JPEG decoder and v2 transforms on uint8 tensors, in the same DataLoader."""
    return _dataloader(work, _read_tensor, _tensor_transform(work.recipe), stack)


def _pillow_transform(recipe: Recipe) -> v2.Compose:
    last = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True)]
    return v2.Compose([*_on_levels(recipe), *last, *_on_floats(recipe)])


def _tensor_transform(recipe: Recipe) -> v2.Compose:
    return v2.Compose([*_on_levels(recipe), v2.ToDtype(torch.float32, scale=True), *_on_floats(recipe)])


_FLOAT_STAGES = ("normalize", "erase")


def _on_levels(recipe: Recipe) -> list[v2.Transform]:
    return [to_v2(step) for step in recipe.steps if step.STAGE not in _FLOAT_STAGES]


def _on_floats(recipe: Recipe) -> list[v2.Transform]:
    return [to_v2(step, levels=1) for step in recipe.steps if step.STAGE in _FLOAT_STAGES]


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
    _refuse_pixels(work)
    dataset = Subset(_Records(work.source, read, transform), list(work.indices))
    return _persistent(DataLoader(dataset, batch_size=work.batch_size, **_workers(work)), stack)


def _refuse_pixels(work: Work) -> None:
    if any(isinstance(work.source[index].data, np.ndarray) for index in work.indices):
        raise ConfigError(f"it decodes image files, and {work.source.uri} holds pixels", field="source")


def _workers(work: Work) -> dict[str, Any]:
    return {"num_workers": work.workers, "persistent_workers": work.workers > 0}


def _persistent(loader: DataLoader[Any], stack: ExitStack) -> DataLoader[Any]:
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
            crop = {"random_area": list(first.scale), "random_aspect_ratio": list(first.ratio)}
            side = list(recipe.output_size)
            if on_gpu:  # where decoding a region can take the process down (nvImageCodec 0.9.0, its issue 55)
                images = fn.decoders.image(encoded, device=device)
                images = fn.random_resized_crop(images, size=side, antialias=True, **crop)
            else:
                images = fn.decoders.image_random_crop(encoded, device=device, **crop)
                images = fn.resize(images, size=side, antialias=True)
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


def spdl(work: Work, _stack: ExitStack) -> Epochs:
    """SPDL's threads, which read, decode and transform as `tensors` does: its own decoders need FFmpeg's libraries."""
    builder = _needed("spdl.pipeline", "pip install spdl").PipelineBuilder
    _refuse_pixels(work)
    return _SpdlEpochs(builder, _Records(work.source, _read_tensor, _tensor_transform(work.recipe)), work)


class _SpdlEpochs:
    def __init__(self, builder: Any, records: _Records, work: Work) -> None:
        self._builder, self._records, self._work = builder, records, work

    def __iter__(self) -> Iterator[Any]:
        workers = max(1, self._work.workers)
        with ThreadPoolExecutor(workers, initializer=use_one_intra_op_thread) as threads:
            pipeline = (
                self._builder()
                .add_source(self._work.indices)
                .pipe(self._records.__getitem__, concurrency=workers, executor=threads, output_order="input")
                .aggregate(self._work.batch_size)
                .pipe(default_collate, executor=threads)
                .add_sink(2)
                .build(num_threads=1, max_failures=0)
            )
            with pipeline.auto_stop():
                yield from pipeline


def webdataset(work: Work, stack: ExitStack) -> Epochs:
    """Tar shards, which are written first, by webdataset in a DataLoader: Pillow images, torchvision's transforms."""
    wds = _needed("webdataset", "pip install webdataset")
    _refuse_pixels(work)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpupipe-peer-"))
    many = max(1, work.workers)
    shards = [os.path.join(folder, f"{number:03}.tar") for number in range(many)]
    for number, shard in enumerate(shards):
        with wds.TarWriter(shard) as writer:
            for place in range(number, len(work.indices), many):
                data = bytes(work.source[work.indices[place]].data)
                writer.write({"__key__": f"{place:09}", "image": data, "cls": str(place)})
    dataset = (
        wds.WebDataset(shards, shardshuffle=False)
        .to_tuple("image", "cls")
        .map_tuple(_Images(_pillow_transform(work.recipe)), int)
        .batched(work.batch_size, partial=True)
    )
    return _persistent(DataLoader(dataset, batch_size=None, **_workers(work)), stack)


@dataclass(frozen=True, slots=True)
class _Images:
    """Bytes of a file -> what a transform makes of the image in it; a class, because it goes to other processes."""

    transform: Callable[[Any], Any]

    def __call__(self, data: Any) -> Any:
        return self.transform(_read_pillow(data))


def ffcv(work: Work, stack: ExitStack) -> Epochs:
    """FFCV, from its own file, which is written first: JPEGs encoded again at quality 90, no antialias, no hue."""
    install = "pip install ffcv opencv-python-headless, after OpenCV's and libjpeg-turbo's development files"
    fields, writer, loader, transforms = (
        _needed(f"ffcv.{name}", install) for name in ("fields", "writer", "loader", "transforms")
    )
    _refuse_pixels(work)
    decoders = _needed("ffcv.fields.decoders", install)
    operations = _ffcv_operations(work.recipe, decoders, transforms)
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="gpupipe-peer-"))
    path = os.path.join(folder, "images.beton")
    image = fields.RGBImageField(write_mode="jpg", jpeg_quality=90)
    samples = Subset(_Records(work.source, _read_pillow, np.asarray, labelled=False), list(work.indices))
    writer.DatasetWriter(path, {"image": image, "label": fields.IntField()}, num_workers=1).from_indexed_dataset(
        samples
    )
    epochs: Epochs = loader.Loader(
        path,
        batch_size=work.batch_size,
        num_workers=max(1, work.workers),
        order=loader.OrderOption.SEQUENTIAL,
        drop_last=False,
        pipelines={"image": operations, "label": [decoders.IntDecoder(), transforms.ToTensor()]},
    )
    return epochs


def _ffcv_operations(recipe: Recipe, decoders: Any, transforms: Any) -> list[Any]:
    steps = [step for step in recipe.steps if not isinstance(step, Normalize)]
    size = recipe.output_size
    match steps:
        case [RandomResizedCrop() as crop, *others]:
            decoder = decoders.RandomResizedCropRGBImageDecoder(size, scale=crop.scale, ratio=crop.ratio)
        case [Resize(size=int() as resized), CenterCrop(), *others]:
            decoder = decoders.CenterCropRGBImageDecoder(size, ratio=min(size) / resized)
        case _:
            others = steps
    found = [decoder] if len(others) < len(steps) else []
    for step in others:
        if isinstance(step, RandomHorizontalFlip):
            found.append(transforms.RandomHorizontalFlip(step.p))
        elif isinstance(step, ColorJitter):
            names = ("RandomBrightness", "RandomContrast", "RandomSaturation")
            for name, ends in zip(names, step.ranges, strict=False):
                if ends is not None:
                    found.append(getattr(transforms, name)(ends[1] - 1, p=1.0))
        else:
            found = []
            break
    if not found:
        given = ", ".join(type(step).__name__ for step in steps)
        raise ConfigError(f"FFCV has no operations that stand for {given}", field="recipe", value=given)
    mean, std = (255 * np.array(values) for values in (recipe.normalize.mean, recipe.normalize.std))
    normalize = transforms.NormalizeImage(mean, std, np.float32)
    return [*found, normalize, transforms.ToTensor(), transforms.ToTorchImage(channels_last=False)]


def _needed(module: str, install: str) -> Any:
    """A module that a peer needs.

    Raises:
        BackendUnavailable: It cannot be imported; old libraries break in many ways under new ones.
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise BackendUnavailable(
            f"{module} cannot be imported ({type(error).__name__}: {error}): {install}", missing=module, install=install
        ) from error


PEERS: dict[str, Callable[[Work, ExitStack], Epochs]] = {
    "torchvision": pillow,
    "torchvision-tensors": tensors,
    "dali-native": dali_native,
    "spdl": spdl,
    "webdataset": webdataset,
    "ffcv": ffcv,
}
