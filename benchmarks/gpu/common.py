"""What the measurements on a GPU share: where they run, the photos, and DALI pipelines without gpupipe.

Everything takes a device. "cpu" runs the same code on DALI's CPU operators, to see that it runs: the figures then mean
nothing, and are not kept.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the benchmarks' harness

U8 = Any  # npt.NDArray[np.uint8]
SUBSAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")
# Of the photos on average, and about their size in bytes.
HEIGHT_PX, WIDTH_PX, QUALITY = 401, 468, 92
MEAN = [255 * value for value in (0.485, 0.456, 0.406)]
STD = [255 * value for value in (0.229, 0.224, 0.225)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """Where and how much.

    Attributes:
        folder: Photos in class folders.
        device: "cuda" with a number, or "cpu".
        batch: Samples in a batch.
        workers: Threads of DALI, processes of a DataLoader.
        rounds: Measured, after one to warm up.
        steps: Training steps in a round.
        batches: Of the run that looks at memory.
    """

    folder: Path
    device: torch.device
    batch: int
    workers: int
    rounds: int
    steps: int
    batches: int

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def paths(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("*/*") if path.is_file())

    def files(self, most: int) -> list[U8]:
        """The bytes of at most so many photos."""
        return [np.fromfile(path, np.uint8) for path in self.paths()[:most]]

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


def parser(description: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("photos", type=Path, nargs="?", help="class folders of photos (default: some are generated)")
    made.add_argument("--device", default="cuda", help='"cuda", "cuda:1", or "cpu" to see that the code runs')
    made.add_argument("--images", type=int, help="photos, repeated by links to that number (default 4096; cpu: 24)")
    made.add_argument("--batch", type=int, help="default 256; cpu: 8")
    made.add_argument("--workers", type=int, help="default: the cores")
    made.add_argument("--rounds", type=int, help="default 7; cpu: 1")
    return made


def needs_gpu(device: str) -> None:
    """End here, with one line, if there is no GPU and none can be done without.

    Raises:
        SystemExit: With status 1.
    """
    if device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("no GPU: torch sees no CUDA device, so nothing was measured (--device cpu tries the code)")


def setup(options: argparse.Namespace, scratch: Path) -> Setup:
    """The photos in place, and the defaults for this device."""
    from bench_cpu import repeated

    device = torch.device(options.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    on_gpu = device.type == "cuda"
    images = options.images or (4096 if on_gpu else 24)
    photos = options.photos or generated(scratch / "generated", min(images, 96))
    folder = scratch / "photos"
    folder.mkdir()
    repeated(photos, folder, images)
    return Setup(
        folder=folder,
        device=device,
        batch=options.batch or (256 if on_gpu else 8),
        workers=options.workers or len(os.sched_getaffinity(0)),
        rounds=options.rounds or (7 if on_gpu else 1),
        steps=50 if on_gpu else 2,
        batches=2000 if on_gpu else 20,
    )


def photo(seed: int, height: int = HEIGHT_PX, width: int = WIDTH_PX) -> U8:
    """Pixels with edges, slopes and noise, so that chroma upsampling and rounding have something to differ on."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width]
    waves = [np.sin(x * rng.uniform(0.01, 0.6) + y * rng.uniform(0.01, 0.6) + rng.uniform(0, 6)) for _ in range(6)]
    planes = [128 + 70 * waves[plane] + 50 * np.sign(waves[plane + 3]) for plane in range(3)]
    pixels: U8 = (np.stack(planes, axis=-1) + rng.normal(0, 8, (height, width, 3))).clip(0, 255).astype(np.uint8)
    return pixels


def generated(folder: Path, count: int) -> Path:
    """JPEGs of formulas, of about the size of photos, in all the usual subsamplings."""
    for number in range(count):
        place = folder / f"class{number % 4}"
        place.mkdir(parents=True, exist_ok=True)
        size = (HEIGHT_PX + 7 * (number % 9), WIDTH_PX - 5 * (number % 11))
        image = Image.fromarray(photo(number, *size))
        image.save(place / f"{number:04}.jpg", quality=QUALITY, subsampling=SUBSAMPLINGS[number % 3])
    return folder


@dataclass(slots=True)
class NativeEpochs:
    """A DALI pipeline with a file reader, one epoch after another; each ends when the device is done."""

    pipeline: Any
    batches: int
    finish: Callable[[], None]
    last: Any = field(default=None)

    def __call__(self) -> None:
        for _ in range(self.batches):
            self.last = self.pipeline.run()
        self.finish()

    def close(self) -> None:
        """Give its memory back."""
        self.pipeline = self.last = None


def decoder_arguments(at: Setup, *, engine: float, fancy: bool = True, **levers: Any) -> dict[str, Any]:
    """For fn.decoders.image: as gpupipe's graph has it, but for what is asked for."""
    return {
        "device": "mixed" if at.on_gpu else "cpu",
        "hw_decoder_load": engine,
        "jpeg_fancy_upsampling": fancy,
        "adjust_orientation": False,
        "use_fast_idct": False,
        **levers,
    }


def native(at: Setup, *, train: bool, threads: int | None = None, depth: int = 2, **decoder: Any) -> NativeEpochs:
    """Decoding alone, or with DALI's own random crop, resize, flip and normalisation; files from a reader.

    Args:
        at: Where.
        train: False leaves out everything behind the decoder.
        threads: None: as many as workers.
        depth: Of DALI's queue.
        decoder: For `decoder_arguments`.
    """
    from nvidia.dali import fn, pipeline_def, types

    arguments = decoder_arguments(at, **decoder)
    files = [str(path) for path in at.paths()]
    after = "gpu" if at.on_gpu else "cpu"

    @pipeline_def(
        batch_size=at.batch,
        num_threads=threads or at.workers,
        device_id=at.device.index,
        exec_dynamic=True,
        prefetch_queue_depth=depth,
    )
    def graph() -> Any:
        encoded, _ = fn.readers.file(files=files, labels=[0] * len(files), random_shuffle=True, name="files")
        images = fn.decoders.image(encoded, **arguments)
        if not train:
            return images
        images = fn.random_resized_crop(images, size=(224, 224), device=after, antialias=True)
        return fn.crop_mirror_normalize(images, mirror=fn.random.coin_flip(), dtype=types.FLOAT, mean=MEAN, std=STD)

    pipeline = graph()
    pipeline.build()
    return NativeEpochs(pipeline, -(-len(files) // at.batch), at.synchronize)


def decoded(
    at: Setup, files: Sequence[U8], *, place: str, batch: int = 16, threads: int = 4, **decoder: Any
) -> list[U8]:
    """Pixels of each file, by DALI's decoder, brought to the host.

    Args:
        at: Where.
        files: Encoded.
        place: "cpu", or "device", which is the CPU too where there is no GPU.
        batch: So many at a time.
        threads: Of DALI.
        decoder: For `decoder_arguments`.
    """
    from nvidia.dali import fn, pipeline_def, types

    arguments = decoder_arguments(at, **({"engine": 0.0} | decoder))
    if place == "cpu":
        arguments["device"] = "cpu"

    @pipeline_def(
        batch_size=batch, num_threads=threads, device_id=at.device.index, exec_dynamic=True, prefetch_queue_depth=1
    )
    def graph() -> Any:
        encoded = fn.external_source(name="encoded", dtype=types.UINT8, ndim=1, device="cpu")
        return fn.decoders.image(encoded, output_type=types.RGB, **arguments)

    return run_in_batches(graph(), files, batch)


def run_in_batches(pipeline: Any, files: Sequence[Any], batch: int, name: str = "encoded") -> list[Any]:
    """The first output for each input, as arrays on the host."""
    pipeline.build()
    found: list[Any] = []
    for first in range(0, len(files), batch):
        part = list(files[first : first + batch])
        pipeline.feed_input(name, part)
        (output, *_) = pipeline.run()
        on_host = output.as_cpu()
        found += [np.array(on_host[place]) for place in range(len(part))]
    return found


def run_through(batches: Iterable[Any], finish: Callable[[], None]) -> None:
    for _ in batches:
        pass
    finish()
