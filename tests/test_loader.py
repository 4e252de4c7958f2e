"""The loader on its own: order, epochs, ends, errors. What the pixels are is the backends' tests' business."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
import torch
from torchvision.datasets import ImageFolder as TorchvisionFolder

import gpupipe as gp
from gpupipe import backends
from gpupipe.errors import BackendError, ConfigError, DecodeError, RecordError, SourceError, StateError
from gpupipe.headers import scan
from tests.conftest import REPO
from tests.fakes import FakeBackend, MemorySource
from tests.images import jpeg, photo

RECIPE = gp.Recipe.train(size=16, jitter=(0.4, 0.4, 0.4, 0.1))


@pytest.fixture
def fake(monkeypatch):
    backend = FakeBackend()
    monkeypatch.setattr(backends, "create", lambda *_, **__: backend)
    return backend


@pytest.fixture
def make(image_folder):
    """Loaders of the generated folder, closed at the end."""
    made = []

    def loader(**arguments):
        made.append(gp.Loader(image_folder, RECIPE, **({"batch_size": 4, "backend": "torchvision"} | arguments)))
        return made[-1]

    yield loader
    for each in made:
        each.close()


def indices(batches):
    return [batch[-1].tolist() for batch in batches]


def flat(batches):
    return [index for batch in batches for index in batch]


def test_loader_by_default_yields_images_and_labels_of_the_folder(make, image_folder):
    expected = TorchvisionFolder(image_folder)
    images, labels = zip(*make(), strict=True)
    assert torch.cat(images).shape == (len(expected), 3, 16, 16)
    assert torch.cat(images).dtype == torch.float32
    assert torch.cat(labels).tolist() == expected.targets
    assert torch.cat(labels).dtype == torch.int64


def test_loader_given_a_compose_converts_it(image_folder):
    from torchvision.transforms import v2

    compose = v2.Compose(
        [v2.RandomResizedCrop(16), v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.5])]
    )
    with gp.Loader(image_folder, compose, batch_size=4, backend="torchvision") as loader:
        assert loader.recipe == gp.Recipe.from_torchvision(compose)
        assert next(iter(loader))[0].shape == (4, 3, 16, 16)


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("batch_size", [1, 4, 5, 1000])
def test_len_equals_the_batches_of_three_epochs_and_after_a_break(make, fake, drop_last, batch_size):
    loader = make(batch_size=batch_size, drop_last=drop_last, fields=("index",))
    total = len(loader.dataset)
    for _ in range(3):
        sizes = [len(batch[0]) for batch in loader]
        assert len(sizes) == len(loader) == (total // batch_size if drop_last else -(-total // batch_size))
        assert sum(sizes) == (len(loader) * batch_size if drop_last else total)
    for _ in loader:
        break
    assert len(list(loader)) == len(loader)
    assert fake.closed == 0


@pytest.mark.usefixtures("fake")
def test_shuffle_takes_the_order_of_distributed_sampler(make):
    loader = make(shuffle=True, seed=5, fields=("index",))
    for epoch in range(3):
        sampler = torch.utils.data.DistributedSampler(loader.dataset, num_replicas=1, rank=0, shuffle=True, seed=5)
        sampler.set_epoch(epoch)
        assert flat(indices(loader)) == list(sampler)


@pytest.mark.usefixtures("fake")
def test_ranks_take_what_distributed_sampler_gives_them(make):
    for rank in range(3):
        loader = make(shuffle=True, seed=5, fields=("index",), sharding=gp.Sharding(rank=rank, world_size=3))
        sampler = torch.utils.data.DistributedSampler(loader.dataset, num_replicas=3, rank=rank, shuffle=True, seed=5)
        assert flat(indices(loader)) == list(sampler)
        assert loader.global_batch_size == 12


@pytest.mark.usefixtures("fake")
def test_iter_after_an_iteration_that_delivered_moves_on(make):
    loader = make(shuffle=True, fields=("index",))
    first = indices(loader)
    assert loader.epoch == 0
    second = indices(loader)
    assert loader.epoch == 1
    assert first != second
    for _ in loader:
        break
    assert loader.epoch == 2
    iter(loader)
    iter(loader)  # delivered nothing, so the epoch stays
    assert loader.epoch == 3
    loader.set_epoch(0)
    assert indices(loader) == first
    loader.sampler.set_epoch(1)
    assert list(loader.sampler) == flat(second)
    assert len(loader.sampler) == len(loader.dataset)
    assert indices(loader) == second


@pytest.mark.usefixtures("fake")
def test_iter_ends_the_older_iterator(make):
    loader = make(fields=("index",))
    older = iter(loader)
    next(older)
    newer = iter(loader)
    with pytest.raises(StateError, match="two Loaders"):
        next(older)
    assert len(list(newer)) == len(loader)


@pytest.mark.usefixtures("fake")
def test_finished_iterator_stays_finished(make):
    batches = iter(make(fields=("index",)))
    list(batches)
    with pytest.raises(StopIteration):
        next(batches)


def test_batches_finished_out_of_order_come_in_order(make, fake):
    fake.delays_s = [0.2, 0.0, 0.1]
    assert flat(indices(make(fields=("index",)))) == list(range(len(make().dataset)))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_reading_ahead_stops_at_prefetch(make, fake, prefetch):
    loader = make(batch_size=1, options=gp.Options(prefetch=prefetch))
    batches = iter(loader)
    deadline = time.monotonic() + 10
    while fake.submitted < prefetch + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    assert fake.submitted == prefetch + 1
    next(batches)
    time.sleep(0.1)
    assert fake.submitted == prefetch + 2


def test_fields_come_in_their_order(make, image_folder):
    loader = make(fields=("key", "valid", "index", "path", "label", "image"))
    key, valid, index, path, label, image = next(iter(loader))
    expected = TorchvisionFolder(image_folder)
    assert path == [sample[0] for sample in expected.samples[:4]]
    assert [f"{image_folder}/{name}" for name in key] == path
    assert valid.tolist() == [True] * 4
    assert index.tolist() == [0, 1, 2, 3]
    assert label.tolist() == expected.targets[:4]
    assert image.shape == (4, 3, 16, 16)


@pytest.mark.usefixtures("fake")
def test_mask_marks_padding(make):
    total = len(make().dataset)
    valid = torch.cat(
        [
            batch[0]
            for rank in range(2)
            for batch in make(
                batch_size=5, fields=("valid",), sharding=gp.Sharding(rank=rank, world_size=2, pad="mask")
            )
        ]
    )
    assert valid.sum() == total
    assert len(valid) % 10 == 0


def test_same_sample_has_the_same_pixels_however_it_is_loaded(make):
    def pixels(**arguments):
        found = {}
        for image, index in make(fields=("image", "index"), **arguments):
            found |= dict(zip(index.tolist(), image, strict=True))
        return found

    expected = pixels(batch_size=1)
    for arguments in (
        {"batch_size": 7},
        {"batch_size": 64},
        {"batch_size": 7, "shuffle": True},
        {"batch_size": 4, "options": gp.Options(threads=4, prefetch=5)},
        {"batch_size": 4, "options": gp.Options(threads=1, prefetch=1)},
        {"batch_size": 3, "sharding": gp.Sharding(rank=0, world_size=1, pad="mask")},
    ):
        found = pixels(**arguments)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[index], expected[index]) for index in expected), arguments


def test_tensors_stay_what_they_were(make):
    held, copies = [], []
    with make(batch_size=3) as loader:
        for _ in range(3):
            for images, labels in loader:
                held += [images, labels]
                copies += [images.clone(), labels.clone()]
    gc.collect()
    assert all(torch.equal(one, other) for one, other in zip(held, copies, strict=True))


def test_undecodable_file_raises_at_its_batch_and_names_it(image_folder, tmp_path):
    import shutil

    folder = tmp_path / "set"
    shutil.copytree(image_folder, folder)
    source = gp.open_source(folder)
    broken = folder / source[5].key
    broken.write_bytes(b"not an image")
    with gp.Loader(folder, RECIPE, batch_size=2, backend="torchvision", fields=("index",)) as loader:
        batches = iter(loader)
        assert next(batches)[0].tolist() == [0, 1]
        assert next(batches)[0].tolist() == [2, 3]
        with pytest.raises(DecodeError) as raised:
            next(batches)
        assert (raised.value.index, raised.value.path) == (5, str(broken))
        assert source[5].key in str(raised.value)
        with pytest.raises(StopIteration):
            next(batches)


def test_missing_file_raises_and_names_it(image_folder, tmp_path):
    import shutil

    folder = tmp_path / "set"
    shutil.copytree(image_folder, folder)
    source = gp.open_source(folder)
    (folder / source[0].key).unlink()
    with gp.Loader(source, RECIPE, batch_size=2, backend="torchvision") as loader, pytest.raises(RecordError) as raised:
        next(iter(loader))
    assert raised.value.index == 0


def test_bad_row_of_a_backend_raises(make, fake):
    fake.bad = {2: DecodeError("sample 2 is broken", index=2)}
    with pytest.raises(DecodeError, match="sample 2"):
        list(make())


def test_failing_backend_raises_and_never_hangs(make, fake):
    fake.failure = BackendError("out of memory", backend="fake")
    with pytest.raises(BackendError, match="out of memory"):
        list(make())


def test_resume_delivers_what_was_left(make):
    arguments = {"batch_size": 3, "shuffle": True, "fields": ("image", "index")}
    loader = make(**arguments)
    straight = [batch for _ in range(2) for batch in loader]
    for stop in (0, 1, 3, len(straight) // 2, len(straight) // 2 + 2):
        first, seen = make(**arguments), []
        state = first.state_dict()
        for batch in (batch for _ in range(2) for batch in first) if stop else ():
            seen.append(batch)
            if len(seen) == stop:
                state = first.state_dict()
                break
        assert state == torch.load(_saved(state), weights_only=True)
        second = make(**arguments)
        second.load_state_dict(state)
        second.set_epoch(state["epoch"])
        per_epoch = len(straight) // 2
        assert second.remaining == per_epoch - stop % per_epoch
        while len(seen) < len(straight):
            seen += list(second)
        assert len(seen) == len(straight)
        for found, expected in zip(seen, straight, strict=True):
            assert torch.equal(found[1], expected[1])
            assert torch.equal(found[0], expected[0])


def _saved(state):
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return buffer


def test_resume_with_another_batch_size_delivers_the_rest_with_the_same_pixels(make):
    fields = ("image", "index")
    straight = {i: x for images, index in make(shuffle=True, fields=fields) for i, x in zip(index.tolist(), images)}  # noqa: B905
    first, seen = make(shuffle=True, fields=fields, batch_size=3), {}
    for images, index in first:
        seen |= dict(zip(index.tolist(), images, strict=True))
        if len(seen) == 6:
            break
    second = make(shuffle=True, fields=fields, batch_size=5, options=gp.Options(threads=3))
    second.load_state_dict(first.state_dict())
    for images, index in second:
        assert not seen.keys() & set(index.tolist())
        seen |= dict(zip(index.tolist(), images, strict=True))
    assert seen.keys() == straight.keys()
    assert all(torch.equal(seen[index], straight[index]) for index in straight)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "seed was 0 and is 1 here"),
        ({"shuffle": True}, "shuffle was False and is True here"),
        ({"sampler": [0, 1]}, "kind was 'default' and is 'indices' here"),
    ],
)
def test_state_of_another_order_raises_naming_what_differs(make, change, named):
    state = make().state_dict()
    with pytest.raises(StateError, match=named):
        make(**change).load_state_dict(state)


def test_state_of_another_recipe_raises_unless_the_epoch_begins(image_folder, make):
    loader = make()
    beginning = loader.state_dict()
    next(iter(loader))
    middle = loader.state_dict()
    with gp.Loader(image_folder, gp.Recipe.eval(16, resize=18), batch_size=4, backend="torchvision") as other:
        with pytest.raises(StateError, match="recipe"):
            other.load_state_dict(beginning)
        other.load_state_dict(beginning, strict=False)
        with pytest.raises(StateError, match="recipe"):
            other.load_state_dict(middle, strict=False)


@pytest.mark.parametrize("state", [{}, {"version": 99}, None, 3])
def test_state_that_is_none_raises(make, state):
    with pytest.raises(StateError, match="version"):
        make().load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 2.0}, "batch_size"),
        ({"batch_size": True}, "batch_size"),
        ({"seed": -1}, "seed"),
        ({"seed": "x"}, "seed"),
        ({"fields": ()}, "fields"),
        ({"fields": "image"}, "fields"),
        ({"fields": ("image", "caption")}, "fields"),
        ({"fields": 3}, "fields"),
        ({"fields": (name for name in ("image", "label"))}, "fields"),
        ({"options": {"threads": 2}}, "options"),
        ({"sharding": {"pad": "mask"}}, "sharding"),
        ({"backend": "cuda"}, "backend"),
        ({"drop_last": True, "sharding": gp.Sharding(pad="mask")}, "drop_last"),
        ({"sharding": gp.Sharding(rank=2, world_size=2)}, "rank"),
    ],
)
def test_loader_with_wrong_argument_raises_naming_it(make, arguments, field):
    with pytest.raises(ConfigError) as raised:
        make(**arguments)
    assert raised.value.field == field
    assert field in str(raised.value)


def test_loader_takes_numpy_integers(make):
    loader = make(batch_size=np.int64(4), seed=np.int32(1), shuffle=True)
    loader.set_epoch(np.int64(2))
    assert (type(loader.batch_size), type(loader.epoch)) == (int, int)
    assert len(list(loader)) == 4


@pytest.mark.parametrize("epoch", [-1, 1.0, "1", None, True, 2**63])
def test_set_epoch_with_wrong_value_raises(make, epoch):
    with pytest.raises(ConfigError, match="epoch="):
        make().set_epoch(epoch)


def test_close_is_idempotent_and_ends_iteration(make):
    loader = make()
    batches = iter(loader)
    next(batches)
    loader.close()
    loader.close()
    with pytest.raises(StopIteration):
        next(batches)
    with pytest.raises(StateError, match="closed"):
        iter(loader)
    assert loader.state_dict()["delivered"] == 4


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_close_closes_the_source_that_was_opened_here_alone(image_folder, tmp_path):
    pytest.importorskip("lmdb", reason="lmdb is not installed")
    gp.pack(image_folder, tmp_path / "packed", format="lmdb")

    def held():
        place = str(tmp_path / "packed" / "data.mdb")
        return sum(os.path.realpath(f"/proc/self/fd/{number}") == place for number in os.listdir("/proc/self/fd"))

    def closed_loader(source):
        with gp.Loader(source, RECIPE, batch_size=4, backend="torchvision") as loader:
            next(iter(loader))
        return loader

    loader = closed_loader(tmp_path / "packed")
    assert held() == 0
    assert loader.dataset[0].key
    loader.dataset.close()
    source = gp.open_source(tmp_path / "packed")
    closed_loader(source)
    assert held() == 1
    source.close()
    assert held() == 0


def gpupipe_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpupipe")]


def _wait_for_threads(before):
    deadline = time.monotonic() + 10
    while len(gpupipe_threads()) > before and time.monotonic() < deadline:
        time.sleep(0.02)
    return gpupipe_threads()


def test_closed_and_forgotten_loaders_leave_no_threads(image_folder):
    before = len(_wait_for_threads(0))
    for ending in ("close", "forget", "forget while iterating"):
        for _ in range(5):
            loader = gp.Loader(image_folder, RECIPE, batch_size=2, backend="torchvision")
            batches = iter(loader)
            next(batches)
            if ending == "close":
                loader.close()
            elif ending == "forget":
                del batches
            del loader
        batches = None
        gc.collect()
        assert len(_wait_for_threads(before)) <= before, ending


def test_close_and_a_new_iter_wait_for_the_thread_that_reads_ahead(make, fake):
    """One that is still in foreign code when the interpreter ends can abort the process."""
    submit = fake.submit

    def slowly(*batch):
        time.sleep(0.1)
        return submit(*batch)

    fake.submit = slowly
    loader = make(options=gp.Options(prefetch=5))
    iter(loader)
    older = [thread for thread in gpupipe_threads() if thread.name == "gpupipe-feed"]
    iter(loader)
    assert not any(thread.is_alive() for thread in older)
    loader.close()
    assert not [thread for thread in gpupipe_threads() if thread.name == "gpupipe-feed"]


class Answers(MemorySource):
    """A source that gives what a function makes of the index and the right record."""

    def __init__(self, length, answer):
        super().__init__(length)
        self.answer = answer

    def __getitem__(self, index):
        return self.answer(index, super().__getitem__(index))


def answering(answer, length=8, **arguments):
    return gp.Loader(Answers(length, answer), RECIPE, batch_size=4, backend="torchvision", **arguments)


def raises(error):
    def answer(index, record):
        if index == 5:
            raise error
        return record

    return answer


def test_source_that_raises_something_else_is_named_in_a_note():
    with answering(raises(KeyError("gone"))) as loader, pytest.raises(KeyError) as raised:
        list(loader)
    assert raised.value.__notes__ == ["raised by source[5] of memory of 8"]


def test_source_that_raises_stop_iteration_does_not_end_the_epoch():
    with answering(raises(StopIteration())) as loader, pytest.raises(SourceError, match=r"source\[5\] .*StopIteration"):
        list(loader)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (None, "NoneType"),
        ((b"", 0), "tuple"),
        (gp.Record(data="text", label=0, index=5, key="5"), "data of type str"),
        (gp.Record(data=b"", label=0, index=3, key="3"), "the record of index 3"),
    ],
)
def test_source_that_returns_something_else_raises_naming_it(answer, says):
    with answering(lambda index, record: answer if index == 5 else record) as loader:
        with pytest.raises(SourceError, match=rf"source\[5\] .*returned.*{says}"):
            list(loader)


@pytest.mark.parametrize(
    "labels",
    [
        [0, 1.5],
        [1.5, 0],
        [0, None],
        [None, 0],
        [0, "0"],
        [np.zeros(3), 0],
        [np.zeros(3), np.zeros(4)],
        [np.array([None]), np.array([None])],
        [2**63, 0],
    ],
    ids=str,
)
def test_labels_that_do_not_go_together_raise_and_are_not_rounded(labels):
    with answering(lambda index, record: replace(record, label=labels[index]), length=2) as loader:
        with pytest.raises(SourceError, match="label"):
            list(loader)


@pytest.fixture
def stuck():
    """A Loader whose source hangs from the third record on, the pass at its second batch, and what frees it."""
    free = threading.Event()

    def answer(index, record):
        if index >= 4:
            free.wait(60)
        return record

    loader = answering(answer)
    batches = iter(loader)
    next(batches)
    yield loader, batches
    free.set()
    loader.close()


def test_close_does_not_wait_for_a_source_that_hangs(stuck):
    loader, _ = stuck
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 5


def test_close_by_another_thread_ends_the_iteration_that_waits(stuck):
    loader, batches = stuck
    threading.Timer(0.3, loader.close).start()
    with pytest.raises(StopIteration):
        next(batches)


def test_interpreter_exits_while_a_source_hangs():
    script = f"""
        import sys, time
        sys.path.insert(0, {str(REPO)!r})
        import gpupipe as gp
        from tests.fakes import MemorySource
        class Slow(MemorySource):
            def __getitem__(self, index):
                time.sleep(60 * (index >= 2))
                return super().__getitem__(index)
        loader = gp.Loader(Slow(9), gp.Recipe.train(16), batch_size=2, backend="torchvision")
        for _ in loader:
            time.sleep(0.5)
            break
        print("delivered")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "delivered", "")


def test_interpreter_with_open_loader_exits(tmp_path):
    (tmp_path / "class").mkdir()
    for number in range(20):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(jpeg(photo(50, 60, number)))
    script = f"""
        import gpupipe as gp
        loader = gp.Loader({str(tmp_path)!r}, gp.Recipe.train(16), batch_size=2, backend="torchvision")
        batches = iter(loader)
        next(batches)
        print("delivered")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "delivered", "")


def test_loader_keeps_the_users_global_generators(make):
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    list(make(shuffle=True))
    assert torch.equal(before[0], torch.random.get_rng_state())
    assert (before[1] == np.random.get_state()[1]).all()


def test_repr_says_what_it_does(make):
    text = repr(make(batch_size=5, sharding=gp.Sharding(rank=0, world_size=3)))
    assert "batches of 5" in text
    assert "15 over all ranks" in text
    assert "rank 0 of 3" in text
    assert "torchvision" in text


def test_note_of_a_backend_is_in_its_reason(make, fake):
    fake.note = "torch's operators are used"
    loader = make()
    next(iter(loader))
    assert loader.backend.reason.endswith("; torch's operators are used")


@pytest.mark.usefixtures("fake")
def test_batch_that_cannot_be_made_is_not_delivered(image_folder):
    source = gp.open_source(image_folder)
    labels = [0, 0, 0, "x"]

    class Mixed:
        columns = ()
        uri = fingerprint = "mixed"
        labels = None

        def __len__(self):
            return len(labels)

        def __getitem__(self, index):
            record = source[index]
            record.label = labels[index]
            return record

        def close(self):
            pass

    with gp.Loader(Mixed(), RECIPE, batch_size=2, backend="torchvision", fields=("label",)) as mixed:
        batches = iter(mixed)
        next(batches)
        with pytest.raises(SourceError, match="label"):
            next(batches)
        assert mixed.state_dict()["delivered"] == 2


def test_loader_tells_what_the_last_batch_cost(image_folder):
    with gp.Loader(image_folder, gp.Recipe.train(size=16), batch_size=4, backend="torchvision") as loader:
        assert loader.last_cost is None
        batches = iter(loader)
        next(batches)
        records = [loader.dataset[index] for index in range(4)]
        assert loader.last_cost.bytes == sum(record.size_bytes for record in records)
        headers = [scan(record.data) for record in records]
        assert loader.last_cost.pixels == sum(header.height * header.width for header in headers)
