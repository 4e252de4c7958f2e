"""Train an image classifier with gpupipe: mixed precision, several GPUs, checkpoints, exact evaluation.

    python examples/train.py demo-out/data --epochs 10                       # one process, GPU or CPU
    torchrun --nproc_per_node=2 examples/train.py train/ --val val/          # one process for each GPU
    python examples/train.py train/ --checkpoint run.pt --resume             # goes on where run.pt was written

Data sets are folders with one folder of images for each class. A run that was killed and resumed goes on in the middle
of the epoch, with the samples that were not seen yet; on one CPU process its losses are those of a run that was never
killed, bit for bit. The number of processes may change in between.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import gpupipe as gp

LOG = logging.getLogger("train")
JITTER = (0.4, 0.4, 0.4, 0.1)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="folder of class folders")
    parser.add_argument("--val", type=Path, help="the same for evaluation; left out: the training images")
    parser.add_argument("--model", default="resnet18", help="a name of torchvision.models, or 'tiny', for tests")
    parser.add_argument("--epochs", type=int, default=90)
    parser.add_argument("--batch-size", type=int, default=64, help="on each process")
    parser.add_argument("--lr", type=float, default=0.1, help="for a global batch of 256; scaled to the one there is")
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--size", type=int, default=224, help="pixels of a side")
    parser.add_argument("--jitter", action="store_true", help="colour jitter, too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto", help="what gpupipe runs on: auto, dali, numba, torchvision")
    parser.add_argument("--threads", type=int, help="of the backend; left out: one for each core")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoint.pt"))
    parser.add_argument("--save-every", type=int, default=500, help="steps between checkpoints; also after each epoch")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, if there is one")
    parser.add_argument("--losses", type=Path, help="file for the losses, one JSON object a line")
    parser.add_argument("--log-every", type=int, default=20, help="steps; reading a loss makes the GPU wait")
    return parser.parse_args()


class Tiny(nn.Sequential):
    """A model that trains in no time; dropout, so that a resume has random state to get right."""

    def __init__(self, classes: int) -> None:
        super().__init__(
            nn.Conv2d(3, 8, 3, stride=2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(128, classes),
        )


def set_up_device() -> torch.device:
    """The device of this process, its own; joins the other processes if torchrun started some."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if cuda else "gloo")
    return device


def is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def make_loaders(args: argparse.Namespace, device: torch.device) -> tuple[gp.Loader, gp.Loader]:
    output = gp.Output(memory_format="channels_last" if device.type == "cuda" else "contiguous")
    common: dict[str, Any] = {
        "batch_size": args.batch_size,
        "seed": args.seed,
        "backend": args.backend,
        "device": device,
        "options": gp.Options(threads=args.threads),
    }
    train = gp.Loader(
        args.train,
        gp.Recipe.train(size=args.size, jitter=JITTER if args.jitter else None, output=output),
        shuffle=True,
        drop_last=True,
        **common,
    )
    # pad="mask": every process gets equally many batches, and rows that only fill them up are not valid.
    evaluate = gp.Loader(
        args.val or args.train,
        gp.Recipe.eval(size=args.size, resize=round(args.size / 0.875), output=output),
        sharding=gp.Sharding(pad="mask"),
        fields=("image", "label", "valid"),
        **common,
    )
    return train, evaluate


def make_model(args: argparse.Namespace, classes: int, device: torch.device) -> nn.Module:
    torch.manual_seed(args.seed)
    model = Tiny(classes) if args.model == "tiny" else torchvision.models.get_model(args.model, num_classes=classes)
    if device.type == "cuda":
        model = model.to(device, memory_format=torch.channels_last)
    return model


class Training:
    """Everything that a checkpoint holds, and what is done with it."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.train, self.evaluation = make_loaders(args, device)
        classes = len({int(label) for label in self.train.dataset.labels})
        self.plain_model = make_model(args, classes, device)
        self.model = DistributedDataParallel(self.plain_model) if dist.is_initialized() else self.plain_model
        self.peak_lr = args.lr * self.train.global_batch_size / 256
        self.optimizer = torch.optim.SGD(
            self.plain_model.parameters(), lr=self.peak_lr, momentum=0.9, weight_decay=args.weight_decay, nesterov=True
        )
        self.amp = device.type == "cuda"
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.amp)
        self.step = 0
        self.losses = args.losses.open("a") if args.losses and is_first() else None

    def run(self) -> None:
        for epoch in range(self.train.epoch, self.args.epochs):
            self.train.set_epoch(epoch)  # keeps the position that a checkpoint restored
            self.model.train()
            for images, labels in self.train:
                self.take_step(images, labels)
                if self.step % self.args.save_every == 0:
                    self.save()
            correct, total = self.evaluate()
            self.save()
            if is_first():
                LOG.info("epoch %d: %d of %d correct (%.2f %%)", epoch, correct, total, 100 * correct / total)

    def take_step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        with torch.autocast(self.device.type, dtype=torch.float16) if self.amp else nullcontext():
            loss = F.cross_entropy(self.model(images), labels, label_smoothing=0.1)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        if self.step % self.args.log_every == 0 and is_first():
            self.write_log(loss.item())

    def learning_rate(self) -> float:
        """Cosine, by how much of all epochs is done: needs no state, and no fixed number of processes."""
        done = self.train.epoch + 1 - self.train.remaining / len(self.train)
        return self.peak_lr * (1 + math.cos(math.pi * done / self.args.epochs)) / 2

    def write_log(self, loss: float) -> None:
        LOG.info("epoch %d, step %d: loss %.4f", self.train.epoch, self.step, loss)
        if self.losses is not None:
            self.losses.write(json.dumps({"epoch": self.train.epoch, "step": self.step, "loss": loss}) + "\n")
            self.losses.flush()

    @torch.no_grad()
    def evaluate(self) -> tuple[int, int]:
        """Correct and all images of the evaluation set, each counted once over all processes."""
        self.plain_model.eval()
        counts = torch.zeros(2, dtype=torch.int64, device=self.device)
        for images, labels, valid in self.evaluation:
            with torch.autocast(self.device.type, dtype=torch.float16) if self.amp else nullcontext():
                predicted = self.plain_model(images).argmax(1)
            counts[0] += ((predicted == labels) & valid).sum()
            counts[1] += valid.sum()
        if dist.is_initialized():
            dist.all_reduce(counts)
        correct, total = counts.tolist()
        return correct, total

    def save(self) -> None:
        """Write the checkpoint; one process does, because the loader's state is the same for all."""
        if not is_first():
            return
        state = {
            "model": self.plain_model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "loader": self.train.state_dict(),
            "step": self.step,
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state() if self.amp else None,
        }
        # A process that is killed while it writes must not leave half a checkpoint in the place of a whole one.
        unfinished = self.args.checkpoint.with_suffix(".unfinished")
        with unfinished.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.args.checkpoint)

    def load(self) -> None:
        state = torch.load(self.args.checkpoint, map_location="cpu", weights_only=True)
        self.plain_model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.train.load_state_dict(state["loader"])
        self.step = state["step"]
        torch.set_rng_state(state["random"])
        if self.amp and state["random_cuda"] is not None:
            torch.cuda.set_rng_state(state["random_cuda"])
        LOG.info("resumed at epoch %d with %d batches left", self.train.epoch, self.train.remaining)

    def close(self) -> None:
        self.train.close()
        self.evaluation.close()
        if self.losses is not None:
            self.losses.close()


def main() -> None:
    args = parse_arguments()
    device = set_up_device()
    logging.basicConfig(level=logging.INFO if is_first() else logging.WARNING, format="%(message)s")
    training = Training(args, device)
    try:
        LOG.info("%s; global batch %d", training.train, training.train.global_batch_size)
        if args.resume and args.checkpoint.exists():
            training.load()
        training.run()
    finally:
        training.close()
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
