"""Stand-ins that make loaders fast to test: a data set in memory, and a backend that does not decode."""

import threading
from concurrent.futures import Future
from functools import cache

import numpy as np
import torch

import gpupipe as gp
from gpupipe.backends.base import Applied
from gpupipe.records import Record
from tests import images


class FakeBackend:
    """Finishes batches in the order that `delays_s` makes.

    Its images say what they were made from: the red plane holds the index, the green one the occurrence, the blue one
    the left side of the crop. Equal images mean equal plans.
    """

    name = "fake"

    def __init__(self, delays_s=()):
        self.delays_s = list(delays_s)
        self.submitted = 0
        self.closed = 0
        self.failure = None
        self.bad = {}

    def submit(self, records, headers, plan):
        assert len(records) == len(headers) == len(plan)
        future = Future()
        self.submitted += 1
        delay_s = self.delays_s.pop(0) if self.delays_s else 0.0

        def finish():
            if not future.set_running_or_notify_cancel():
                return
            if self.failure is not None:
                future.set_exception(self.failure)
                return
            made_from = torch.tensor(np.stack([plan.index, plan.occurrence, plan.box[:, 1]], axis=1)).float()
            errors = {row: self.bad[r.index] for row, r in enumerate(records) if r.index in self.bad}
            future.set_result(Applied(made_from[:, :, None, None].repeat(1, 1, 16, 16), errors))

        if delay_s:
            threading.Timer(delay_s, finish).start()
        else:
            finish()
        return future

    def close(self):
        self.closed += 1


@cache
def _jpeg():
    return images.jpeg(images.photo(60, 80))


class MemorySource:
    """A data set of one picture, many times."""

    columns = ()
    labels = None

    def __init__(self, length):
        self.length = length
        self.uri = f"memory of {length}"
        self.fingerprint = f"memory:{length}"

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return Record(data=_jpeg(), label=index % 10, index=index, key=str(index))

    def close(self):
        pass


def in_shards(data, sizes):
    """A data set that claims to be made of shards of these sizes."""
    source = gp.open_source(data)
    source.shard_starts = np.cumsum([0, *sizes])
    return source


class ShardedSource(MemorySource):
    """The same in tar shards of these sizes; `read` holds the indices in the order in which they were asked for."""

    def __init__(self, sizes):
        super().__init__(int(sum(sizes)))
        self.shard_starts = np.cumsum([0, *sizes])
        self.read = []

    def __getitem__(self, index):
        self.read.append(index)
        return super().__getitem__(index)
