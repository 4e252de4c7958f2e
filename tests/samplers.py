"""Samplers as people write them."""

import math

import torch
from torch.utils.data import Sampler


class RASampler(Sampler):
    """Repeated augmentation as torchvision's reference scripts have it.

    Each index comes `repetitions` times in a row, and is dealt to different ranks; an epoch is cut short to about the
    length of the data set, rounded down to a multiple of `round_to` samples.

    Source: references/classification/sampler.py in torchvision; Berman et al., "MultiGrain", 2019.
    """

    def __init__(self, dataset, num_replicas, rank, *, seed=0, repetitions=3, round_to=256):
        self.dataset, self.num_replicas, self.rank = dataset, num_replicas, rank
        self.seed, self.repetitions, self.epoch = seed, repetitions, 0
        self.each = math.ceil(len(dataset) * repetitions / num_replicas)
        self.selected = len(dataset) // round_to * round_to // num_replicas

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        shuffled = torch.randperm(len(self.dataset), generator=generator)
        order = shuffled.repeat_interleave(self.repetitions).tolist()
        order += order[: self.each * self.num_replicas - len(order)]
        return iter(order[self.rank :: self.num_replicas][: self.selected])

    def __len__(self):
        return self.selected

    def set_epoch(self, epoch):
        self.epoch = epoch


class EpochSampler(Sampler):
    """Another order each epoch, by set_epoch; some indices come often."""

    def __init__(self, length):
        self.length, self.epoch, self.told = length, 0, []

    def __iter__(self):
        generator = torch.Generator().manual_seed(1000 + self.epoch)
        yield from torch.randint(self.length, (self.length,), generator=generator).tolist()

    def __len__(self):
        return self.length

    def set_epoch(self, epoch):
        self.told.append(epoch)
        self.epoch = epoch


class StatefulSampler(Sampler):
    """Keeps what it goes by to itself, but can save and load it; has no length."""

    def __init__(self, length):
        self.length, self.round = length, 0

    def __iter__(self):
        self.round += 1
        generator = torch.Generator().manual_seed(2000 + self.round)
        yield from torch.randperm(self.length, generator=generator).tolist()

    def state_dict(self):
        return {"round": self.round}

    def load_state_dict(self, state):
        self.round = state["round"]


class ForgetfulSampler(Sampler):
    """Another order each time, and no way to have an old one again."""

    def __init__(self, length):
        self.length, self.round = length, 0

    def __iter__(self):
        self.round += 1
        generator = torch.Generator().manual_seed(3000 + self.round)
        yield from torch.randperm(self.length, generator=generator).tolist()

    def __len__(self):
        return self.length
