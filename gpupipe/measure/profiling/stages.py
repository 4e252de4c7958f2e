"""Each stage of the pipeline alone, on samples that are held in memory, by one thread and by several.

A backend does not let its own stages be run one by one, so these are differences: it is measured on encoded images, on
decoded ones, and on decoded ones without colour steps.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from itertools import cycle, islice

from gpupipe import backends, decode
from gpupipe.backends.base import Applied
from gpupipe.backends.intra_op import use_one_intra_op_thread
from gpupipe.errors import DecodeError, RecordError
from gpupipe.headers import Header, scan_record, upright_size
from gpupipe.loader import Loader
from gpupipe.plan import make_plan
from gpupipe.recipe import Recipe
from gpupipe.records import Plan, Record
from gpupipe.sources.base import Source

Say = Callable[[str], None]

# Decoded pixels are kept for so many samples at most.
MOST_SAMPLES = 128
Rates = dict[int, float]
"""Threads -> images a second."""


class Samples:
    """What the stages work on.

    Args:
        source: Where they come from.
        indices: Which ones; bad ones are left out.
        recipe: What is done to them.

    Attributes:
        records, headers: One for each.
        pixels, pixel_headers: The same, decoded.
        indices: Of those kept.
    """

    def __init__(self, source: Source, indices: Sequence[int], recipe: Recipe) -> None:
        self.source, self.recipe = source, recipe
        self.records: list[Record] = []
        self.headers: list[Header] = []
        self.pixels: list[Record] = []
        self.pixel_headers: list[Header] = []
        self.indices: list[int] = []
        for index in indices[:MOST_SAMPLES]:
            try:
                record = source[index]
                header = scan_record(record)
                pixels = decode.rgb(record.data, header)
            except (RecordError, DecodeError):
                continue
            self.indices.append(index)
            self.records.append(record)
            self.headers.append(header)
            self.pixels.append(replace(record, data=pixels))
            # With the orientation of the file, as that is what the backend has behind its decoder.
            self.pixel_headers.append(replace(scan_record(self.pixels[-1]), orientation=header.orientation))


def stage_rates(samples: Samples, loader: Loader, threads: Sequence[int], seconds: float, say: Say) -> dict[str, Rates]:
    """Images a second of each stage alone, in the order of the work.

    Args:
        samples: At least one.
        loader: Whose stages they are.
        threads: At which concurrencies.
        seconds: For each measurement.
        say: Is told what is going on.
    """
    size = loader.batch_size
    found: dict[str, Rates] = {}
    for name, make in (("read", _read), ("header", _header), ("plan", _plan)):
        say(f"{name} alone")
        work = make(samples, size)
        found[name] = {count: _rate(work, count, seconds) for count in threads}

    def measured(recipe: Recipe, *, encoded: bool) -> Rates:
        made = {}
        for count in threads:
            made[count] = _backend_rate(samples, recipe, loader, count, seconds, encoded=encoded)
        return made

    say("decode, resize and augment")
    whole, decoded = (measured(samples.recipe, encoded=encoded) for encoded in (True, False))
    found["decode"] = _without(whole, decoded)
    geometry = replace(samples.recipe, steps=tuple(s for s in samples.recipe.steps if s.STAGE not in _AUGMENTING))
    if geometry.steps == samples.recipe.steps:
        return found | {"resize": decoded}
    resized = measured(geometry, encoded=False)
    return found | {"resize": resized, "augment": _without(decoded, resized)}


_AUGMENTING = ("colour", "operation", "erase")


def _without(all_of_it: Rates, rest: Rates) -> Rates:
    """The speed of what takes the time that all of it takes more than the rest."""
    return {count: 1 / max(1 / all_of_it[count] - 1 / rest[count], _LEAST_S) for count in all_of_it}


_LEAST_S = 1e-6  # an image; smaller differences are noise


Work = Callable[[int], int]
"""Does the n-th piece of work, and tells how many images it was."""


def _read(samples: Samples, _: int) -> Work:
    def work(number: int) -> int:
        record = samples.source[samples.indices[number % len(samples.indices)]]
        bytes(record.data)  # a view of a file is read when it is looked at
        return 1

    return work


def _header(samples: Samples, _: int) -> Work:
    def work(number: int) -> int:
        scan_record(samples.records[number % len(samples.records)])
        return 1

    return work


def _plan(samples: Samples, batch_size: int) -> Work:
    chosen = list(islice(cycle(range(len(samples.records))), batch_size))
    sizes = [upright_size(samples.headers[row], samples.recipe.exif) for row in chosen]

    def work(number: int) -> int:
        make_plan(samples.recipe, seed=number, epoch=0, indices=chosen, sizes=sizes)
        return batch_size

    return work


def _rate(work: Work, threads: int, seconds: float) -> float:
    """Images a second of so many threads that do nothing else."""
    stop = threading.Event()
    ready = threading.Barrier(threads + 1)

    def run(offset: int) -> int:
        use_one_intra_op_thread()
        work(offset)
        ready.wait()
        done, number = 0, offset
        while not stop.is_set():
            number += threads
            done += work(number)
        return done

    with ThreadPoolExecutor(threads, thread_name_prefix="gpupipe-profile") as pool:
        counts = [pool.submit(run, offset) for offset in range(threads)]
        try:
            ready.wait()
            begin = time.perf_counter()
            time.sleep(seconds)
        finally:
            stop.set()
        total = sum(count.result() for count in counts)
        return total / (time.perf_counter() - begin)


def _backend_rate(
    samples: Samples, recipe: Recipe, loader: Loader, threads: int, seconds: float, *, encoded: bool
) -> float:
    """Images a second of a backend, from files that are in memory, or from their pixels."""
    made = backends.create(
        loader.backend.name,
        recipe,
        device=loader.backend.device,
        batch_size=loader.batch_size,
        options=replace(loader.options, threads=threads),
    )
    try:
        batches = _batches(samples, recipe, loader.batch_size, encoded=encoded)
        running: deque[Future[Applied]] = deque()

        def one() -> int:
            running.append(made.submit(*next(batches)))
            return len(running.popleft().result().images) if len(running) > loader.options.prefetch else 0

        for _ in range(loader.options.prefetch + 2):  # threads start, kernels are loaded
            one()
        begin, done = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds or not done:
            done += one()
        return done / (time.perf_counter() - begin)
    finally:
        made.close()


def _batches(
    samples: Samples, recipe: Recipe, batch_size: int, *, encoded: bool
) -> Iterator[tuple[list[Record], list[Header], Plan]]:
    """What a backend is given; pixels stand as they are stored, as if they had just been decoded."""
    records, headers = (samples.records, samples.headers) if encoded else (samples.pixels, samples.pixel_headers)
    rows = cycle(range(len(records)))
    for epoch in itertools.count():
        chosen = list(islice(rows, batch_size))
        plan = make_plan(
            recipe,
            seed=0,
            epoch=epoch,
            indices=[samples.indices[row] for row in chosen],
            sizes=[upright_size(headers[row], recipe.exif) for row in chosen],
        )
        yield [records[row] for row in chosen], [headers[row] for row in chosen], plan
