"""Whatever the images come from, a Loader makes the same batches of them."""

import numpy as np
import pytest
import torch
import torchvision.datasets

import gpupipe as gp
from gpupipe.decode import rgb
from gpupipe.headers import scan
from gpupipe.records import Record
from gpupipe.sources import open_source
from gpupipe.sources.folder import ImageFolder
from tests import images
from tests.available import loader
from tests.sources.stores import records_of, write_csv, write_jsonl, write_lmdb, write_memmap

RECIPE = gp.Recipe.train(32, jitter=(0.4, 0.4, 0.4, 0.1))


def _pixels(records):
    return [
        Record(data=rgb(each.data, scan(each.data)), label=each.label, index=each.index, key=each.key)
        for each in records
    ]


def _lists(root):
    folder = ImageFolder(root)
    return [(folder.key(index), folder.classes[label]) for index, label in enumerate(folder.labels)]


def _lmdb(root, place):
    return open_source(write_lmdb(place / "env", records_of(ImageFolder(root))))


def _memmap(root, place):
    return open_source(write_memmap(place / "store", records_of(ImageFolder(root))))


def _raw(root, place):
    records = _pixels(records_of(ImageFolder(root)))
    shapes = np.array([each.data.shape[:2] for each in records], np.int32)
    return open_source(write_memmap(place / "raw", records, kind="raw", shapes=shapes))


def _csv(root, place):
    return open_source(write_csv(place / "list.csv", [["path", "label"], *_lists(root)]), root=root)


def _jsonl(root, place):
    rows = [{"path": path, "label": label} for path, label in _lists(root)]
    return open_source(write_jsonl(place / "list.jsonl", rows), root=root)


def _dataset(root, _):
    return open_source(torchvision.datasets.ImageFolder(str(root)))


def _dataset_of_pil(root, _):
    return open_source(torchvision.datasets.ImageFolder(str(root), transform=lambda image: image))


SOURCES = {
    "lmdb": _lmdb,
    "memmap": _memmap,
    "raw": _raw,
    "csv": _csv,
    "jsonl": _jsonl,
    "dataset": _dataset,
    "dataset_of_pil": _dataset_of_pil,
}
BACKENDS = pytest.mark.parametrize("backend", ["torchvision", "numba", "dali"])


def batches(source, backend):
    with loader(source, RECIPE, backend, batch_size=4, shuffle=True, seed=3) as running:
        found = list(running)
    return torch.cat([batch for batch, _ in found]), torch.cat([labels for _, labels in found])


@BACKENDS
@pytest.mark.parametrize("name", SOURCES)
def test_loader_gives_the_pixels_of_the_image_folder(image_folder, tmp_path, name, backend):
    expected, labels = batches(ImageFolder(image_folder), backend)
    found, found_labels = batches(SOURCES[name](image_folder, tmp_path), backend)
    assert torch.equal(found_labels, labels)
    # A full decode is bit for bit the pixels of any other; the numba backend decodes only the part that it needs, to
    # the same values.
    assert torch.equal(found, expected)


@BACKENDS
def test_loader_gives_the_pixels_of_arrays(tmp_path, backend):
    pixels = np.stack([images.photo(40, 50, seed) for seed in range(6)])
    folder = tmp_path / "folder"
    for number, each in enumerate(pixels):
        (folder / f"class_{number % 2}").mkdir(parents=True, exist_ok=True)
        (folder / f"class_{number % 2}" / f"{number}.png").write_bytes(images.encode(each, "PNG"))
    order = [int(ImageFolder(folder).key(index)[-5]) for index in range(6)]
    np.save(tmp_path / "images.npy", pixels[order])
    expected, labels = batches(ImageFolder(folder), backend)
    found, found_labels = batches(open_source(tmp_path / "images.npy", labels=np.array(order) % 2), backend)
    assert torch.equal(found_labels, labels)
    assert torch.equal(found, expected)
