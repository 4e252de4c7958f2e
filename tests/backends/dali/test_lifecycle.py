"""Making, closing and abandoning a backend; who owns the batches; what an import costs."""

import dataclasses
import gc
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from concurrent.futures import CancelledError

import numpy as np
import pytest
import torch

from gpupipe import Output, Recipe
from gpupipe.backends.base import Options
from gpupipe.backends.dali import DaliBackend
from gpupipe.backends.dali.engine import Engine
from gpupipe.errors import BackendError, BackendUnavailable, ConfigError
from tests import images
from tests.backends.dali.common import CPU, backend, planned, records_of
from tests.conftest import REPO

RECIPE = Recipe.train(size=32)


@pytest.fixture(scope="module")
def records():
    files = [images.jpeg(images.photo(50 + n, 80 - n, n)) for n in range(7)]
    return records_of([*files, images.encode(images.photo(40, 50), "PNG")])


def our_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpupipe-dali")]


@pytest.mark.parametrize("output", [Output(), Output(dtype="float16", memory_format="channels_last")], ids=str)
def test_backend_batches_stay_the_callers_over_later_runs_close_and_collection(records, output):
    recipe = dataclasses.replace(RECIPE, output=output)
    headers, plan = planned(recipe, records)
    held, copies = [], []
    with backend(recipe, batch_size=8) as dali:
        for number in range(60):
            rows = slice(0, 8 - number % 4)
            found = dali.submit(records[rows], headers[rows], plan.take(rows)).result().images
            if number % 3 == 0:
                held.append(found)
                copies.append(found.clone())
            del found
    assert all(map(torch.equal, held, copies))
    del dali
    gc.collect()
    with backend(recipe, batch_size=8) as another:
        another.submit(records, headers, plan).result()
    assert all(map(torch.equal, held, copies))


def test_backend_batches_can_be_written_to(records):
    headers, plan = planned(RECIPE, records)
    with backend(RECIPE) as dali:
        first = dali.submit(records, headers, plan).result().images
        expected = first.clone()
        first.fill_(7)
        again = dali.submit(records, headers, plan).result().images
        assert torch.equal(again, expected)
        assert (first == 7).all()


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_backend_output_is_a_plain_tensor_of_the_type_asked_for(records, dtype, memory_format):
    headers, plan = planned(RECIPE, records)
    with backend(RECIPE) as dali:
        expected = dali.submit(records, headers, plan).result().images
    recipe = dataclasses.replace(RECIPE, output=Output(dtype=dtype, memory_format=memory_format))
    with backend(recipe) as dali:
        found = dali.submit(records, headers, plan).result().images
    assert type(found) is torch.Tensor
    assert (found.shape, found.device, found.dtype) == ((8, 3, 32, 32), CPU, getattr(torch, dtype))
    assert found.is_contiguous(memory_format=getattr(torch, memory_format.replace("contiguous", "contiguous_format")))
    assert torch.equal(found, expected.to(found.dtype))


def test_backend_any_number_of_rows_up_to_the_batch_size_is_a_batch(records):
    headers, plan = planned(RECIPE, records)
    with backend(RECIPE, batch_size=8) as dali:
        expected = dali.submit(records, headers, plan).result().images
        for count in (1, 8, 3, 7, 1):
            some = slice(0, count)
            found = dali.submit(records[some], headers[some], plan.take(some)).result().images
            assert torch.equal(found, expected[some])
        for count in (0, 9):
            rows = np.arange(count) % 8
            with pytest.raises(ConfigError, match="from 1 to 8"):
                dali.submit([records[i] for i in rows], [headers[i] for i in rows], plan.take(rows))
        with pytest.raises(ConfigError, match="7 headers"):
            dali.submit(records, headers[:7], plan)


def test_backend_memoryviews_and_unaligned_slices_are_read_in_place(records):
    headers, plan = planned(RECIPE, records)
    packed = b"x".join(record.data for record in records)
    views, position = [], 0
    for record in records:
        views.append(dataclasses.replace(record, data=memoryview(packed)[position : position + len(record.data)]))
        position += len(record.data) + 1
    with backend(RECIPE) as dali:
        expected = dali.submit(records, headers, plan).result().images
        assert torch.equal(dali.submit(views, headers, plan).result().images, expected)
        writeable = [dataclasses.replace(record, data=memoryview(bytearray(record.data))) for record in records]
        assert torch.equal(dali.submit(writeable, headers, plan).result().images, expected)


def test_backend_submit_returns_before_the_batch_is_made(records):
    headers, plan = planned(RECIPE, records)
    with backend(RECIPE) as dali:
        futures = [dali.submit(records, headers, plan) for _ in range(30)]
        assert not futures[-1].done()
        assert all(future.result().images.shape[0] == 8 for future in futures)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_engine_has_at_most_prefetch_runs_in_dali(records, prefetch, monkeypatch):
    headers, plan = planned(RECIPE, records)
    running, most = [0], [0]
    schedule, outputs = Engine._schedule, Engine._outputs

    def counted_schedule(self, arrays):
        running[0] += 1
        most[0] = max(most[0], running[0])
        schedule(self, arrays)

    def counted_outputs(self):
        running[0] -= 1
        return outputs(self)

    monkeypatch.setattr(Engine, "_schedule", counted_schedule)
    monkeypatch.setattr(Engine, "_outputs", counted_outputs)
    with backend(RECIPE, prefetch=prefetch) as dali:
        for future in [dali.submit(records, headers, plan) for _ in range(12)]:
            future.result()
    assert most[0] == prefetch


def test_close_cancels_what_is_unfinished_and_ends_all_threads(records):
    headers, plan = planned(RECIPE, records)
    before = len(our_threads())
    dali = DaliBackend(RECIPE, device=CPU, batch_size=8, options=Options(threads=1))
    futures = [dali.submit(records, headers, plan) for _ in range(50)]
    dali.close()
    dali.close()
    deadline = time.monotonic() + 5
    while len(our_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)  # decoding threads end after the image they are at
    assert len(our_threads()) <= before
    assert all(future.done() for future in futures)
    assert futures[-1].cancelled()
    with pytest.raises(CancelledError):
        futures[-1].result()
    with pytest.raises(BackendError, match="closed"):
        dali.submit(records, headers, plan)


def test_close_while_dali_hangs_cancels_what_is_unfinished_and_gives_up_waiting(records, monkeypatch):
    headers, plan = planned(RECIPE, records)
    hanging, go_on = threading.Event(), threading.Event()
    outputs = Engine._outputs

    def hang(self):
        hanging.set()
        go_on.wait()
        return outputs(self)

    monkeypatch.setattr(Engine, "_outputs", hang)
    monkeypatch.setattr("gpupipe.backends.dali.engine.JOIN_TIMEOUT_S", 0.05)
    with backend(RECIPE) as dali:
        futures = [dali.submit(records, headers, plan) for _ in range(3)]
        hanging.wait()
        dali.close()
        assert all(future.cancelled() for future in futures)
        go_on.set()
        dali._engine._thread.join()


def test_submit_future_that_is_cancelled_leaves_the_others_alone(records):
    headers, plan = planned(RECIPE, records)
    with backend(RECIPE) as dali:
        expected = dali.submit(records, headers, plan).result().images
        futures = [dali.submit(records, headers, plan) for _ in range(10)]
        cancelled = [future.cancel() for future in futures[::3]]
        assert all(cancelled[1:])
        for number, future in enumerate(futures):
            if number % 3:
                assert torch.equal(future.result().images, expected)


def test_backend_that_is_abandoned_is_collected_and_its_threads_end(records):
    headers, plan = planned(RECIPE, records)
    before = len(our_threads())
    dali = DaliBackend(RECIPE, device=CPU, batch_size=8, options=Options(threads=1))
    dali.submit(records, headers, plan).result()
    gone = weakref.ref(dali)
    del dali
    gc.collect()
    assert gone() is None
    deadline = time.monotonic() + 5
    while len(our_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(our_threads()) <= before


def test_engine_that_cannot_feed_fails_its_batches_and_takes_no_more(records, monkeypatch):
    headers, plan = planned(RECIPE, records)
    with backend(RECIPE) as dali:
        dali.submit(records, headers, plan).result()
        monkeypatch.setattr(Engine, "_schedule", lambda *_: [][0])
        error = dali.submit(records, headers, plan).exception(timeout=10)
        assert isinstance(error, BackendError)
        assert isinstance(error.__cause__, IndexError)
        with pytest.raises(BackendError, match="lost its thread"):
            dali.submit(records, headers, plan)


# What needs an interpreter of its own.


def python(code):
    script = f"import sys; sys.path.insert(0, {str(REPO)!r})\n" + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)


MAKE = """
import torch
from gpupipe import Recipe, make_plan
from gpupipe.backends.base import Options
from gpupipe.backends.dali import DaliBackend
from gpupipe.headers import scan
from gpupipe.records import Record
from tests import images
recipe = Recipe.train(size=32)
files = [images.jpeg(images.photo(300, 400)), images.encode(images.photo(400, 400), "PNG")]
records = [Record(data, 0, i, str(i)) for i, data in enumerate(files)]
headers = [scan(data) for data in files]
plan = make_plan(recipe, seed=0, epoch=0, indices=[0, 1], sizes=[(300, 400), (400, 400)])
dali = DaliBackend(recipe, device=torch.device("cpu"), batch_size=8, options=Options(threads=1))
"""


@pytest.mark.parametrize(
    "end",
    [
        "kept = [dali.submit(records, headers, plan) for _ in range(20)]",
        "kept = [dali.submit(records, headers, plan) for _ in range(20)]; dali.cycle = dali; del dali",
        "kept = [dali.submit(records, headers, plan).result() for _ in range(5)]; dali.close()",
    ],
    ids=["busy", "abandoned in a cycle", "closed, batches held"],
)
def test_interpreter_ends_without_hanging_or_crashing_with_a_backend(end):
    done = python(MAKE + end + "\nprint('end')")
    assert (done.returncode, done.stdout.strip(), done.stderr.strip()) == (0, "end", "")


def test_package_import_leaves_heavy_libraries_alone_until_a_backend_is_made():
    done = python(
        """
        from gpupipe.backends.dali import DaliBackend
        loaded = {name for name in ("nvidia.dali", "torchvision") if name in sys.modules}
        assert not loaded, loaded
        import torch
        from gpupipe import Recipe
        from gpupipe.backends.base import Options
        DaliBackend(Recipe.train(), device=torch.device("cpu"), batch_size=2, options=Options()).close()
        assert "nvidia.dali" in sys.modules
        assert "torchvision" not in sys.modules
        """
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("error", [ModuleNotFoundError("No module named 'nvidia'"), OSError("libdali.so: broken")])
def test_backend_without_dali_says_what_is_missing_and_how_to_get_it(error, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("nvidia.dali")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "gpupipe.backends.dali.graph", raising=False)
    package = sys.modules["gpupipe.backends.dali"]
    monkeypatch.delattr(package, "graph", raising=False)

    class Refuses:
        def find_spec(self, name, *_):
            if name.startswith("nvidia"):
                raise error

    monkeypatch.setattr(sys, "meta_path", [Refuses(), *sys.meta_path])
    with pytest.raises(BackendUnavailable, match=r"nvidia\.dali cannot be imported") as caught:
        DaliBackend(RECIPE, device=CPU, batch_size=2, options=Options())
    assert caught.value.backend == "dali"
    assert caught.value.missing == "nvidia.dali"
    assert "pip install nvidia-dali-cuda120" in caught.value.install
    assert "pip install nvidia-dali-cuda120" in str(caught.value)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("device", ["cuda:99", "mps", "cuda"])
def test_backend_on_a_device_that_is_not_here_is_unavailable(device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("there is a CUDA device here")
    with pytest.raises(BackendUnavailable, match=f'device="{device}" is not here') as caught:
        DaliBackend(RECIPE, device=torch.device(device), batch_size=2, options=Options())
    assert caught.value.missing == "a CUDA device"
    assert "NVIDIA GPU" in caught.value.install
