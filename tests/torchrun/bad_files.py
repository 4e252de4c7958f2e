"""What each process of test_bad_files.py does: epochs in which all bad files are on rank 1.

torchrun --nproc_per_node=2 bad_files.py <data set> <out> <backend> ...
"""

import faulthandler
import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`

import gpupipe as gp

# Odd numbers, which are rank 1's of 2 without a shuffle. Of its batches of two, two are bad as a whole, one by half.
BAD = (1, 3, 5, 7, 11)


class BadOnOneRank:
    """The data set, with some of its files cut off in their headers or behind them."""

    def __init__(self, data):
        self._whole = gp.open_source(data)
        self.uri, self.columns, self.labels = self._whole.uri, self._whole.columns, self._whole.labels
        self.fingerprint = f"{self._whole.fingerprint}, bad on one rank"

    def __len__(self):
        return len(self._whole)

    def __getitem__(self, index):
        record = self._whole[index]
        return replace(record, data=record.data[: 100 if index % 4 == 1 else -200]) if index in BAD else record

    def close(self):
        self._whole.close()


def loader(data, backend, policy, batch_size=2):
    return gp.Loader(
        BadOnOneRank(data),
        gp.Recipe.train(size=16),
        batch_size=batch_size,
        seed=1,
        backend=backend,
        device="cpu",
        on_error=gp.OnError(policy, max_bad=1.0),
        fields=("image", "label", "index", "valid"),
    )


def rows(batches):
    """[index, label, valid, sum of the pixels] of each row."""
    return [
        [int(index), int(label), bool(valid), float(image.double().sum())]
        for batch in batches
        for image, label, index, valid in zip(*batch, strict=True)
    ]


def substitutes(each):
    return [[bad.index, bad.substitute] for bad in each.errors]


def epoch(data, backend, policy):
    with loader(data, backend, policy) as each:
        batches = []
        for batch in each:
            dist.all_reduce(torch.ones(1))  # as a training step: a rank with a batch less leaves the other waiting here
            batches.append(batch)
        mine = {"batches": len(batches), "len": len(each), "rows": rows(batches), "bad": substitutes(each)}
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found


def main():
    faulthandler.dump_traceback_later(55, exit=True)  # before the test's own guard, to say where it hangs
    data, out, *backends = sys.argv[1:]
    dist.init_process_group("gloo")
    policies = ("substitute", "ignore")
    found = {backend: {policy: epoch(data, backend, policy) for policy in policies} for backend in backends}
    if dist.get_rank() == 0:
        Path(out).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
