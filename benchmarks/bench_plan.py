"""How many plans a second: random numbers and geometry of a training recipe, on one core.

The peer is torchvision's own drawing of the same parameters, `make_params`, in the same run. The target is 150,000
plans a second at batch 256. "whole epochs": the shuffled order and the plans of every sample of an epoch of 1,281,167
and of 10,000,000 samples, batch by batch, as the loader asks for them: a plan must not cost more in a larger data set.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import numpy as np
import torch
from harness import interleaved, write_result
from torchvision.transforms import v2

from gpupipe import Recipe, make_plan
from gpupipe.sampling.samplers import DefaultOrdering

JITTER = (0.4, 0.4, 0.4, 0.1)
RECIPES = {
    "train with jitter": Recipe.train(jitter=JITTER),
    "train": Recipe.train(),
    "eval": Recipe.eval(),
}
BATCHES = (1, 64, 256, 1024)
TARGET = 150_000
EPOCHS = (1_281_167, 10_000_000)


def plan_batches(recipe: Recipe, batch: int, total: int) -> None:
    """Plans of `total` samples of photo-like sizes, batch by batch."""
    sizes = np.random.default_rng(0).integers(300, 600, (batch, 2))
    for start in range(0, total, batch):
        make_plan(recipe, seed=0, epoch=0, indices=np.arange(start, start + batch), sizes=sizes)


def whole_epoch(recipe: Recipe, samples: int, batch: int = 256) -> Callable[[], None]:
    """Each call plans all samples of another epoch, in its order."""
    sizes = np.random.default_rng(0).integers(300, 600, (batch, 2))
    ordering, epochs = DefaultOrdering(samples, shuffle=True, seed=0), itertools.count()

    def run() -> None:
        epoch = next(epochs)
        order = ordering.draw(epoch)
        for start in range(0, samples, batch):
            indices, occurrences = order.at(np.arange(start, min(start + batch, samples)))
            make_plan(
                recipe, seed=0, epoch=epoch, indices=indices, occurrences=occurrences, sizes=sizes[: len(indices)]
            )

    return run


def torchvision_params(total: int) -> None:
    """The same parameters by torchvision, one image after another, without touching a pixel."""
    crop, jitter = v2.RandomResizedCrop(224), v2.ColorJitter(*JITTER)
    for height, width in np.random.default_rng(0).integers(300, 600, (total, 2)).tolist():
        crop.make_params([torch.empty(0, height, width)])
        _ = torch.rand(1) < 0.5
        jitter.make_params([])


def main() -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    torch.manual_seed(0)
    functions, totals = {}, {}
    for name, recipe in RECIPES.items():
        for batch in BATCHES:
            key = f"{name}, batch {batch}"
            totals[key] = 1024 if batch == 1 else 16_384
            functions[key] = lambda recipe=recipe, batch=batch, total=totals[key]: plan_batches(recipe, batch, total)
    peer = "torchvision make_params, train with jitter"
    totals[peer] = 4096
    functions[peer] = lambda: torchvision_params(totals[peer])
    times = interleaved(functions, rounds=9)
    train = RECIPES["train with jitter"]
    epochs = interleaved({str(samples): whole_epoch(train, samples) for samples in EPOCHS}, rounds=3)
    rates = {key: round(totals[key] / time["median_s"]) for key, time in times.items()}
    write_result(
        "plan",
        {
            "plans_per_s": rates,
            "target_at_batch_256": TARGET,
            "target_met": rates["train with jitter, batch 256"] >= TARGET,
            "ratio_to_torchvision_at_batch_256": round(rates["train with jitter, batch 256"] / rates[peer], 1),
            "whole_epochs_plans_per_s": {key: round(int(key) / time["median_s"]) for key, time in epochs.items()},
            "times": times,
            "whole_epochs": epochs,
        },
    )


if __name__ == "__main__":
    main()
