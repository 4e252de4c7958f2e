"""Images per second of a loader, and of the one that people use today."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from gpupipe.recipe import Recipe

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

T = TypeVar("T")

PLAIN_WORKERS = 2


def images_per_second(batches: Iterable[Any], images: int, *, bar: str | None) -> float:
    """The second of two passes: the first one warms up whatever there is to warm up.

    Args:
        batches: Something to iterate over twice, of tuples whose first entry is a tensor.
        images: How many images one pass has.
        bar: What a progress bar on stderr would be called; None: no bar.
    """
    import torch

    elapsed = 0.0
    for timed in (False, True):
        began = time.perf_counter()
        for _ in _with_bar(batches, bar if timed else None):
            pass
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        elapsed = time.perf_counter() - began
    return images / elapsed


def plain_loader(root: str, indices: Sequence[int], recipe: Recipe, batch_size: int) -> DataLoader[Any]:
    """What people run today: torchvision's ImageFolder and transforms on PIL images, in worker processes."""
    from torch.utils.data import DataLoader, Subset
    from torchvision.datasets import ImageFolder

    dataset = Subset(ImageFolder(root, transform=_plain_transform(recipe)), list(indices))
    return DataLoader(dataset, batch_size=batch_size, num_workers=PLAIN_WORKERS, persistent_workers=PLAIN_WORKERS > 0)


def _plain_transform(recipe: Recipe) -> Any:
    """The demo's recipe (random crop, flip, jitter) as people write it, without gpupipe's own conversion."""
    import torch
    from torchvision.transforms import v2

    from gpupipe.steps import ColorJitter

    jitter = [v2.ColorJitter(*step.ranges) for step in recipe.steps if isinstance(step, ColorJitter)]
    return v2.Compose(
        [
            v2.RandomResizedCrop(recipe.output_size),
            v2.RandomHorizontalFlip(),
            *jitter,
            v2.PILToTensor(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(list(recipe.normalize.mean), list(recipe.normalize.std)),
        ]
    )


def _with_bar(batches: Iterable[T], name: str | None) -> Iterator[T]:
    if name is not None:
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            yield from tqdm(batches, desc=name, unit="batch", leave=False)
            return
    yield from batches
