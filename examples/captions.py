"""Images with captions and boxes from tar shards: columns of every length, batched, and boxes that follow augmentation.

    python examples/captions.py shards/ --make 256          # writes shards of drawn rectangles first, then trains
    python examples/captions.py "train-{000000..000099}.tar" --backend numba

A sample is three files of one name: ``00017.jpg``, ``00017.txt`` with the caption, and ``00017.json`` with
``{"label": 1, "boxes": [[x1, y1, x2, y2], ...]}`` in pixels of the image; there may be no box at all. The model learns
two things at once: which pixels are inside a box, and which caption belongs to which image.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import gpupipe as gp
from gpupipe.sources.tar import TarShards

LOG = logging.getLogger("captions")
SIZE = 64
COLOURS = {"red": (220, 30, 30), "green": (30, 180, 40), "blue": (40, 60, 220), "white": (240, 240, 240)}
SAMPLES_A_SHARD = 64

# Captions are text, and stay a list. Boxes are as many as there are: all in one tensor, and where each image's begin.
COLUMNS = gp.Collate(
    columns={
        "caption": gp.Keep(column="txt"),
        "boxes": gp.Ragged(column="json:boxes", item=(4,), dtype="float32"),
    }
)
FIELDS = ("image", "caption", "boxes", "boxes_offsets", "affine")
# Bytes of a caption, filled up to the longest of the batch, and to a multiple of 8.
TOKENS = gp.Collate(columns={"tokens": gp.Pad(multiple=8, limit=128, too_long="keep_first", dtype="int64")})


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shards", help="a folder of tar shards, a file, or a pattern")
    parser.add_argument("--make", type=int, metavar="N", help="write N samples into that folder first")
    parser.add_argument("--backend", default="auto", help="auto, dali, numba, torchvision")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


def make_shards(folder: Path, samples: int) -> None:
    """Pictures of up to three rectangles, with what they are and where."""
    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(0)
    for first in range(0, samples, SAMPLES_A_SHARD):
        with tarfile.open(folder / f"train-{first // SAMPLES_A_SHARD:06d}.tar", "w") as shard:
            for number in range(first, min(first + SAMPLES_A_SHARD, samples)):
                for extension, data in draw(random).items():
                    member = tarfile.TarInfo(f"{number:06d}.{extension}")
                    member.size = len(data)
                    shard.addfile(member, io.BytesIO(data))


def draw(random: np.random.Generator) -> dict[str, bytes]:
    height, width = (int(side) for side in random.integers(80, 200, 2))
    pixels = np.full((height, width, 3), random.integers(60, 120), np.uint8)
    boxes, words = [], []
    for _ in range(random.integers(0, 4)):
        name = str(random.choice(list(COLOURS)))
        y1, x1 = int(random.integers(0, height - 30)), int(random.integers(0, width - 30))
        y2, x2 = (int(random.integers(start + 20, end + 1)) for start, end in ((y1, height), (x1, width)))
        pixels[y1:y2, x1:x2] = COLOURS[name]
        boxes.append([x1, y1, x2, y2])
        words.append(f"a {name} box")
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "JPEG", quality=90)
    return {
        "jpg": buffer.getvalue(),
        "txt": (" and ".join(words) or "nothing").encode(),
        "json": json.dumps({"label": len(boxes), "boxes": boxes}).encode(),
    }


class Model(nn.Module):
    """Which cells of an image are inside a box, and how much each image is like each caption."""

    def __init__(self) -> None:
        super().__init__()
        self.pixels = nn.Sequential(
            nn.Conv2d(3, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 5, stride=2, padding=2),
            nn.ReLU(),
        )
        self.inside = nn.Conv2d(32, 1, 1)
        self.image, self.caption = nn.Linear(32, 32), nn.EmbeddingBag(256, 32, mode="sum")

    def forward(self, images: torch.Tensor, tokens: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        features = self.pixels(images)
        seen = self.image(features.mean(dim=(2, 3)))
        read = self.caption(tokens, per_sample_weights=mask.float()) / mask.sum(dim=1, keepdim=True).clamp(min=1)
        return self.inside(features)[:, 0], F.normalize(seen, dim=1) @ F.normalize(read, dim=1).T


def inside_boxes(boxes: torch.Tensor, offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """float32 (rows, SIZE / 4, SIZE / 4): 1 for each cell whose centre is in a box of its image."""
    centres = torch.arange(2, SIZE, 4, device=boxes.device)
    across = (boxes[:, 0, None] <= centres) & (centres < boxes[:, 2, None])
    down = (boxes[:, 1, None] <= centres) & (centres < boxes[:, 3, None])
    of_image = torch.arange(rows, device=boxes.device).repeat_interleave(offsets.diff())
    cells = (down[:, :, None] & across[:, None, :]).float()
    empty = torch.zeros(rows, len(centres), len(centres), device=boxes.device)
    return empty.index_add_(0, of_image, cells).clamp_(max=1)


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if args.make:
        make_shards(Path(args.shards), args.make)
    source = TarShards(args.shards, label="json:label", columns=("json", "txt"))
    recipe = gp.Recipe.train(size=SIZE, scale=(0.3, 1.0), jitter=(0.2, 0.2, 0.2, 0.0))
    torch.manual_seed(0)
    with gp.Loader(
        source,
        recipe,
        batch_size=args.batch_size,
        shuffle=True,
        backend=args.backend,
        fields=FIELDS,
        collate=COLUMNS,
    ) as loader:
        LOG.info("%s", loader)
        model = Model().to(loader.backend.device)
        optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
        for epoch in range(args.epochs):
            train(model, optimizer, loader, epoch)


def train(model: Model, optimizer: torch.optim.Optimizer, loader: gp.Loader, epoch: int) -> None:
    losses, boxes_seen, boxes_kept = [], 0, 0
    for images, captions, boxes, offsets, affine in loader:
        # The boxes are those of the original image: they go where crop, resize and flip took its pixels.
        moved = gp.transform_boxes(boxes, affine, offsets=offsets, size=(SIZE, SIZE))
        text = gp.collate([{"tokens": caption.encode()} for caption in captions], TOKENS)
        tokens, mask = text["tokens"].to(images.device), text["tokens_mask"].to(images.device)
        inside, alike = model(images, tokens, mask)
        targets = inside_boxes(moved, offsets, len(images))
        pairs = torch.arange(len(images), device=images.device)
        loss = F.binary_cross_entropy_with_logits(inside, targets) + 0.1 * F.cross_entropy(alike / 0.1, pairs)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        boxes_seen += len(moved)
        boxes_kept += int(((moved[:, 2:] - moved[:, :2]).amin(dim=1) > 0).sum())
    LOG.info(
        "epoch %d: loss %.4f; %d of %d boxes were at least partly inside the crops",
        epoch,
        sum(losses) / len(losses),
        boxes_kept,
        boxes_seen,
    )


if __name__ == "__main__":
    main()
