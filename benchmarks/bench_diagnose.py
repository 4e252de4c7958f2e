"""How often `gpupipe.diagnose` finds what was planted in a real run, names it first, and is silent on healthy runs.

Each condition is made for real: a throttled source, a leaking loop, workers rebuilt in each epoch, a slow rank under
torchrun, ... The thresholds in gpupipe/measure/diagnosing/rules.py were set before the seeds that are judged here (100
and up) were ever run; seeds below 100 are for trying things out.

    python benchmarks/bench_diagnose.py [--repetitions 10] [--only NAME,NAME] [--first-seed 100]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import write_result
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import gpupipe as gp
from gpupipe.measure.gauges import memory_limit_bytes
from gpupipe.parallel import usable_cores

HEALTHY_KINDS = 5
STEP_S = 0.02
LOOK_S = 0.1
CORES = usable_cores()


class Items(Dataset):  # type: ignore[type-arg]
    """Samples that take their time: asleep, as on a slow disk, or computing, as when decoding."""

    def __init__(self, asleep_s: Any = 0.0, computing_s: float = 0.0, n: int = 640, pixels: int = 64) -> None:
        self.asleep_s = np.broadcast_to(asleep_s, n)
        self.computing_s, self.pixels = computing_s, pixels

    def __len__(self) -> int:
        return len(self.asleep_s)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(float(self.asleep_s[index]))
        end = time.thread_time() + self.computing_s
        while time.thread_time() < end:
            pass
        return torch.zeros(3, self.pixels, self.pixels), index


def watched_loop(
    loader: Any,
    log: str,
    *,
    epochs: int = 3,
    each: Callable[[Any], object] | None = None,
    step_s: float = STEP_S,
    **more: Any,
) -> None:
    """A training loop whose step takes a fixed time."""
    with gp.watch(loader, every=0, log=log, resources_s=LOOK_S, **more) as watched:
        for _ in range(epochs):
            for batch in watched:
                time.sleep(step_s)
                if each is not None:
                    each(batch)


def loader(dataset: Dataset, **more: Any) -> DataLoader:  # type: ignore[type-arg]
    """A DataLoader that is set up well."""
    defaults = {"batch_size": 8, "num_workers": 2, "persistent_workers": True, "shuffle": True}
    return DataLoader(dataset, **{**defaults, **more})


# Healthy runs, of several kinds


def healthy(log: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kind = seed % HEALTHY_KINDS
    if kind == 0:
        watched_loop(loader(Items(0.0002)), log)
    elif kind == 1:  # heavy tails that the prefetch bridges
        watched_loop(loader(Items(rng.lognormal(-8.5, 1.0, 640))), log)
    elif kind == 2:  # a pool that fills at first, and a loop that keeps its last hundred losses
        kept: list[Any] = []
        pool: list[Any] = []

        def each(batch: Any) -> None:
            kept.append(batch[0].mean().item())
            if len(pool) < 20:
                pool.append(np.ones(1_000_000))

        watched_loop(loader(Items(0.0002)), log, each=each)
    elif kind == 3:
        with data_set(rng, 160, lambda: (120, 160)) as folder:
            with gp.Loader(folder, gp.Recipe.train(size=64), batch_size=8, shuffle=True) as mine:
                watched_loop(mine, log, epochs=6)
    else:
        two_ranks("two_even_ranks", log, seed)


# The conditions, by the code that has to be named first


def too_few_workers(log: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    watched_loop(loader(Items(rng.uniform(0.005, 0.012)), num_workers=1), log)


def blocked_reads(log: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    watched_loop(loader(Items(rng.uniform(0.015, 0.03)), num_workers=CORES), log, epochs=2)


def crowded(log: str, seed: int) -> None:
    """Beside the jobs of others, which `findings` starts: they must not be children of the watched process."""
    rng = np.random.default_rng(seed)
    data = Items(computing_s=rng.uniform(0.006, 0.012))
    watched_loop(loader(data, num_workers=CORES), log, epochs=1, step_s=0.005)


def decode_bound(log: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    watched_loop(loader(Items(computing_s=rng.uniform(0.008, 0.015)), num_workers=CORES), log, epochs=2, step_s=0.005)


class InPieces(Items):
    """Samples of many tensors, each of which a worker hands over by itself."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.tensors = tensors

    def __getitem__(self, index: int) -> Any:
        return {f"tensor{number}": torch.zeros(8) for number in range(self.tensors)}


def slow_hand_over(log: str, seed: int) -> None:
    data = InPieces(int(np.random.default_rng(seed).integers(150, 250)))
    watched_loop(loader(data, num_workers=CORES), log, epochs=2)


def late_epochs(log: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    slow_start = rng.uniform(0.4, 1.0)
    made = loader(Items(n=160), persistent_workers=False, worker_init_fn=lambda _: time.sleep(slow_start))
    watched_loop(made, log, epochs=6)


def cost_swing(log: str, seed: int) -> None:
    rng = np.random.default_rng(seed)

    def size() -> tuple[int, int]:
        side = int(np.clip(rng.lognormal(5.0, 0.9), 32, 2500))
        return side, side

    with data_set(rng, 320, size) as folder:
        with gp.Loader(folder, gp.Recipe.train(size=64), batch_size=4, shuffle=True, backend="torchvision") as mine:
            watched_loop(mine, log, epochs=3, step_s=0.001)


def rising_memory(log: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    kept: list[Any] = []
    rows = int(rng.uniform(30, 120)) * 1000
    watched_loop(loader(Items()), log, each=lambda _: kept.append(np.ones(rows)), trace_memory=bool(seed % 2))


def rising_files(log: str, seed: int) -> None:
    per_epoch = int(np.random.default_rng(seed).integers(1, 5))
    held: list[Any] = []
    each_epoch(log, lambda: held.extend(open(__file__) for _ in range(per_epoch)))
    for file in held:
        file.close()


def rising_threads(log: str, seed: int) -> None:
    per_epoch = int(np.random.default_rng(seed).integers(1, 4))
    stop = threading.Event()

    def more() -> None:
        for _ in range(per_epoch):
            threading.Thread(target=stop.wait, daemon=True).start()

    each_epoch(log, more)
    stop.set()


def rising_processes(log: str, seed: int) -> None:
    del seed
    held: list[Any] = []

    def more() -> None:  # an iterator that is never finished keeps its workers
        unfinished = iter(loader(Items(), num_workers=1, persistent_workers=False))
        next(unfinished)
        held.append(unfinished)

    each_epoch(log, more)


def each_epoch(log: str, more: Callable[[], object]) -> None:
    made = loader(Items(n=240))
    with gp.watch(made, every=0, log=log, resources_s=LOOK_S) as watched:
        for _ in range(6):
            more()
            for _batch in watched:
                time.sleep(STEP_S)


def two_ranks(condition: str, log: str, seed: int) -> None:
    """Two processes that meet in an all-reduce after every step."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", __file__]
    subprocess.run(
        [*command, "--condition", condition, "--seed", str(seed), "--write", log], check=True, capture_output=True
    )


def rank_loop(log: str, data: Items, **more: Any) -> None:
    import torch.distributed as dist

    watched_loop(loader(data, num_workers=1, **more), log, each=lambda _: dist.all_reduce(torch.zeros(1)), epochs=2)
    dist.destroy_process_group()


def uneven_ranks(log: str, seed: int) -> None:
    two_ranks("one_of_them_slow", log, seed)


def one_of_them_slow(log: str, seed: int) -> None:
    torch.distributed.init_process_group("gloo")
    slow = seed % 2 == torch.distributed.get_rank()
    data = Items(0.008 if slow else 0.0)
    rank_loop(log, data, shuffle=False, sampler=DistributedSampler(data))


def two_even_ranks(log: str, seed: int) -> None:
    torch.distributed.init_process_group("gloo")
    data = Items(np.random.default_rng(seed).uniform(0.0, 0.0005, 640))
    rank_loop(log, data, shuffle=False, sampler=DistributedSampler(data))


def not_sharded(log: str, seed: int) -> None:
    two_ranks("whole_data_set", log, seed)


def whole_data_set(log: str, seed: int) -> None:
    torch.distributed.init_process_group("gloo")
    rank_loop(log, Items(n=320), shuffle=bool(seed % 2))


def sudden_waits(log: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    asleep = np.zeros(640)
    asleep[rng.choice(np.arange(80, 640), 4, replace=False)] = rng.uniform(1.0, 2.0, 4)
    watched_loop(loader(Items(asleep), shuffle=False), log, epochs=2)


class Threaded(Items):
    """Work that starts threads of its own in each worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        torch.set_num_threads(8)
        (torch.ones(700, 700) @ torch.ones(700, 700)).sum()
        return torch.zeros(3, 64, 64), index


def oversubscribed(log: str, seed: int) -> None:
    del seed
    watched_loop(loader(Threaded(n=320), num_workers=CORES), log, epochs=2, step_s=0.001)


def full_shared_memory(log: str, seed: int) -> None:
    """In a namespace of its own, where /dev/shm has 64 MB."""
    own = [sys.executable, __file__, "--condition", "in_small_shared_memory", "--seed", str(seed), "--write", log]
    mount = 'mount -t tmpfs -o size=64m tmpfs /dev/shm && exec "$@"'
    subprocess.run(["unshare", "--mount", "sh", "-c", mount, "sh", *own], check=True, capture_output=True)


def in_small_shared_memory(log: str, seed: int) -> None:
    side = int(np.random.default_rng(seed).integers(285, 297))  # 8 of them are 8 MB, and 6 batches wait beside one
    watched_loop(loader(Items(pixels=side), num_workers=3), log, epochs=1, step_s=0.05)


def pinned_without_gpu(log: str, seed: int) -> None:
    del seed
    watched_loop(loader(Items(0.0002), pin_memory=True), log)


class SlowSource(torch.utils.data.Dataset):  # type: ignore[type-arg]
    """Small files, each of which takes its time to open, read one by one."""

    def __init__(self, source: Any, read_s: float) -> None:
        self._source, self._read_s = source, read_s
        self.uri, self.columns, self.fingerprint, self.labels = source.uri, (), source.fingerprint, source.labels

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Any:
        time.sleep(self._read_s)
        return self._source[index]

    def close(self) -> None:
        self._source.close()


def small_reads(log: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with data_set(rng, 320, lambda: (48, 64)) as folder:
        source = SlowSource(gp.open_source(folder), rng.uniform(0.05, 0.1))
        with gp.Loader(source, gp.Recipe.train(size=32), batch_size=8, shuffle=True) as mine:
            watched_loop(mine, log, epochs=2)


def deep_prefetch(log: str, seed: int) -> None:
    """Batches that wait hold a quarter of the memory there is."""
    depth, side = 15, int(np.random.default_rng(seed).integers(900, 1000))
    images = int(0.25 * (memory_limit_bytes() or 0) / (2 * depth) / (3 * side * side * 4)) + 1
    made = loader(Items(n=60 * images, pixels=side), batch_size=images, prefetch_factor=depth)
    watched_loop(made, log, epochs=1, step_s=0.5)


def wrong_global_batch(log: str, seed: int) -> None:
    del seed
    watched_loop(loader(Items(0.0002)), log, epochs=1, global_batch_size=64)


CONDITIONS: dict[str, Callable[[str, int], None]] = {
    "too-few-workers": too_few_workers,
    "blocked-reads": blocked_reads,
    "crowded": crowded,
    "decode-bound": decode_bound,
    "slow-hand-over": slow_hand_over,
    "late-epochs": late_epochs,
    "cost-swing": cost_swing,
    "rising-memory": rising_memory,
    "rising-files": rising_files,
    "rising-threads": rising_threads,
    "rising-processes": rising_processes,
    "uneven-ranks": uneven_ranks,
    "not-sharded": not_sharded,
    "sudden-waits": sudden_waits,
    "oversubscribed": oversubscribed,
    "full-shared-memory": full_shared_memory,
    "pinned-without-gpu": pinned_without_gpu,
    "small-reads": small_reads,
    "deep-prefetch": deep_prefetch,
    "wrong-global-batch": wrong_global_batch,
}
# What runs in processes that a condition starts.
PARTS: dict[str, Callable[[str, int], None]] = {
    "one_of_them_slow": one_of_them_slow,
    "two_even_ranks": two_even_ranks,
    "whole_data_set": whole_data_set,
    "in_small_shared_memory": in_small_shared_memory,
}
KNOWN = {"healthy": healthy} | CONDITIONS | PARTS


class data_set:
    """A folder of JPEGs of given sizes, for as long as it is needed."""

    def __init__(self, rng: np.random.Generator, n: int, size: Callable[[], tuple[int, int]]) -> None:
        self._rng, self._n, self._size = rng, n, size

    def __enter__(self) -> str:
        from PIL import Image

        self._folder = tempfile.TemporaryDirectory()
        for number in range(self._n):
            height, width = self._size()
            coarse = self._rng.integers(0, 256, (max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
            path = Path(self._folder.name) / f"class{number % 2}" / f"{number:05d}.jpg"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(coarse).resize((width, height)).save(path, quality=90)
        return self._folder.name

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()


@contextlib.contextmanager
def other_jobs(count: int) -> Iterator[None]:
    """Processes that compute, as those of another user."""
    jobs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for job in jobs:
            job.kill()
            job.wait()


def findings(name: str, seed: int, folder: Path) -> list[str]:
    """The codes that are found in one run, in a process of its own."""
    log = str(folder / f"{name}-{seed}-{{rank}}.jsonl")
    # Forked, so that none of the 250 runs imports torch again.
    child = multiprocessing.get_context("fork").Process(target=KNOWN[name], args=(log, seed))
    with other_jobs(2 * CORES if name == "crowded" else 0):
        child.start()
        child.join()
    if child.exitcode:
        raise RuntimeError(f"{name}, seed {seed}: exit status {child.exitcode}")
    return [finding.code for finding in gp.diagnose(*sorted(folder.glob(f"{name}-{seed}-*.jsonl"))).findings]


def judged(names: list[str], seeds: range) -> Iterator[tuple[str, dict[str, Any]]]:
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            runs = [findings(name, seed, Path(folder)) for seed in seeds]
            wrong = [run for run in runs if run[:1] != ([] if name == "healthy" else [name])]
            found: dict[str, Any] = {"runs": len(runs), "named_first": len(runs) - len(wrong), "otherwise": wrong}
            if name != "healthy":
                found["found"] = sum(name in run for run in runs)
            print(name, json.dumps(found), file=sys.stderr, flush=True)
            yield name, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=100)
    parser.add_argument("--only", help="names of conditions, with commas between them")
    parser.add_argument("--condition", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.condition:
        KNOWN[arguments.condition](arguments.write, arguments.seed)
        return
    names = arguments.only.split(",") if arguments.only else [*CONDITIONS, "healthy"]
    first = arguments.first_seed
    counts = dict(judged([name for name in names if name != "healthy"], range(first, first + arguments.repetitions)))
    if "healthy" in names:
        counts |= dict(judged(["healthy"], range(first, first + HEALTHY_KINDS * arguments.repetitions)))
    planted = [each for name, each in counts.items() if name != "healthy"]
    total = sum(each["runs"] for each in planted)
    measured: dict[str, Any] = {"first_seed": first, "conditions": counts}
    if total:
        measured["named_first_share"] = sum(each["named_first"] for each in planted) / total
        measured["found_share"] = sum(each["found"] for each in planted) / total
    if "healthy" in counts:
        runs = counts["healthy"]
        measured["false_alarm_share"] = 1 - runs["named_first"] / runs["runs"]
    if arguments.only:
        print(json.dumps(measured, indent=2))
    else:
        write_result("diagnose", measured)


if __name__ == "__main__":
    main()
