"""Text alone, in batches of similar length: how much less padding there is, with a plain torch DataLoader.

    python examples/text.py                       # paragraphs of Python's standard library
    python examples/text.py book.txt notes.txt    # those of your own files

A paragraph is a sample, its bytes are the tokens, and a small recurrent network learns to say the next one. The first
epoch takes batches as plain shuffling makes them, the second one as LengthBuckets does. Both train on every paragraph
once, in batches of the same size; what differs is how many of the numbers that the network works on are padding.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler

import gpupipe as gp

LOG = logging.getLogger("text")
IGNORED = -100  # what cross_entropy passes over
COLLATE = gp.Collate(columns={"tokens": gp.Pad(value=IGNORED, multiple=8, dtype="int64", mask=False)})

Batch = dict[str, torch.Tensor]


class Paragraphs(Dataset[dict[str, bytes]]):
    """The paragraphs of some files, cut off at a length."""

    def __init__(self, files: Iterable[Path], longest: int) -> None:
        text = "\n\n".join(file.read_text(errors="replace") for file in files)
        self._paragraphs = [part.strip().encode()[:longest] for part in text.split("\n\n") if len(part.strip()) > 1]
        self.lengths = np.array([len(part) for part in self._paragraphs])

    def __len__(self) -> int:
        return len(self._paragraphs)

    def __getitem__(self, index: int) -> dict[str, bytes]:
        return {"tokens": self._paragraphs[index]}


class NextByte(nn.Module):
    """The loss of saying each byte from those before it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.bytes, self.head = nn.Embedding(256, width), nn.Linear(width, 256)
        self.memory = nn.GRU(width, width, batch_first=True)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        states, _ = self.memory(self.bytes(tokens[:, :-1].clamp(min=0)))
        return F.cross_entropy(self.head(states).flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=IGNORED)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, help="text files; left out: sources of the standard library")
    parser.add_argument("--paragraphs", type=int, default=2000, help="at most")
    parser.add_argument("--longest", type=int, default=512, help="bytes of a paragraph; the rest is cut off")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--workers", type=int, default=0, help="processes of the DataLoader")
    return parser.parse_args()


def train(model: NextByte, optimizer: torch.optim.Optimizer, batches: Iterable[Batch]) -> tuple[float, float, float]:
    """One epoch: share of padding, mean loss of a batch, and seconds."""
    start, losses, real, padded = time.perf_counter(), [], 0, 0
    for batch in batches:
        loss = model(batch["tokens"])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        real += int(batch["tokens_lengths"].sum())
        padded += batch["tokens"].numel()
    return 1 - real / padded, sum(losses) / len(losses), time.perf_counter() - start


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    library = sorted(Path(os.__file__).parent.glob("*.py"))
    data = Paragraphs(args.files or library, args.longest)
    few = torch.utils.data.Subset(data, range(min(len(data), args.paragraphs)))
    lengths = data.lengths[: len(few)]
    LOG.info("%d paragraphs of %d bytes on average, %d at most", len(few), lengths.mean(), lengths.max())
    plain = torch.utils.data.BatchSampler(RandomSampler(few), args.batch_size, drop_last=False)
    buckets = gp.BatchSampler(gp.LengthBuckets(lengths), batch_size=args.batch_size, seed=0)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = NextByte().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for name, sampler in (("plain shuffling", plain), ("LengthBuckets", buckets)):
        loader = DataLoader(few, batch_sampler=sampler, collate_fn=COLLATE, num_workers=args.workers)
        # Read, padded and moved to the device while the network works on the batch before.
        share, loss, seconds = train(model, optimizer, gp.prefetch(loader, device))
        LOG.info("%s: %.1f %% of all numbers are padding; loss %.3f, %.1f s", name, 100 * share, loss, seconds)


if __name__ == "__main__":
    main()
