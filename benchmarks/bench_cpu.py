"""Images a second on a CPU: torchvision + Pillow + DataLoader (the yardstick), its peers, and gpupipe's backends.

    python benchmarks/bench_cpu.py ../shared/data/photos               # all of it, 10 to 20 minutes
    python benchmarks/bench_cpu.py PHOTOS --rounds 2 --recipes train --only numba

PHOTOS is a folder of class folders. It is repeated by links to about 1000 files, all of them in the page cache after
the first round. One measurement is one epoch, from the first batch asked for to the last; worker processes and threads
stay up between epochs. Everything takes its turn in every round, so that what else the machine does hits all alike, and
the ratios are what counts.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import interleaved, write_result

import gpupipe as gp
from gpupipe.measure.peers import PEERS as MEASURED
from gpupipe.measure.peers import Work
from gpupipe.steps.colour import IMAGENET_MEAN, IMAGENET_STD

YARDSTICK = "torchvision + Pillow, DataLoader"
JITTER = (0.4, 0.4, 0.4, 0.1)
BATCH = 64
WORKERS = 2
Epoch = Callable[[], object]


def repeated(photos: Path, target: Path, count: int) -> int:
    """A folder of about `count` links to the photos, in the same classes; returns how many."""
    files = sorted(path for path in photos.glob("*/*") if path.is_file())
    times = max(1, round(count / len(files)))
    for path in files:
        (target / path.parent.name).mkdir(exist_ok=True)
        for number in range(times):
            (target / path.parent.name / f"{number:03}-{path.name}").symlink_to(path.resolve())
    return times * len(files)


def recipes(precision: str) -> dict[str, gp.Recipe]:
    return {
        "train": gp.Recipe.train(precision=precision),
        "train+jitter": gp.Recipe.train(jitter=JITTER, precision=precision),
        "eval": gp.Recipe.eval(precision=precision),
    }


# --- peers ---


def stock_transforms(name: str, module: Any, first: list[Any], last: list[Any], **resize: Any) -> Any:
    """What people write: torchvision.transforms (PIL images) or torchvision.transforms.v2 (tensors)."""
    normalize = module.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    if name == "eval":
        geometry = [module.Resize(256, **resize), module.CenterCrop(224)]
    else:
        geometry = [module.RandomResizedCrop(224, **resize), module.RandomHorizontalFlip()]
    if name == "train+jitter":
        geometry.append(module.ColorJitter(*JITTER))
    return module.Compose([*first, *geometry, *last, normalize])


def dataloader(folder: Path, transform: Any, stack: ExitStack, **arguments: Any) -> Epoch:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    loader = DataLoader(
        ImageFolder(str(folder), transform, **arguments),
        batch_size=BATCH,
        shuffle=True,
        num_workers=WORKERS,
        persistent_workers=True,
    )
    stack.callback(lambda: setattr(loader, "_iterator", None))
    return lambda: run_through(loader)


def pillow(folder: Path, name: str, stack: ExitStack) -> Epoch:
    from torchvision import transforms

    return dataloader(folder, stock_transforms(name, transforms, [], [transforms.ToTensor()]), stack)


def read_tensor(path: str) -> torch.Tensor:
    from torchvision.io import ImageReadMode, decode_image, read_file

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return decode_image(read_file(path), ImageReadMode.RGB)


def tensors(folder: Path, name: str, stack: ExitStack) -> Epoch:
    from torchvision.transforms import v2

    transform = stock_transforms(name, v2, [], [v2.ToDtype(torch.float32, scale=True)], antialias=True)
    return dataloader(folder, transform, stack, loader=read_tensor)


def measured_peer(name: str) -> Callable[[Path, str, ExitStack], Epoch]:
    """One of those that `gpupipe bench` knows."""

    def make(folder: Path, recipe: str, stack: ExitStack) -> Epoch:
        source = gp.open_source(folder)
        stack.callback(source.close)
        indices = np.random.default_rng(0).permutation(len(source)).tolist()
        epochs = MEASURED[name](Work(source, indices, recipes("float32")[recipe], BATCH, WORKERS), stack)
        return lambda: run_through(epochs)

    return make


def gpupipe(backend: str) -> Callable[[Path, gp.Recipe, ExitStack], Epoch]:
    def make(folder: Path, recipe: gp.Recipe, stack: ExitStack) -> Epoch:
        loader = gp.Loader(
            folder,
            recipe,
            batch_size=BATCH,
            shuffle=True,
            backend=backend,
            device="cpu",
            options=gp.Options(threads=WORKERS),
        )
        stack.callback(loader.close)
        return lambda: run_through(loader)

    return make


def run_through(loader: Any) -> None:
    for images, labels in loader:
        assert len(images) == len(labels)


# The first two are written out, from torchvision's ImageFolder on, as people have them.
PEERS = {
    YARDSTICK: pillow,
    "torchvision v2 tensors, DataLoader": tensors,
    "DALI's own operators": measured_peer("dali-native"),
    "SPDL, threads": measured_peer("spdl"),
    "webdataset, DataLoader": measured_peer("webdataset"),
    "FFCV, JPEG": measured_peer("ffcv"),
}
OURS = {f"gpupipe {name}": gpupipe(name) for name in ("numba", "torchvision", "dali")}


def measure(folder: Path, images: int, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One recipe, everything interleaved; what cannot run here is listed with the reason."""
    makers: dict[str, Callable[[ExitStack], Epoch]] = {
        peer: lambda stack, make=make: make(folder, name, stack)
        for peer, make in PEERS.items()
        if peer == YARDSTICK or not options.only
    }
    for precision in options.precisions:
        recipe = recipes(precision)[name]
        makers |= {
            f"{ours} {precision}": lambda stack, build=build, recipe=recipe: build(folder, recipe, stack)
            for ours, build in OURS.items()
            if not options.only or ours.endswith(options.only)
        }
    functions: dict[str, Epoch] = {}
    missing: dict[str, str] = {}
    with ExitStack() as stack:
        for who, make in makers.items():
            try:
                functions[who] = make(stack)
                functions[who]()
            except (ImportError, gp.GpupipeError) as error:
                functions.pop(who, None)
                missing[who] = str(error)
        timed = interleaved(functions, options.rounds)
    yardstick = timed[YARDSTICK]["median_s"]
    found: dict[str, Any] = {
        who: {
            "images_per_s": round(images / times["median_s"], 1),
            "ratio": round(yardstick / times["median_s"], 3),
            **times,
        }
        for who, times in timed.items()
    }
    return found | ({"missing": missing} if missing else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("photos", type=Path)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--recipes", nargs="+", default=["train", "train+jitter", "eval"])
    parser.add_argument("--precisions", nargs="+", default=["float32", "uint8"])
    parser.add_argument("--only", help="one of gpupipe's backends, beside the yardstick and nothing else")
    parser.add_argument("--name", default="cpu", help="of the file in benchmarks/results")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        images = repeated(options.photos, Path(scratch), options.images)
        measured = {name: measure(Path(scratch), images, name, options) for name in options.recipes}
    write_result(
        options.name,
        {
            "images": images,
            "batch_size": BATCH,
            "workers": WORKERS,
            "load_average_at_end": round(os.getloadavg()[0], 2),
            "recipes": measured,
        },
    )


if __name__ == "__main__":
    main()
