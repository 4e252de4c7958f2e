"""How much padding LengthBuckets saves, what that does to randomness, and what padding itself costs.

    python benchmarks/bench_padding.py [--epochs 50] [--rounds 5]

Lengths are log-normal, as those of sentences are, and those of the paragraphs in the sources of Python's standard
library. The share of padding is that of all numbers in the padded batches of an epoch; "step" counts as padding what a
rank lacks to the longest batch of its step, too, with 8 ranks, because the others wait for that one.

Randomness is how often two samples meet in a batch over all epochs, on a data set so small that a window of 64 steps is
all of it; plain shuffling is binomial, with a variance of the counts over their mean just below 1. "same_batches" is
the share of an epoch's batches that the epoch before had, too.

The cost is that of one batch of 64 sequences, padded with a mask and lengths, against pad_sequence and a mask made by
hand, from lists and from tensors, on one thread.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from harness import interleaved, write_result
from torch.nn.utils.rnn import pad_sequence

import gpupipe as gp
from gpupipe.sampling.length import bucketed_order

BATCH, RANKS = 64, 8
SAMPLES, FEW = 65_536, 4096  # for padding; for how often each two of them meet
EPOCHS = 3  # for padding, which hardly differs between them
WINDOWS = (4, 16, 64, 256)
REPEATS = 50

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Order = Callable[[F64, int, int], I64]


def plain(lengths: F64, epoch: int, world_size: int) -> I64:
    del world_size
    found: I64 = torch.randperm(len(lengths), generator=torch.Generator().manual_seed(epoch)).numpy()
    return found


def bucketed(window: int, noise: float = 0.1) -> Order:
    def order(lengths: F64, epoch: int, world_size: int) -> I64:
        return bucketed_order(lengths, seed=epoch, batch_size=BATCH, world_size=world_size, window=window, noise=noise)

    return order


def dealt(order: I64, world_size: int) -> I64:
    """(steps, world_size, batch)."""
    return order.reshape(-1, BATCH, world_size).transpose(0, 2, 1)


def measure(lengths: F64, order: Order, epochs: int) -> dict[str, Any]:
    real, padded, in_step = 0.0, 0.0, 0.0
    for epoch in range(EPOCHS):
        real += lengths.sum()
        padded += (lengths[dealt(order(lengths, epoch, 1), 1)].max(axis=2) * BATCH).sum()
        in_step += (lengths[dealt(order(lengths, epoch, RANKS), RANKS)].max(axis=(1, 2)) * BATCH * RANKS).sum()
    return {
        "padding": float(1 - real / padded),
        "padding_in_step_of_8_ranks": float(1 - real / in_step),
        **meetings(lengths[:FEW], order, epochs),
    }


def meetings(lengths: F64, order: Order, epochs: int) -> dict[str, Any]:
    met = np.zeros((len(lengths), len(lengths)), np.int16)
    same: list[float] = []
    before: set[frozenset[int]] = set()
    for epoch in range(epochs):
        batches = dealt(order(lengths, epoch, 1), 1)[:, 0]
        for batch in batches:
            met[np.ix_(batch, batch)] += 1
        now = {frozenset(batch) for batch in batches.tolist()}
        if before:
            same.append(len(now & before) / len(now))
        before = now
    pairs = met[np.triu_indices(len(lengths), 1)]
    return {
        "pairs_variance_over_mean": float(pairs.var() / pairs.mean()),
        "same_batches": float(np.mean(same)),
    }


def paragraphs() -> F64:
    """Bytes of paragraphs, at most 2048."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "\n\n".join(file.read_text(errors="replace") for file in files)
    lengths = [min(len(part.strip().encode()), 2048) for part in text.split("\n\n") if part.strip()]
    return np.random.default_rng(0).choice(np.array(lengths, np.float64), SAMPLES)


def padding_costs(rounds: int) -> dict[str, Any]:
    torch.set_num_threads(1)  # as in the workers of a DataLoader; on shared machines, threads wait for threads
    lengths = np.random.default_rng(0).lognormal(5, 0.7, BATCH).astype(int) + 1
    lists = [list(range(length)) for length in lengths]
    tensors = [torch.tensor(each) for each in lists]
    spec = gp.Collate(columns={"tokens": gp.Pad()})

    def by_hand(values: list[torch.Tensor]) -> None:
        padded = pad_sequence(values, batch_first=True)
        real = torch.tensor([len(each) for each in values])
        mask = torch.arange(padded.shape[1]) < real[:, None]
        del mask

    def times(run: Callable[[], object]) -> Callable[[], None]:
        def repeated() -> None:
            for _ in range(REPEATS):
                run()

        return repeated

    of_lists = [{"tokens": each} for each in lists]
    of_tensors = [{"tokens": each} for each in tensors]
    found = interleaved(
        {
            "gp.collate, tensors": times(lambda: gp.collate(of_tensors, spec)),
            "by hand, tensors": times(lambda: by_hand(tensors)),
            "gp.collate, lists": times(lambda: gp.collate(of_lists, spec)),
            "by hand, lists": times(lambda: by_hand([torch.tensor(each) for each in lists])),
        },
        rounds,
    )
    return {name: {**times, "median_ms_per_batch": times["median_s"] / REPEATS * 1e3} for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    data = {
        "log-normal, sigma 0.7": np.ceil(np.random.default_rng(0).lognormal(5, 0.7, SAMPLES)),
        "paragraphs of Python's library": paragraphs(),
    }
    measured: dict[str, Any] = {
        "samples": {"for padding": SAMPLES, "for meetings": FEW},
        "epochs": {"for padding": EPOCHS, "for meetings": options.epochs},
        "batch_size": BATCH,
    }
    for name, lengths in data.items():
        orders: dict[str, Order] = {"plain": plain}
        orders |= {f"window {window}": bucketed(window) for window in WINDOWS}
        orders |= {"window 64, no noise": bucketed(64, noise=0.0)}
        found = {what: measure(lengths, order, options.epochs) for what, order in orders.items()}
        measured[name] = {"mean": lengths.mean(), "largest": lengths.max(), "orders": found}
    measured["padding a batch of 64"] = padding_costs(options.rounds)
    many = np.ceil(np.random.default_rng(0).lognormal(5, 0.7, 1_281_167))
    measured["order of 1,281,167 samples, 8 ranks of 256"] = interleaved(
        {
            "LengthBuckets": lambda: bucketed_order(many, seed=0, batch_size=256, world_size=8, window=64, noise=0.1),
            "plain": lambda: torch.randperm(len(many)),
        },
        3,
    )
    write_result("padding", measured)


if __name__ == "__main__":
    main()
