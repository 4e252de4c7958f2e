"""Worker threads: outcome of every batch, whatever happens; nothing left behind. The rows are filled by stand-ins."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from concurrent.futures import CancelledError, wait

import pytest
import torch

from gpupipe import CenterCrop, Recipe, make_plan
from gpupipe.backends.base import Options
from gpupipe.backends.thread_pool import ThreadPoolBackend
from gpupipe.errors import BackendError, ConfigError, DecodeError
from gpupipe.headers import Header
from gpupipe.records import Record
from tests.conftest import REPO

RECIPE = Recipe(steps=(CenterCrop(4),))
SECONDS = 30  # more than anything here takes


def fill_with_index(record, out):
    out.fill_(record.index)


def new_backend(work=fill_with_index, threads=2, batch_size=4):
    return ThreadPoolBackend(
        "stand-in",
        lambda record, *rest: work(record, rest[-1]),
        RECIPE,
        device=torch.device("cpu"),
        batch_size=batch_size,
        options=Options(threads=threads),
    )


def batch(*indices):
    records = [Record(b"", label=0, index=i, key=f"key {i}", path=f"/p/{i}") for i in indices]
    headers = [Header("JPEG", 4, 4, 1, native=True) for _ in indices]
    return records, headers, make_plan(RECIPE, seed=0, epoch=0, indices=list(indices), sizes=[(4, 4)] * len(indices))


def workers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpupipe-")]


@pytest.fixture
def make():
    made = []

    def make_backend(work=fill_with_index, **arguments):
        backend = new_backend(work, **arguments)
        made.append(backend)
        return backend

    yield make_backend
    for backend in made:
        backend.close()
    assert not workers()


def values(future):
    return future.result(SECONDS).images[:, 0, 0, 0].tolist()


def test_submit_many_batches_fills_each_with_its_own_rows(make):
    backend = make(threads=4, batch_size=3)
    futures = [backend.submit(*batch(n, n + 1, n + 2)) for n in range(50)]
    futures.append(backend.submit(*batch(77)))
    assert [values(future) for future in futures] == [[n, n + 1, n + 2] for n in range(50)] + [[77]]
    assert backend.name == "stand-in"


def test_submit_next_batch_is_finished_while_one_row_of_the_first_hangs(make):
    release = threading.Event()

    def work(record, out):
        if record.index == 1:
            assert release.wait(SECONDS)
        out.fill_(record.index)

    backend = make(work)
    first, second = backend.submit(*batch(0, 1, 2)), backend.submit(*batch(10, 11, 12))
    assert values(second) == [10, 11, 12]
    assert not first.done()
    release.set()
    assert values(first) == [0, 1, 2]


def test_submit_rows_that_cannot_be_decoded_are_errors_and_zeros(make):
    def work(record, out):
        out.fill_(record.index)
        if record.index in (6, 8):
            raise DecodeError("broken", uri="x")

    applied = make(work).submit(*batch(5, 6, 7, 8)).result(SECONDS)
    assert applied.images[:, 0, 0, 0].tolist() == [5, 0, 7, 0]
    assert not applied.images[1].any()
    assert sorted(applied.errors) == [1, 3]
    error = applied.errors[3]
    assert (error.index, error.key, error.path, error.backend, error.uri) == (8, "key 8", "/p/8", "stand-in", "x")
    assert isinstance(error.__cause__, DecodeError)


def test_submit_undecodable_rows_leave_no_cycle_that_keeps_the_batch(make):
    def work(*_):
        try:
            raise OSError("truncated")
        except OSError as error:
            raise DecodeError("broken") from error

    backend = make(work)
    backend.submit(*batch(1)).result(SECONDS)
    gc.collect()
    gc.disable()
    try:
        for _ in range(10):
            backend.submit(*batch(1)).result(SECONDS)
        assert sum("_Batch" in str(type(thing)) for thing in gc.get_objects()) <= 1
    finally:
        gc.enable()


def test_submit_other_exception_is_a_backend_error_of_that_batch_alone(make):
    def work(record, out):
        out.fill_(record.index)
        if record.index == 2:
            raise ZeroDivisionError("oh")

    backend = make(work)
    good, bad, later = (backend.submit(*batch(*rows)) for rows in ((0, 1), (2, 3), (4, 5)))
    error = bad.exception(SECONDS)
    assert isinstance(error, BackendError)
    assert (error.backend, error.stage) == ("stand-in", "apply")
    assert isinstance(error.__cause__, ZeroDivisionError)
    assert "the stand-in backend failed on record 2 ('key 2' of /p/2): ZeroDivisionError('oh')" in str(error)
    assert values(good) == [0, 1]
    assert values(later) == [4, 5]


def test_submit_worker_that_dies_fails_all_batches_and_hangs_nobody(make):
    go = threading.Event()

    def work(*_):
        assert go.wait(SECONDS)
        raise SystemExit

    backend = make(work)
    futures = [backend.submit(*batch(0, 1, 2)) for _ in range(5)]
    go.set()
    for future in futures:
        error = future.exception(SECONDS)
        assert isinstance(error, BackendError)
        assert error.stage == "worker"
        assert isinstance(error.__cause__, SystemExit)
    with pytest.raises(BackendError, match="lost a worker thread: SystemExit"):
        backend.submit(*batch(0))


def test_init_worker_that_cannot_start_is_a_backend_error(make, monkeypatch):
    def fail():
        raise OSError("no such thing")

    monkeypatch.setattr("gpupipe.backends.thread_pool.use_one_intra_op_thread", fail)
    with pytest.raises(BackendError, match="lost a worker thread: OSError"):
        make()
    assert not workers()


def test_init_threads_that_cannot_be_had_is_a_backend_error(make, monkeypatch):
    start, tries = threading.Thread.start, []

    def fail_later(thread):
        if thread.name.startswith("gpupipe-"):
            tries.append(thread)
            if len(tries) == 3:
                raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", fail_later)
    with pytest.raises(BackendError, match="could start 2 of 5 threads: can't start new thread"):
        make(threads=5)
    assert not workers()


@pytest.mark.parametrize(("records", "headers", "plan"), [(0, 0, 0), (5, 5, 5), (2, 1, 2), (2, 2, 1)])
def test_submit_counts_that_make_no_batch_are_a_config_error(make, records, headers, plan):
    whole = batch(*range(5))
    with pytest.raises(ConfigError, match="make no batch of this backend: it takes from 1 to 4"):
        make().submit(whole[0][:records], whole[1][:headers], whole[2].take(slice(plan)))


def test_cancel_skips_the_rows_that_are_left(make):
    begun, release, seen = threading.Event(), threading.Event(), []

    def work(record, _):
        seen.append(record.index)
        begun.set()
        assert release.wait(SECONDS)

    backend = make(work, threads=1)
    first, second = backend.submit(*batch(0, 1, 2)), backend.submit(*batch(3))
    assert begun.wait(SECONDS)
    assert first.cancel()
    release.set()
    assert second.result(SECONDS)
    assert wait([first], SECONDS).done == {first}
    with pytest.raises(CancelledError):
        first.result(SECONDS)
    assert seen == [0, 3]


def test_close_cancels_what_is_unfinished_and_leaves_no_thread(make):
    begun, release = threading.Event(), threading.Event()

    def work(*_):
        begun.set()
        assert release.wait(SECONDS)

    backend = make(work)
    futures = [backend.submit(*batch(0, 1, 2)) for _ in range(4)]
    assert begun.wait(SECONDS)
    assert len(workers()) == 2
    threading.Timer(0.1, release.set).start()
    backend.close()
    assert all(future.cancelled() for future in futures)
    assert wait(futures, SECONDS).not_done == set()
    assert not workers()
    backend.close()
    with pytest.raises(BackendError, match="stand-in backend is closed"):
        backend.submit(*batch(0))


def test_close_while_others_submit_leaves_no_future_without_outcome(make):
    for _ in range(30):
        backend = make()
        futures, refused = [], threading.Event()

        def submit(backend=backend, futures=futures, refused=refused):
            try:
                while True:
                    futures.append(backend.submit(*batch(0, 1)))
            except BackendError:
                refused.set()

        thread = threading.Thread(target=submit)
        thread.start()
        time.sleep(0.002)
        backend.close()
        thread.join(SECONDS)
        assert refused.is_set()
        assert wait(futures, SECONDS).not_done == set()


def test_close_from_a_callback_in_a_worker_ends_the_workers(make):
    backend = make()
    closed = threading.Event()

    def close(_):
        backend.close()
        closed.set()

    backend.submit(*batch(0)).add_done_callback(close)
    assert closed.wait(SECONDS)
    deadline = time.monotonic() + SECONDS
    while workers() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not workers()


def test_abandoned_backend_ends_its_threads():
    backend = new_backend(threads=3)
    future = backend.submit(*batch(1))
    assert values(future) == [1]
    assert len(workers()) == 3
    del backend
    gc.collect()
    assert not workers()


def run_python(code):
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPO,
    )


@pytest.mark.parametrize("work", ["idle", "busy"])
def test_unclosed_backend_lets_the_interpreter_end(work):
    found = run_python(f"""
        import numpy as np, torch
        from gpupipe import Recipe, make_plan
        from gpupipe.backends.base import Options
        from gpupipe.backends.torchvision_cpu import TorchvisionBackend
        from gpupipe.headers import scan
        from gpupipe.records import Record
        from tests import images
        recipe = Recipe.train(size=224, jitter=(0.4, 0.4, 0.4, 0.1))
        records = [Record(images.jpeg(images.photo(300, 300)), 0, 0, "a")] * 64
        headers = [scan(record.data) for record in records]
        plan = make_plan(recipe, seed=0, epoch=0, indices=range(64), sizes=[(300, 300)] * 64)
        backend = TorchvisionBackend(recipe, device=torch.device("cpu"), batch_size=64, options=Options(threads=4))
        futures = [backend.submit(records, headers, plan) for _ in range(20 if {work!r} == "busy" else 1)]
        futures[0].result()
        print("end")
    """)
    assert (found.returncode, found.stdout, found.stderr) == (0, "end\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_submit_in_a_forked_process_is_refused(make):
    backend = make()
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks with threads, which is the point here
        child = os.fork()
    if child == 0:
        try:
            backend.submit(*batch(0))
            message = "taken"
        except BackendError as error:
            message = str(error)
        os.write(write, message.encode())
        backend.close()
        os._exit(0)
    os.close(write)
    with open(read, "rb") as pipe:
        assert b"was made in another process" in pipe.read()
    os.waitpid(child, 0)
    assert values(backend.submit(*batch(3))) == [3]


def test_workers_torch_operators_have_one_intra_op_thread_for_ever(make):
    seen = []

    def work(*_):
        seen.append(torch.get_num_threads())

    before = torch.get_num_threads()
    backend = make(work, threads=3)
    try:
        backend.submit(*batch(0, 1, 2)).result(SECONDS)
        torch.set_num_threads(before + 3)  # the user's own business, later
        backend.submit(*batch(0, 1, 2)).result(SECONDS)
    finally:
        torch.set_num_threads(before)
    assert seen == [1] * 6


def test_backend_leaves_the_thread_numbers_of_all_others(make):
    def in_new_thread():
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join(SECONDS)
        return seen[0]

    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        backend = make(threads=4)
        values(backend.submit(*batch(0, 1)))
        assert (torch.get_num_threads(), in_new_thread()) == (3, 3)
        backend.close()
        assert (torch.get_num_threads(), in_new_thread()) == (3, 3)
    finally:
        torch.set_num_threads(before)
