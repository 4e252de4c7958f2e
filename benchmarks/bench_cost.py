"""How much more equal CostAware's batches are than plain shuffling's, and what that does to randomness.

    python benchmarks/bench_cost.py [--photos ../shared/data/photos] [--epochs 200]

On log-normal sizes, and on the byte sizes of real photos repeated to a data set of a few thousand (each repetition a
sample of its own). Spread is the standard deviation of a batch's summed cost over its mean; "step" the mean, over
steps of 8 ranks, of the slowest rank's batch over the mean batch: the time that a step takes if time is cost.

Randomness is how often two samples meet in a batch over all epochs. Plain shuffling is binomial: the variance of the
counts over their mean is just below 1, and every group of samples meets every other equally often. Groups are tenths
of the data set by cost; the ratio is to the mean over all pairs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import interleaved, write_result

from gpupipe.sampling import cost
from gpupipe.sources import open_source

SAMPLES, BATCH, RANKS = 4096, 64, 8
WINDOWS = (4, 8, 16, 32, 64)

Order = Callable[[int], npt.NDArray[np.int64]]
F64 = npt.NDArray[np.float64]


def plain(epoch: int) -> npt.NDArray[np.int64]:
    found: npt.NDArray[np.int64] = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).numpy()
    return found


def balanced(costs: F64, window: int, blur: float = cost.BLUR) -> Order:
    def order(epoch: int) -> npt.NDArray[np.int64]:
        usual, cost.BLUR = cost.BLUR, blur
        try:
            return cost.balanced_order(costs, seed=epoch, batch_size=BATCH, world_size=1, window=window)
        finally:
            cost.BLUR = usual

    return order


def measure(costs: F64, order: Order, epochs: int) -> dict[str, Any]:
    met = np.zeros((SAMPLES, SAMPLES), np.int16)
    sums = np.empty((epochs, SAMPLES // BATCH))
    for epoch in range(epochs):
        batches = order(epoch).reshape(-1, BATCH)
        sums[epoch] = costs[batches].sum(axis=1)
        for batch in batches:
            met[np.ix_(batch, batch)] += 1
    pairs = met[np.triu_indices(SAMPLES, 1)]
    ratios = group_ratios(met, costs) / pairs.mean()
    steps = sums.reshape(-1, RANKS)
    return {
        "spread": sums.std() / sums.mean(),
        "largest_over_mean": sums.max() / sums.mean(),
        "step_over_mean": steps.max(axis=1).mean() / sums.mean(),
        "pairs": {
            "mean": float(pairs.mean()),
            "variance_over_mean": float(pairs.var() / pairs.mean()),
            "most": int(pairs.max()),
            "rarest_tenths_ratio": ratios.min(),
            "commonest_tenths_ratio": ratios.max(),
            "largest_1_percent_ratio": largest_ratio(met, costs) / pairs.mean(),
        },
    }


def group_ratios(met: npt.NDArray[np.int16], costs: F64) -> F64:
    """How often two samples of each pair of cost tenths met, on average."""
    tenths = np.array_split(costs.argsort(), 10)
    found = np.empty((10, 10))
    for one, rows in enumerate(tenths):
        for other, columns in enumerate(tenths):
            block = met[np.ix_(rows, columns)]
            with_itself = np.trace(block) if one == other else 0
            found[one, other] = (block.sum() - with_itself) / (block.size - (len(rows) if one == other else 0))
    return found


def largest_ratio(met: npt.NDArray[np.int16], costs: F64) -> float:
    largest = costs.argsort()[-SAMPLES // 100 :]
    block = met[np.ix_(largest, largest)]
    return float((block.sum() - np.trace(block)) / (block.size - len(largest)))


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--photos", type=Path, default=here.parent.parent / "shared" / "data" / "photos")
    parser.add_argument("--epochs", type=int, default=200)
    options = parser.parse_args()
    data = {"log-normal, sigma 0.8": np.random.default_rng(0).lognormal(11.4, 0.8, SAMPLES)}
    if options.photos.is_dir():
        data["bytes of photos"] = np.resize(cost.measure_costs(open_source(options.photos), "bytes"), SAMPLES)
    measured: dict[str, Any] = {"samples": SAMPLES, "batch_size": BATCH, "epochs": options.epochs}
    for name, costs in data.items():
        orders = {"plain": plain}
        orders |= {f"window {window}": balanced(costs, window) for window in WINDOWS}
        orders |= {f"window {window}, not blurred": balanced(costs, window, blur=0.0) for window in (32, 64)}
        found = {what: measure(costs, order, options.epochs) for what, order in orders.items()}
        measured[name] = {
            "coefficient_of_variation_of_costs": costs.std() / costs.mean(),
            "orders": found,
            "spread_plain_over_default": found["plain"]["spread"]
            / found[f"window {cost.CostAware().window}"]["spread"],
        }
    many = np.random.default_rng(0).lognormal(11.4, 0.8, 1_281_167)
    measured["order of 1,281,167 samples, 8 ranks of 256"] = interleaved(
        {
            "CostAware": lambda: cost.balanced_order(many, seed=0, batch_size=256, world_size=8, window=32),
            "plain": lambda: torch.randperm(len(many)),
        },
        3,
    )
    write_result("cost", measured)


if __name__ == "__main__":
    main()
