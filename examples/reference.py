"""torchvision's new ResNet-50 recipe: TrivialAugment, erasing, MixUp, CutMix, repeated augmentation, evaluation at 224.

    python examples/reference.py train/ --val val/ --epochs 600 --batch-size 128 --lr 0.5     # as in the reference
    python examples/reference.py demo-out/data --model resnet18 --epochs 10 --batch-size 64   # on what there is

What the reference does to images and their order is all here; of its training it has label smoothing, warm-up and the
cosine schedule, and not the averaged weights. examples/train.py shows several processes, checkpoints and mixed
precision; nothing about the loader changes with them.
"""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import torch
import torchvision
from torch import nn

import gpupipe as gp

LOG = logging.getLogger("reference")
REPEATS = 4


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("train", type=Path, help="folder of class folders")
    parser.add_argument("--val", type=Path, help="the same for evaluation; left out: the training images")
    parser.add_argument("--recipe", default="resnet50-v2", help="a name that Recipe.imagenet_reference knows")
    parser.add_argument("--model", default="resnet50", help="a name of torchvision.models")
    parser.add_argument("--epochs", type=int, default=600)
    parser.add_argument("--warm-up", type=int, default=5, help="epochs in which the learning rate rises")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=0.5)
    parser.add_argument("--backend", default="auto", help="what gpupipe runs on: auto, dali, numba, torchvision")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


@torch.no_grad()
def evaluate(model: nn.Module, loader: gp.Loader) -> float:
    """Share of the images that are classified correctly."""
    model.eval()
    right = sum(int((model(images).argmax(dim=1) == labels).sum()) for images, labels in loader)
    model.train()
    return right / len(loader.dataset)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    train = gp.ImageFolder(arguments.train)
    loader = gp.Loader(
        train,
        gp.Recipe.imagenet_reference(arguments.recipe),
        batch_size=arguments.batch_size,
        sampler=gp.Repeated(REPEATS),
        seed=arguments.seed,
        drop_last=True,
        backend=arguments.backend,
    )
    evaluated = gp.Loader(
        train if arguments.val is None else arguments.val,
        gp.Recipe.imagenet_reference(arguments.recipe, "eval"),
        batch_size=arguments.batch_size,
        backend=arguments.backend,
    )
    LOG.info("%r\n%s", loader.recipe, loader.backend.reason)
    device = loader.backend.device
    model = getattr(torchvision.models, arguments.model)(num_classes=len(train.classes)).to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)  # takes the soft labels of mixed batches as they are
    optimizer = torch.optim.SGD(model.parameters(), arguments.lr, momentum=0.9, weight_decay=2e-5)
    warm_up = max(1, min(arguments.warm_up, arguments.epochs // 2))
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=warm_up)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, arguments.epochs - warm_up))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [warm_up])
    with loader, evaluated:
        for epoch in range(arguments.epochs):
            loader.set_epoch(epoch)
            for images, soft_labels in loader:
                loss = criterion(model(images), soft_labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            schedule.step()
            LOG.info("epoch %d: loss %.3f, accuracy %.3f", epoch, loss.item(), evaluate(model, evaluated))


if __name__ == "__main__":
    main()
