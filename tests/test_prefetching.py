"""Prefetch: overlap, order, exceptions, early ends; and streams and lifetimes, where there is a GPU."""

import contextlib
import contextvars
import gc
import multiprocessing
import queue
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

import gpupipe as gp
from gpupipe.errors import BackendUnavailable, ConfigError
from gpupipe.prefetching import Prefetched


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "gpupipe-prefetch"]


def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.fixture(autouse=True)
def no_thread_left():
    yield
    gc.collect()
    assert wait_until(lambda: not threads()), threads()


class Numbers:
    """An iterable of tensors that tells how many it has made."""

    def __init__(self, count, delay_s=0.0, fail_at=None):
        self.count, self.delay_s, self.fail_at = count, delay_s, fail_at
        self.made, self.ended = 0, threading.Event()

    def __len__(self):
        return self.count

    def __iter__(self):
        try:
            for number in range(self.count):
                time.sleep(self.delay_s)
                if number == self.fail_at:
                    raise ZeroDivisionError(f"batch {number}")
                self.made += 1
                yield torch.tensor(number)
        finally:
            self.ended.set()


def values(batches):
    return [int(batch) for batch in batches]


def test_prefetch_yields_the_same_in_order_as_often_as_asked():
    batches = gp.prefetch(Numbers(20), "cpu")
    assert isinstance(batches, Prefetched)
    assert len(batches) == 20
    for _ in range(3):
        assert values(batches) == list(range(20))


def test_prefetch_of_nothing_and_of_no_length():
    assert list(gp.prefetch([], "cpu")) == []
    with pytest.raises(TypeError):
        len(gp.prefetch(iter([1]), "cpu"))
    finished = iter(gp.prefetch([1], "cpu"))
    assert list(finished) == [1]
    assert list(finished) == []


def test_prefetch_makes_batches_while_the_consumer_works():
    """Both take 20 ms a batch: one after the other 0.8 s, at once little over 0.4 s."""
    count, delay_s = 20, 0.02

    def taken_s(batches):
        start = time.perf_counter()
        for _ in batches:
            time.sleep(delay_s)
        return time.perf_counter() - start

    plain = taken_s(Numbers(count, delay_s))
    assert plain >= 2 * count * delay_s
    best = min(taken_s(gp.prefetch(Numbers(count, delay_s), "cpu")) for _ in range(3))
    assert best < 0.8 * plain


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetch_makes_depth_batches_ahead_and_no_more(depth):
    numbers = Numbers(10)
    batches = iter(gp.prefetch(numbers, "cpu", depth=depth))
    assert wait_until(lambda: numbers.made == depth)
    time.sleep(0.1)
    assert numbers.made == depth
    next(batches)
    assert wait_until(lambda: numbers.made == depth + 1)
    time.sleep(0.1)
    assert numbers.made == depth + 1


def test_exception_of_the_producer_comes_at_its_place_and_at_once():
    numbers = Numbers(10, fail_at=3)
    batches = iter(gp.prefetch(numbers, "cpu"))
    assert [int(next(batches)) for _ in range(3)] == [0, 1, 2]
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="batch 3") as raised:
        next(batches)
    assert time.monotonic() - start < 0.9  # not by the time-out of a wait
    assert "__iter__" in [entry.name for entry in raised.traceback]  # where it happened
    with pytest.raises(StopIteration):
        next(batches)


def test_exception_reaches_a_consumer_that_is_already_waiting():
    batches = iter(gp.prefetch(Numbers(1, delay_s=0.3, fail_at=0), "cpu"))
    start = time.monotonic()
    with pytest.raises(ZeroDivisionError):
        next(batches)
    assert time.monotonic() - start < 0.9


def test_exception_of_iter_comes_from_iter():
    with pytest.raises(TypeError):
        iter(gp.prefetch(3, "cpu"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, StopAsyncIteration])
def test_exceptions_that_are_no_errors_come_through(error):
    def producer():
        yield 1
        raise error

    batches = iter(gp.prefetch(producer(), "cpu"))
    assert next(batches) == 1
    with pytest.raises(error):
        next(batches)


def test_break_ends_the_thread_and_the_generator_and_frees_the_batches():
    held = []

    def producer():
        try:
            for number in range(100):
                batch = torch.full((4,), number)
                held.append(weakref.ref(batch))
                yield batch
                del batch
        finally:
            ended.set()

    ended = threading.Event()
    for batch in gp.prefetch(producer(), "cpu", depth=4):
        assert int(batch[0]) == 0
        break
    assert ended.wait(10)
    assert wait_until(lambda: not threads())
    assert len(held) <= 6
    del batch
    gc.collect()
    assert not [each for each in held if each() is not None]


def test_exception_of_the_consumer_ends_the_thread():
    numbers = Numbers(100)

    def train():
        for _ in gp.prefetch(numbers, "cpu"):
            raise RuntimeError("training")

    with pytest.raises(RuntimeError, match="training"):
        train()
    assert numbers.ended.wait(10)


def test_close_ends_every_pass_and_waits():
    numbers = Numbers(100)
    with gp.prefetch(numbers, "cpu") as batches:
        passes = [iter(batches), iter(batches)]
        assert [int(next(each)) for each in passes] == [0, 0]
        assert len(threads()) == 2
    assert not threads()
    for each in passes:
        with pytest.raises(StopIteration):
            next(each)
    batches.close()
    assert values(batches) == list(range(100))


def test_close_from_another_thread_frees_a_consumer_that_waits():
    release = threading.Event()

    def producer():
        yield 1
        release.wait(10)

    batches = gp.prefetch(producer(), "cpu")
    it, found = iter(batches), queue.Queue()
    assert next(it) == 1
    waiting = threading.Thread(target=lambda: found.put(next(it, "end")))
    waiting.start()
    time.sleep(0.1)
    closing = threading.Thread(target=batches.close)
    closing.start()
    assert found.get(timeout=5) == "end"
    release.set()
    closing.join(10)
    waiting.join(10)


def test_prefetched_batch_that_was_handed_out_is_not_kept():
    batches = iter(gp.prefetch([{"a": torch.ones(1)}], "cpu"))
    batch = next(batches)
    held = weakref.ref(batch["a"])
    del batch
    batches.close()
    del batches
    # The list that was iterated is gone, and nothing else holds it.
    assert wait_until(lambda: held() is None)


def test_thread_has_the_callers_context_and_grad_mode():
    name = contextvars.ContextVar("name", default="none")

    class Seen:
        def __iter__(self):
            yield from (self.see() for _ in range(2))

        def see(self):
            return name.get(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    name.set("mine")
    assert set(gp.prefetch(Seen(), "cpu")) == {("mine", True, False)}
    with torch.no_grad():
        assert set(gp.prefetch(Seen(), "cpu")) == {("mine", False, False)}
    with torch.inference_mode():
        assert set(gp.prefetch(Seen(), "cpu")) == {("mine", False, True)}


def test_prefetch_over_a_dataloader_and_a_loader(image_folder):
    data = DataLoader(list(range(10)), batch_size=4, num_workers=1)
    for _ in range(2):
        assert [batch.tolist() for batch in gp.prefetch(data, "cpu")] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    with gp.Loader(
        image_folder, gp.Recipe.train(size=16), batch_size=4, fields=("index",), backend="torchvision"
    ) as loader:
        batches = gp.prefetch(loader, "cpu")
        assert len(batches) == len(loader)
        expected = list(range(len(loader.dataset)))
        assert [i for (index,) in batches for i in index.tolist()] == expected
        assert [i for (index,) in batches for i in index.tolist()] == expected
        assert loader.epoch == 1


def test_break_over_a_dataloader_leaves_no_worker_process():
    batches = iter(gp.prefetch(DataLoader(list(range(1000)), batch_size=1, num_workers=2), "cpu"))
    next(batches)
    assert len(multiprocessing.active_children()) == 2
    del batches
    assert wait_until(lambda: not multiprocessing.active_children())


def test_prefetch_of_a_prefetch_ends_both_threads():
    assert list(gp.prefetch(gp.prefetch(range(5), "cpu"), "cpu")) == list(range(5))
    batches = iter(gp.prefetch(gp.prefetch(Numbers(100), "cpu"), "cpu"))
    next(batches)
    assert len(threads()) == 2
    del batches
    assert wait_until(lambda: not threads())


@pytest.mark.parametrize("depth", [0, -1, 1.0, True, None])
def test_depth_that_cannot_be_raises(depth):
    with pytest.raises(ConfigError, match="depth="):
        gp.prefetch([], "cpu", depth=depth)


def test_device_that_cannot_be_raises():
    with pytest.raises(ConfigError, match="device='gpu'"):
        gp.prefetch([], "gpu")
    with pytest.raises(BackendUnavailable, match="CUDA device"):
        gp.prefetch([], "cuda:99")


def test_without_a_device_it_is_the_best_there_is():
    assert gp.prefetch([]).device.type == ("cuda" if torch.cuda.is_available() else "cpu")


def run(code, **arguments):
    # A suite that was started in the background ignores Ctrl-C, and so would its children.
    first = (
        "import signal, time, torch\nsignal.signal(signal.SIGINT, signal.default_int_handler)\nimport gpupipe as gp\n"
    )
    code = first + textwrap.dedent(code)
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **arguments
    )


def test_ctrl_c_ends_a_program_that_waits_for_a_batch():
    process = run(
        """
        def slow():
            yield 1
            print("waiting", flush=True)
            time.sleep(60)

        for _ in gp.prefetch(slow(), "cpu"):
            pass
        """
    )
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.3)
    start = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert time.monotonic() - start < 15
    assert errors.strip().endswith("KeyboardInterrupt")
    assert process.returncode in (1, 130, -signal.SIGINT)


def test_program_that_ends_in_mid_pass_ends_cleanly():
    process = run(
        """
        def endless():
            while True:
                yield torch.ones(1000, 1000) @ torch.ones(1000, 1000)

        batches = iter(gp.prefetch(endless(), "cpu"))
        next(batches)
        """
    )
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")


# --- the order of streams and events, without a GPU: by stand-ins that write down what is called ---


class StandIns:
    def __init__(self, patch):
        self.calls = []
        self.consumer = object()
        usual = torch.Tensor.to

        def to(tensor, *arguments, **options):
            if not (isinstance(arguments[0], torch.device) and arguments[0].type == "cuda"):
                return usual(tensor, *arguments, **options)
            self.calls.append(("copy", options["non_blocking"]))
            return tensor.clone()

        def record_stream(_, stream):
            assert stream is self.consumer
            self.calls.append("record_stream")

        def noted(name, result):
            return lambda tensor: (self.calls.append(name), result(tensor))[1]

        for name in ("device", "stream"):
            patch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
        patch.setattr(torch.cuda, "current_stream", lambda _: self.consumer)
        patch.setattr(torch.cuda, "Stream", lambda _: SimpleNamespace(wait_stream=self.wait_stream))
        patch.setattr(torch.cuda, "Event", self.event)
        patch.setattr(self, "consumer", SimpleNamespace(wait_event=lambda _: self.calls.append("wait_event")))
        patch.setattr(torch.Tensor, "to", to)
        patch.setattr(torch.Tensor, "pin_memory", noted("pin", torch.Tensor.clone))
        patch.setattr(torch.Tensor, "is_pinned", lambda tensor: len(tensor) == 7)
        patch.setattr(torch.Tensor, "record_stream", record_stream)

    def wait_stream(self, stream):
        assert stream is self.consumer
        self.calls.append("wait_stream")

    def event(self, **_):
        return SimpleNamespace(
            record=lambda _: self.calls.append("record"), synchronize=lambda: self.calls.append("synchronize")
        )


def test_copies_are_staged_and_ordered_by_an_event(monkeypatch):
    seen = StandIns(monkeypatch)
    batches = iter(Prefetched([{"a": torch.ones(3), "b": [torch.ones(2), "text"]}], torch.device("cuda", 0), 1))
    assert wait_until(lambda: "record" in seen.calls)
    assert seen.calls == ["wait_stream", "pin", ("copy", True), "pin", ("copy", True), "record"]
    seen.calls.clear()
    batch = next(batches)
    assert seen.calls == ["wait_event", "record_stream", "record_stream"]
    assert batch["b"][1] == "text"


def test_pinned_memory_of_the_iterable_is_copied_before_it_is_asked_again(monkeypatch):
    seen = StandIns(monkeypatch)
    (batch,) = Prefetched([torch.ones(7)], torch.device("cuda", 0), 1)
    assert seen.calls == ["wait_stream", ("copy", True), "record", "synchronize", "wait_event", "record_stream"]
    assert len(batch) == 7


# --- on a GPU ---

BYTES = 64 << 20  # a copy of this takes milliseconds, so that what does not wait for it is seen


def cuda():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.gpu
def test_every_container_reaches_the_gpu():
    packed = pack_sequence([torch.ones(3), torch.ones(1)])
    nested = torch.nested.nested_tensor_from_jagged(torch.arange(5.0), torch.tensor([0, 2, 5]))
    batch = {
        "plain": torch.arange(6).view(2, 3),
        "list": [torch.ones(2), "text", None],
        "tuple": (torch.zeros(0), 3),
        "channels_last": torch.rand(2, 3, 4, 4).to(memory_format=torch.channels_last),
        "expanded": torch.ones(1).expand(5),
        "pinned": torch.rand(3).pin_memory(),
        "there": torch.ones(2, device=cuda()),
        "half": torch.rand(3).bfloat16(),
        "packed": packed,
        "nested": nested,
    }
    (found,) = gp.prefetch([batch])
    assert found["plain"].device == cuda()
    for name in ("plain", "tuple", "list"):
        first, other = (found[name], batch[name]) if name == "plain" else (found[name][0], batch[name][0])
        assert torch.equal(first.cpu(), other)
    for name in ("channels_last", "expanded", "pinned", "there", "half"):
        assert found[name].device == cuda()
        assert torch.equal(found[name].cpu(), batch[name].cpu())
    assert found["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert found["list"][1:] == ["text", None]
    assert found["packed"].data.is_cuda
    assert not found["packed"].batch_sizes.is_cuda
    assert [row.tolist() for row in found["nested"].unbind()] == [[0, 1], [2, 3, 4]]


@pytest.mark.gpu
def test_sparse_tensors_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"layout torch\.sparse_coo"):
        list(gp.prefetch([torch.eye(3).to_sparse()]))


@pytest.mark.gpu
def test_batches_are_whole_on_the_callers_stream_whatever_it_does():
    """Kernels that are queued behind long work read the batch long after it was handed out, and dropped."""
    count, floats = 30, BYTES // 4
    side = torch.cuda.Stream()
    sums = []
    with torch.cuda.stream(side):
        for batch in gp.prefetch((torch.full((floats,), float(n)) for n in range(count)), depth=2):
            torch.cuda._sleep(20_000_000)
            sums.append(batch.double().mean())
            del batch  # its memory must not receive a later batch before the kernels above are done
    side.synchronize()
    assert [float(each) for each in sums] == list(range(count))


@pytest.mark.gpu
def test_producer_may_write_into_its_buffer_again():
    for pinned in (False, True):

        def producer(pinned=pinned):
            buffer = torch.empty(BYTES // 4, pin_memory=pinned)
            for number in range(20):
                buffer.fill_(number)
                yield buffer

        assert [float(b[0] + b[-1]) / 2 for b in gp.prefetch(producer())] == list(range(20))


@pytest.mark.gpu
def test_kernels_of_the_producer_are_done_before_the_consumers():
    def producer():
        for number in range(10):
            torch.cuda._sleep(20_000_000)
            yield torch.full((1 << 20,), float(number), device="cuda")

    assert [float(batch.mean()) for batch in gp.prefetch(producer())] == list(range(10))


@pytest.mark.gpu
def test_next_does_not_wait_for_the_gpu():
    batches = iter(gp.prefetch([torch.ones(BYTES // 4) for _ in range(4)]))
    next(batches)
    time.sleep(0.5)  # the next one is there
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(2_000_000_000)
        start = time.perf_counter()
        next(batches)
        assert time.perf_counter() - start < 0.2
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_memory_of_the_gpu_does_not_grow():
    def one_pass():
        for batch in gp.prefetch((torch.ones(BYTES // 4) for _ in range(12)), depth=2):
            batch.add_(1)

    one_pass()
    torch.cuda.synchronize()
    before = torch.cuda.memory_reserved()
    for _ in range(5):
        one_pass()
    torch.cuda.synchronize()
    assert torch.cuda.memory_reserved() <= before + BYTES
    assert torch.cuda.memory_allocated() < BYTES
