"""Whether accuracy moves with the loader: the same network, trained and evaluated through each of them.

    python benchmarks/accuracy.py [--seeds 10] [--epochs 10]

scikit-learn's handwritten digits (1,797 real images, which come with the package) are enlarged to 40 x 40 and written
as JPEG; every second one of each class is for training, the others for evaluation. The recipe is what people write for
torchvision: RandomResizedCrop, ColorJitter, Normalize on PIL images, converted by `Recipe.from_torchvision`. Each seed
gives the network's first weights and the order of the samples, which are the same for all loaders, but for DALI's own
reader, whose order is its own. What is left are the random numbers of the augmentation. How much these alone move the
accuracy is shown by torchvision against itself ("torchvision again": other random numbers, all else the same).

For each loader: the accuracy's mean and standard deviation over the seeds, and the mean of its differences to
torchvision, seed by seed, with a 95 % confidence interval (Student's t) and the p-value of the paired test. "DALI's own
operators" is a DALI pipeline as people write it, for contrast: it decodes, resizes and jitters in its own way.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import write_result
from nvidia import dali
from PIL import Image
from scipy import stats
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.dlpack import from_dlpack
from torchvision import transforms
from torchvision.datasets import ImageFolder

import gpupipe as gp

SIZE, BATCH = 32, 64
MEAN, STD = (0.5, 0.5, 0.5), (0.25, 0.25, 0.25)
SCALE, RATIO, JITTER = (0.5, 1.0), (3 / 4, 4 / 3), 0.4
TRAIN = transforms.Compose(
    [
        transforms.RandomResizedCrop(SIZE, scale=SCALE, ratio=RATIO),
        transforms.ColorJitter(JITTER, JITTER, JITTER, 0.1),
        transforms.ToTensor(),
        transforms.Normalize(MEAN, STD),
    ]
)
EVAL = transforms.Compose(
    [transforms.Resize(36), transforms.CenterCrop(SIZE), transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
)
YARDSTICK = "torchvision + Pillow, DataLoader"

Batches = Iterable[tuple[torch.Tensor, torch.Tensor]]
Made = tuple[Callable[[int], Batches], Batches]
"""The batches of each epoch, and those of the evaluation."""


def write_digits(root: Path) -> None:
    """The digits as JPEG in class folders, half for training and half for evaluation."""
    digits = load_digits()
    seen = [0] * 10
    for number, (pixels, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        part = ("train", "eval")[seen[label] % 2]
        seen[label] += 1
        folder = root / part / str(label)
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray((pixels * (255 / 16)).astype(np.uint8)).convert("RGB")
        image.resize((40, 40), Image.Resampling.BICUBIC).save(folder / f"{number:04}.jpg", quality=90)


def stock(root: Path, seed: int, stack: ExitStack, *, augmentation: int = 0) -> Made:
    """torchvision and Pillow in a DataLoader: what people run."""
    trained = ImageFolder(root / "train", TRAIN)
    order: DistributedSampler[Any] = DistributedSampler(trained, 1, 0, shuffle=True, seed=seed)
    generator = torch.Generator().manual_seed(1000 * augmentation + seed)  # of the workers' seeds
    loader = DataLoader(
        trained, BATCH, sampler=order, drop_last=True, num_workers=2, persistent_workers=True, generator=generator
    )
    stack.callback(lambda: setattr(loader, "_iterator", None))  # ends the worker processes

    def epoch(number: int) -> Batches:
        order.set_epoch(number)
        return loader

    return epoch, DataLoader(ImageFolder(root / "eval", EVAL), 256)


def own(root: Path, seed: int, stack: ExitStack, *, backend: str) -> Made:
    """gpupipe with the converted recipes."""
    arguments: dict[str, Any] = {"backend": backend, "device": "cpu"}
    loader = stack.enter_context(
        gp.Loader(root / "train", TRAIN, batch_size=BATCH, shuffle=True, seed=seed, drop_last=True, **arguments)
    )
    evaluated = stack.enter_context(gp.Loader(root / "eval", EVAL, batch_size=256, **arguments))

    def epoch(number: int) -> Batches:
        loader.set_epoch(number)
        return loader

    return epoch, evaluated


class Native:
    """DALI's own operators: an epoch, or what is evaluated."""

    def __init__(self, folder: Path, seed: int, *, train: bool) -> None:
        fn, batch = dali.fn, BATCH if train else 256
        self.samples = sum(1 for _ in folder.rglob("*.jpg"))

        @dali.pipeline_def(batch_size=batch, num_threads=2, device_id=None, seed=seed)
        def graph() -> Any:
            encoded, labels = fn.readers.file(file_root=str(folder), random_shuffle=train, name="files", seed=seed)
            if train:
                images = fn.decoders.image_random_crop(
                    encoded, random_area=list(SCALE), random_aspect_ratio=list(RATIO), device="cpu"
                )
                images = fn.resize(images, size=[SIZE, SIZE], antialias=True)
                low, high = 1 - JITTER, 1 + JITTER
                factors = {
                    name: fn.random.uniform(range=[low, high]) for name in ("brightness", "contrast", "saturation")
                }
                images = fn.color_twist(images, hue=fn.random.uniform(range=[-36.0, 36.0]), **factors)
            else:
                images = fn.resize(fn.decoders.image(encoded, device="cpu"), resize_shorter=36, antialias=True)
            mean, std = [255 * value for value in MEAN], [255 * value for value in STD]
            return fn.crop_mirror_normalize(images, crop=(SIZE, SIZE), mean=mean, std=std), labels

        self._pipeline, self._batch, self._train = graph(), batch, train
        self._pipeline.build()

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        left = self.samples // self._batch * self._batch if self._train else self.samples
        while left > 0:
            images, labels = (from_dlpack(out.as_tensor()).clone() for out in self._pipeline.run())
            yield images[:left], labels[:left].flatten().long()
            left -= self._batch
        if not self._train:
            self._pipeline.reset()


def native(root: Path, seed: int, _stack: ExitStack) -> Made:
    """DALI as people write it."""
    train, evaluated = Native(root / "train", seed, train=True), Native(root / "eval", seed, train=False)
    return lambda _: train, evaluated


LOADERS: dict[str, Callable[[Path, int, ExitStack], Made]] = {
    YARDSTICK: stock,
    "torchvision again": lambda root, seed, stack: stock(root, seed, stack, augmentation=1),
    "gpupipe torchvision": lambda root, seed, stack: own(root, seed, stack, backend="torchvision"),
    "gpupipe numba": lambda root, seed, stack: own(root, seed, stack, backend="numba"),
    "gpupipe dali on the CPU": lambda root, seed, stack: own(root, seed, stack, backend="dali"),
    "DALI's own operators": native,
}


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for before, after, stride in ((3, 16, 2), (16, 32, 1), (32, 64, 1)):
        layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def accuracy(epoch: Callable[[int], Batches], evaluated: Batches, seed: int, epochs: int) -> float:
    """Train, then the share of the evaluation images that are classified correctly, in percent."""
    model = network(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    for number in range(epochs):
        for images, labels in epoch(number):
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in evaluated:
            right += int((model(images).argmax(dim=1) == labels).sum())
            total += len(labels)
    return 100 * right / total


def compared(found: dict[str, list[float]]) -> dict[str, Any]:
    """Mean and spread of each, and its differences to the yardstick."""
    stock_ones = np.array(found[YARDSTICK])
    results: dict[str, Any] = {}
    for name, values in found.items():
        mine = np.array(values)
        results[name] = {"percent": values, "mean": mine.mean(), "sd": mine.std(ddof=1)}
        if name != YARDSTICK:
            difference = mine - stock_ones
            error = difference.std(ddof=1) / math.sqrt(len(difference))
            half = float(stats.t.ppf(0.975, len(difference) - 1)) * error
            p = float(stats.ttest_rel(mine, stock_ones).pvalue) if error else 1.0
            mean = float(difference.mean())
            results[name]["difference"] = {"mean": mean, "ci95": [mean - half, mean + half], "p": p}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=10)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the network is small, and the loaders work beside it
    found: dict[str, list[float]] = {name: [] for name in LOADERS}
    taken_s = dict.fromkeys(LOADERS, 0.0)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        write_digits(root)
        for seed in range(arguments.seeds):
            for name, make in LOADERS.items():
                start = time.perf_counter()
                with ExitStack() as stack:
                    epoch, evaluated = make(root, seed, stack)
                    found[name].append(accuracy(epoch, evaluated, seed, arguments.epochs))
                taken_s[name] += time.perf_counter() - start
                print(f"seed {seed}: {name}: {found[name][-1]:.2f} %", flush=True)
        images = {part: sum(1 for _ in (root / part).rglob("*.jpg")) for part in ("train", "eval")}
    measured = {
        "seeds": arguments.seeds,
        "epochs": arguments.epochs,
        "images": images,
        "loaders": compared(found),
        "taken_s": taken_s,
    }
    write_result("accuracy", measured)


if __name__ == "__main__":
    main()
