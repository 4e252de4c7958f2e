"""DatasetSource against the datasets themselves."""

import io
import os
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torchvision.datasets
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset
from torchvision import tv_tensors

import gpupipe as gp
from gpupipe.errors import ConfigError, DecodeError, RecordError, SourceError
from gpupipe.sources import open_source
from gpupipe.sources.dataset import DatasetSource
from gpupipe.sources.folder import ImageFolder
from tests import images
from tests.sources.processes import PlainDataset, read_all, read_forked, read_in_threads, read_spawned

PIXELS = images.photo(11, 17)
JPEG = images.jpeg(PIXELS)


class Listed(Dataset):
    """A dataset of what it is given."""

    def __init__(self, items, **attributes):
        self.items = items
        self.__dict__.update(attributes)

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        item = self.items[index]
        if isinstance(item, Exception):
            raise item
        return item


@pytest.fixture
def theirs(image_folder):
    return torchvision.datasets.ImageFolder(str(image_folder))


# --- images of every kind ---


@pytest.mark.parametrize("given", [JPEG, bytearray(JPEG), memoryview(JPEG), np.frombuffer(JPEG, np.uint8)])
def test_bytes_are_the_file(given):
    data = DatasetSource(Listed([(given, 1)]))[0].data
    assert type(data) is bytes
    assert data == JPEG


def test_tensor_of_bytes_is_the_file():
    as_read_file_gives_it = torch.frombuffer(bytearray(JPEG), dtype=torch.uint8)
    assert DatasetSource(Listed([(as_read_file_gives_it, 1)]))[0].data == JPEG


@pytest.mark.parametrize("kind", [str, Path])
def test_path_is_read(tmp_path, kind):
    path = tmp_path / "ü.jpg"
    path.write_bytes(JPEG)
    record = open_source(Listed([(kind(path), 5)]))[0]
    assert (record.data, record.path, record.label, record.key, record.index) == (JPEG, str(path), 5, "0", 0)


@pytest.mark.parametrize(
    "given",
    [
        PIXELS,
        np.asfortranarray(PIXELS),
        torch.from_numpy(PIXELS).permute(2, 0, 1),
        torch.from_numpy(PIXELS).permute(2, 0, 1).contiguous(),
        Image.fromarray(PIXELS),
        tv_tensors.Image(torch.from_numpy(PIXELS).permute(2, 0, 1)),
    ],
)
def test_pixels_of_every_kind_are_pixels(given):
    data = DatasetSource(Listed([(given, 1)]))[0].data
    assert type(data) is np.ndarray
    assert data.flags.c_contiguous
    np.testing.assert_array_equal(data, PIXELS)


@pytest.mark.parametrize(
    "given",
    [
        PIXELS[..., 0],
        PIXELS[..., :1],
        torch.from_numpy(PIXELS[..., 0].copy()),
        torch.from_numpy(PIXELS[..., 0].copy())[None],
        Image.fromarray(PIXELS[..., 0]),
    ],
)
def test_grey_pixels_of_every_kind_are_grey_pixels(given):
    np.testing.assert_array_equal(DatasetSource(Listed([(given, 1)]))[0].data, PIXELS[..., 0])


@pytest.mark.parametrize("name", images.others())
def test_pil_image_of_every_mode_is_what_image_folder_makes_of_it(name):
    image = Image.open(io.BytesIO(images.others()[name]))  # lazy: decoded by the source
    with warnings.catch_warnings(action="ignore"):  # of palettes with transparency
        expected = np.asarray(Image.open(io.BytesIO(images.others()[name])).convert("RGB"))
    found = DatasetSource(Listed([(image, 1)]))[0].data
    np.testing.assert_array_equal(found if found.ndim == 3 else found[..., None].repeat(3, 2), expected)


def test_pil_image_that_is_damaged_raises_decode_error():
    image = Image.open(io.BytesIO(images.truncated(images.encode(images.photo(200, 300), "PNG"), 0.5)))
    with pytest.raises(DecodeError, match=r"record 0 \('0'\) of dataset Listed cannot be decoded: Pillow") as error:
        DatasetSource(Listed([(image, 1)]))[0]
    assert (error.value.index, error.value.key) == (0, "0")


@pytest.mark.parametrize(
    "given",
    [
        torch.zeros(3, 4, 5),
        torch.zeros(4, 5, 3, dtype=torch.uint8),
        np.zeros((3, 4, 5), np.uint8),
        np.zeros((4, 5, 3), np.float32),
        np.zeros((0, 5, 3), np.uint8),
        None,
        3,
        [1, 2],
    ],
)
def test_image_of_another_kind_raises_and_says_what_there_may_be(given):
    with pytest.raises(SourceError, match=r"image of .*: it must be the bytes .*transform=None"):
        DatasetSource(Listed([(given, 1)]))[0]


@pytest.mark.parametrize("item", [JPEG, (JPEG,), (JPEG, 1, 2), {"image": JPEG, "label": 1}, None])
def test_item_that_is_no_pair_raises(item):
    with pytest.raises(SourceError, match=r"it must be \(image, label\)"):
        DatasetSource(Listed([item]))[0]


# --- labels ---


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (3, 3),
        (np.int64(-3), -3),
        (torch.tensor(7), 7),
        (np.array(2.5), 2.5),
        (0.5, 0.5),
        (torch.tensor([0, 1]), np.array([0, 1])),
        ([0.5, 1], np.array([0.5, 1], np.float32)),
        ((0, 1), np.array([0, 1])),
        (None, None),
        ("cat", "cat"),
    ],
)
def test_labels_of_every_kind_are_plain(given, expected):
    source = DatasetSource(Listed([(JPEG, given)]))
    assert source.labels is None
    found = source[0].label
    assert type(found) is type(expected)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("targets", [[4, -1, 4], np.array([4, -1, 4]), torch.tensor([4, -1, 4]), (4, -1, 4)])
def test_targets_are_labels_known_in_advance(targets):
    source = DatasetSource(Listed([(JPEG, label) for label in (4, -1, 4)], targets=targets))
    assert source.labels.tolist() == [4, -1, 4]
    assert source[1].label == -1


@pytest.mark.parametrize("targets", [[1, 2], ["a", "b", "c"], [{"boxes": 1}] * 3, [[1], [1, 2], []], None, 5])
def test_targets_that_are_no_labels_are_not_used(targets):
    source = DatasetSource(Listed([(JPEG, 0)] * 3, targets=targets))
    assert source.labels is None
    assert source[2].label == 0


def test_targets_that_are_transformed_are_not_used():
    source = DatasetSource(Listed([(JPEG, 9)], targets=[1], target_transform=lambda label: label + 8))
    assert source.labels is None
    assert source[0].label == 9


def test_targets_that_differ_from_the_items_raise():
    with pytest.raises(SourceError, match=r"item 0 of .* label 9, but its `targets` say 1: pass labels="):
        DatasetSource(Listed([(JPEG, 9)], targets=[1]))[0]


def test_labels_given_take_the_place_of_all_others():
    for labels in ([[0.5, 1], [1, 0]], torch.tensor([[0.5, 1], [1, 0]])):
        source = open_source(Listed([(JPEG, 9), (JPEG, 8)], targets=[1, 1]), labels=labels)
        assert source.labels.tolist() == [[0.5, 1], [1, 0]]
        assert source[0].label.tolist() == [0.5, 1]
    with pytest.raises(ConfigError, match="each of the 2 records"):
        DatasetSource(Listed([(JPEG, 9), (JPEG, 8)]), labels=[1])


# --- torchvision's folders ---


def test_image_folder_is_read_as_files(theirs, image_folder):
    source, ours = open_source(theirs), ImageFolder(image_folder)
    assert isinstance(source, DatasetSource)
    assert source.fingerprint == ours.fingerprint
    assert source.classes == ours.classes
    assert source.labels.tolist() == ours.labels.tolist()
    for index in range(len(ours)):
        one, other = source[index], ours[index]
        assert (one.data, one.label, one.key, one.path) == (other.data, other.label, other.key, other.path)
        assert source.key(index) == other.key


def test_subset_of_an_image_folder_is_read_as_files(theirs, image_folder):
    ours = ImageFolder(image_folder)
    chosen = Subset(Subset(theirs, [14, 3, 2, 8]), [2, 0])
    source = DatasetSource(chosen)
    assert [source.key(index) for index in range(2)] == [ours.key(2), ours.key(14)]
    assert source.labels.tolist() == [ours[2].label, ours[14].label]
    assert source[1].data == ours[14].data
    assert source.classes == ours.classes


def test_subset_of_another_dataset_knows_its_targets():
    dataset = Listed([(JPEG, label) for label in range(5)], targets=list(range(5)))
    source = DatasetSource(Subset(dataset, [4, 1]))
    assert source.labels.tolist() == [4, 1]
    assert source[0].label == 4


def _own_loader(path):
    return Image.open(path).convert("L").convert("RGB")


class _Own(torchvision.datasets.ImageFolder):
    def __getitem__(self, index):
        return Image.fromarray(PIXELS), self.targets[index]


@pytest.mark.parametrize("change", ["loader", "class", "transform"])
def test_image_folder_that_does_something_else_is_asked(image_folder, change):
    if change == "loader":
        dataset = torchvision.datasets.ImageFolder(str(image_folder), loader=_own_loader)
    elif change == "class":
        dataset = _Own(str(image_folder))
    else:
        dataset = torchvision.datasets.ImageFolder(str(image_folder), transform=lambda image: image.rotate(90))
    source = DatasetSource(dataset)
    for index in (0, 7):
        np.testing.assert_array_equal(source[index].data, np.asarray(dataset[index][0]))
        assert source[index].label == dataset[index][1]


def test_image_folder_with_a_transform_to_tensors_raises_and_says_to_leave_it_out(image_folder):
    to_tensor = torchvision.transforms.ToTensor()
    source = DatasetSource(torchvision.datasets.ImageFolder(str(image_folder), transform=to_tensor))
    with pytest.raises(SourceError, match=r"Tensor of torch\.float32 .*transform=None"):
        source[0]


def test_image_folder_file_that_is_gone_raises(tmp_path):
    images.folder(tmp_path / "data")
    source = DatasetSource(torchvision.datasets.ImageFolder(str(tmp_path / "data")))
    os.unlink(source._files.path(4))
    with pytest.raises(RecordError, match=r"record 4 .*No such file") as error:
        source[4]
    assert error.value.index == 4


def test_fake_data_and_tensor_datasets_are_read():
    fake = torchvision.datasets.FakeData(size=4, image_size=(3, 20, 30))
    source = DatasetSource(fake)
    for index in range(4):
        np.testing.assert_array_equal(source[index].data, np.asarray(fake[index][0]))
        assert source[index].label == fake[index][1]
    tensors = TensorDataset(torch.randint(0, 256, (3, 3, 5, 6), dtype=torch.uint8), torch.tensor([5, 6, 7]))
    source = DatasetSource(tensors)
    np.testing.assert_array_equal(source[2].data, tensors[2][0].permute(1, 2, 0).numpy())
    assert source[2].label == 7


# --- what goes wrong ---


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(())

    def __len__(self):
        return 3


class _NoLength(Dataset):
    def __getitem__(self, index):
        return JPEG, 0


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        (_Stream(), "in any other order than its own"),
        (_NoLength(), "no length"),
        (np.zeros((2, 3, 3, 3), np.uint8), r"save it with np\.save"),
    ],
)
def test_dataset_that_is_not_map_style_raises(dataset, message):
    with pytest.raises(ConfigError, match=message) as error:
        DatasetSource(dataset)
    assert error.value.field == "source"


@pytest.mark.parametrize("damage", [OSError("image file is truncated"), SyntaxError("broken PNG file"), EOFError()])
def test_damage_that_the_dataset_meets_is_a_bad_record(damage):
    with pytest.raises(RecordError, match=r"record 1 \('1'\) of dataset Listed cannot be read: ") as error:
        DatasetSource(Listed([(JPEG, 0), damage]))[1]
    assert error.value.index == 1
    assert error.value.__cause__ is damage


@pytest.mark.parametrize("mistake", [KeyError("x"), TypeError("x"), ZeroDivisionError()])
def test_mistakes_of_the_dataset_are_not_taken_for_bad_images(mistake):
    with pytest.raises(type(mistake)):
        DatasetSource(Listed([mistake]))[0]


def test_index_error_of_the_dataset_is_a_source_error():
    with pytest.raises(SourceError, match=r"item 0 .* does not exist, although its length is 1"):
        DatasetSource(Listed([IndexError()]))[0]


# --- threads and processes ---


class _Watched(Dataset):
    """Notes whether two threads were ever inside at once."""

    def __init__(self):
        self.inside = 0
        self.most = 0

    def __len__(self):
        return 64

    def __getitem__(self, index):
        self.inside += 1
        self.most = max(self.most, self.inside)
        threading.Event().wait(0.002)
        self.inside -= 1
        return JPEG, index


@pytest.mark.parametrize("threadsafe", [False, True])
def test_one_thread_at_a_time_unless_the_dataset_is_said_to_be_safe(threadsafe):
    dataset = _Watched()
    source = DatasetSource(dataset, threadsafe=threadsafe)
    start = threading.Barrier(4)

    def read(first):
        start.wait()
        for index in range(first, 64, 4):
            assert source[index].label == index

    threads = [threading.Thread(target=read, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (dataset.most > 1) == threadsafe


@pytest.fixture(params=["files", "items"])
def source(request, theirs):
    return DatasetSource(theirs if request.param == "files" else Listed([(PIXELS, 1), (JPEG, 2)], targets=[1, 2]))


def test_threads_read_the_same(source):
    assert read_in_threads(source)


def test_pickle_reads_the_same(source):
    again = pickle.loads(pickle.dumps(source))
    assert read_all(again) == read_all(source)
    assert again.fingerprint == source.fingerprint


def test_spawned_process_reads_the_same():
    source = open_source(PlainDataset([(PIXELS, 1), (JPEG, 2)]))
    assert read_spawned(source) == read_all(source)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_processes_read_the_same(source):
    assert read_forked(source) == read_all(source)


def test_fork_while_another_thread_reads_never_hangs():
    code = """
import os, threading
from gpupipe.sources.dataset import DatasetSource
inside = threading.Event()
class Slow:
    def __len__(self): return 2
    def __getitem__(self, index):
        if index: inside.set(); threading.Event().wait(5)
        return b"x", index
source = DatasetSource(Slow())
threading.Thread(target=lambda: source[1], daemon=True).start()
inside.wait()
child = os.fork()
if not child:
    os._exit(source[0].label)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
os._exit(0)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30)


def test_fingerprint_is_honest_about_what_goes_in():
    one = DatasetSource(Listed([(JPEG, 0)], targets=[0])).fingerprint
    assert DatasetSource(Listed([(b"other", 0)], targets=[0])).fingerprint == one
    assert DatasetSource(Listed([(JPEG, 1)], targets=[1])).fingerprint != one
    assert DatasetSource(Listed([(JPEG, 0)] * 2, targets=[0, 0])).fingerprint != one
    assert DatasetSource(Listed([(JPEG, 0)])).fingerprint != one
    assert "have the same one" in DatasetSource.fingerprint.__doc__


def test_source_has_what_a_source_needs(source):
    assert source.columns == ()
    assert source.uri.startswith("dataset ")
    assert len(repr(source)) < 100
    source.close()
    source.close()
    for index in (-1, len(source)):
        with pytest.raises(IndexError):
            source[index]


def test_dataset_goes_straight_into_a_loader():
    dataset = Listed([(Image.fromarray(PIXELS), n % 2) for n in range(5)])
    with gp.Loader(dataset, gp.Recipe.eval(8, resize=8), batch_size=2, backend="torchvision") as loader:
        labels = torch.cat([labels for _, labels in loader])
    assert labels.tolist() == [0, 1, 0, 1, 0]
