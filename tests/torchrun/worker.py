"""What each process of the torchrun tests does. Rank 0 writes what the ranks told each other; the test judges it.

torchrun --nproc_per_node=2 worker.py <data set> <out> <backend> ...
"""

import faulthandler
import json
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler, RandomSampler

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`

import gpupipe as gp
from gpupipe.errors import ConfigError
from tests.fakes import in_shards
from tests.samplers import RASampler

DATA, OUT, *BACKENDS = sys.argv[1:] if __name__ == "__main__" else ("", "")
RECIPE = gp.Recipe.train(size=16)
SHARDS = gp.ShardOrder(lanes=4, window=3)
SHARD_SIZES = (4, 0, 7, 1, 3)


def loader(backend, data=DATA, **arguments):
    defaults = {"batch_size": 2, "seed": 1, "fields": ("image", "index", "valid")}
    return gp.Loader(data, RECIPE, backend=backend, device="cpu", **(defaults | arguments))


def told(value):
    """What every rank has to say, over the wire."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def rows(batches):
    """[index, valid, sum of the pixels] of each row of each batch."""
    return [
        [[int(i), bool(v), float(image.double().sum())] for image, i, v in zip(*batch, strict=True)]
        for batch in batches
    ]


def step():
    """As a training step: waits for all ranks."""
    dist.all_reduce(torch.ones(1))


def epochs(backend):
    found = {}
    for pad in ("repeat", "drop", "mask"):
        with loader(backend, shuffle=True, sharding=gp.Sharding(pad=pad)) as each:
            batches = rows(each)
            found[pad] = told({"batches": batches, "len": len(each), "global": each.global_batch_size})
    return found


def slow_rank(backend):
    seen = []
    with loader(backend, shuffle=True) as each:
        for batch in each:
            if dist.get_rank() == 1:
                time.sleep(0.2)
            step()
            seen += rows([batch])
    return told(seen)


def early_stop(backend):
    """All ranks stop when one says so; the next epoch is whole, and another one."""
    found = []
    with loader(backend, shuffle=True) as each:
        for _ in range(2):
            seen = []
            for batch in each:
                seen += rows([batch])
                stop = torch.tensor(float(dist.get_rank() == 1 and len(seen) == 2 and not found))
                dist.all_reduce(stop)
                if stop:
                    break
            found.append(seen)
    return told(found)


def resume(backend):
    """A checkpoint by rank 0, which all ranks load; and one for a later run with one process."""
    path = Path(OUT) / f"{backend}.pt"
    with loader(backend, shuffle=True) as each:
        straight = rows(each)
        each.set_epoch(0)
        before = rows(batch for _, batch in zip(range(2), each, strict=False))
        if dist.get_rank() == 0:
            torch.save(each.state_dict(), path)
    dist.barrier()
    with loader(backend, shuffle=True) as each:
        each.load_state_dict(torch.load(path, weights_only=True))
        after = rows(each)
    return told({"straight": straight, "before": before, "after": after})


def train_and_eval(backend):
    """Two loaders in work at once."""
    with (
        loader(backend, shuffle=True) as train,
        loader(backend, batch_size=4, sharding=gp.Sharding(pad="mask")) as evaluate,
    ):
        validation = iter(evaluate)
        trained, evaluated = [], []
        for batch in train:
            trained += rows([batch])
            for tested in validation:
                evaluated += rows([tested])
                step()
                break
        return told({"train": trained, "eval": evaluated + rows(validation)})


def handed_in(backend):
    rank, world_size, length = dist.get_rank(), dist.get_world_size(), len(gp.open_source(DATA))
    own = gp.Sharding(sampler_scope="rank")
    samplers = {
        "distributed": DistributedSampler(range(length), seed=1),
        "augmented": RASampler(range(length), world_size, rank, round_to=1),
    }
    found = {}
    for name, sampler in samplers.items():
        with loader(backend, sampler=sampler, sharding=own) as each:
            found[name] = told(rows(each))
    # The same, interrupted: rank 0's state serves both, as it holds the order of both.
    with loader(backend, sampler=samplers["augmented"], sharding=own) as each:
        first = rows(batch for _, batch in zip(range(2), each, strict=False))
        states = told(each.state_dict())
    again = RASampler(range(length), world_size, rank, round_to=1)
    with loader(backend, sampler=again, sharding=own) as each:
        each.load_state_dict(states[0])
        found["augmented, resumed"] = told(first + rows(each))
    with loader(backend, sampler=gp.Weighted(range(1, length + 1))) as each:
        found["weighted"] = told(rows(each))
    return found


def shards(backend):
    """The order of shards, padded in each way; and interrupted, with a state for a later run with one process."""
    data, found, path = in_shards(DATA, SHARD_SIZES), {}, Path(OUT) / f"{backend} shards.pt"
    for pad in ("repeat", "drop", "mask"):
        sharding = gp.Sharding(pad=pad, order=SHARDS)
        with loader(backend, data, shuffle=True, sharding=sharding) as each:
            found[pad] = told(rows(each))
            each.set_epoch(0)
            before = rows(batch for _, batch in zip(range(2), each, strict=False))
            state = told(each.state_dict())[0]
        with loader(backend, data, shuffle=True, sharding=sharding) as each:
            each.load_state_dict(state)
            found[f"{pad}, resumed"] = told(before + rows(each))
        if pad == "repeat":
            found["before"] = told(before)
            if dist.get_rank() == 0:
                torch.save(state, path)
    return found


class Failing:
    """A sampler that cannot be asked on rank 1."""

    def __init__(self, rank):
        self.rank = rank

    def __iter__(self):
        yield 1 // (1 - self.rank)


def disagreements(backend):
    """What must be an error on every rank, and no hang."""
    rank, length = dist.get_rank(), len(gp.open_source(DATA))
    own = gp.Sharding(sampler_scope="rank")
    cases = {
        "indices": {"sampler": [rank, 2, 3]},
        "seeds": {"sampler": RandomSampler(range(length), generator=torch.Generator().manual_seed(rank))},
        "weights": {"sampler": gp.Weighted([1.0] * (length - 1) + [1.0 + 9 * rank])},
        "costs": {"sampler": gp.CostAware([abs(rank * length - i) for i in range(length)], window=2)},
        "buckets": {"sampler": gp.LengthBuckets([abs(rank * length - i) for i in range(length)], window=2)},
        "lengths": {"sampler": list(range(3 + rank)), "sharding": own},
        "shards": {
            "data": in_shards(DATA, (rank + 1, length - rank - 1)),
            "sharding": gp.Sharding(order=SHARDS),
        },
        "one fails": {"sampler": Failing(rank)},
        "one fails, own parts": {"sampler": Failing(rank), "sharding": own},
    }
    found = {}
    for name, arguments in cases.items():
        with loader(backend, **arguments) as each:
            try:
                iter(each)
            except (ConfigError, ArithmeticError) as error:
                found[name] = told(str(error))
            else:
                found[name] = told(None)
    return found


SCENARIOS = (epochs, slow_rank, early_stop, resume, train_and_eval, handed_in, shards)


def main():
    faulthandler.dump_traceback_later(55, exit=True)  # before the test's own guard, to say where it hangs
    dist.init_process_group("gloo")
    found = {backend: {scenario.__name__: scenario(backend) for scenario in SCENARIOS} for backend in BACKENDS}
    found["disagreements"] = disagreements(BACKENDS[0])
    if dist.get_rank() == 0:
        (Path(OUT) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
