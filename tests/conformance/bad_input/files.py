"""What the batteries share: files in memory as a source, and what torchvision makes of the good ones."""

from __future__ import annotations

import io
import warnings

import numpy as np
import torch
from PIL import Image, ImageOps

import gpupipe as gp
from gpupipe import make_plan
from tests.available import loader
from tests.backends.reference import stock
from tests.zoo import zoo

SEED = 1
FIELDS = ("image", "label", "index", "valid")
# More than half of the zoo are good; the limit on bad ones is not what is tested here.
ANY_NUMBER = 1.0


class Files:
    """Name -> bytes, as a source."""

    uri = "files in memory"
    columns = ()

    def __init__(self, files):
        self.names, self.files = list(files), dict(files)
        self.fingerprint = "files:" + ",".join(self.names)

    @property
    def labels(self):
        return np.arange(len(self.names)) % 7

    def __len__(self):
        return len(self.names)

    def __getitem__(self, index):
        name = self.names[index]
        return gp.Record(self.files[name], index % 7, index, name, path=f"/data/{name}", offset=512 * index)

    def close(self):
        pass


# In tests/../shared/data/tricky; all others there are good.
BAD_AND_TRICKY = {"truncated_jpeg.jpg": "truncated"}


def collection(name, request):
    """(name -> bytes, bad name -> what its reason must match)."""
    if name == "zoo":
        animals = zoo()
        return {key: each.data for key, each in animals.items()}, {k: a.why for k, a in animals.items() if not a.good}
    folder = request.getfixturevalue("tricky_dir")
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}, BAD_AND_TRICKY


def few(request):
    """Two dozen, every second one bad."""
    files, bad = collection("zoo", request)
    good = [name for name in files if name not in bad]
    names = [name for pair in zip(good[:: len(good) // 12], [*bad][:: len(bad) // 12], strict=False) for name in pair]
    return {name: files[name] for name in names[:24]}, {name: bad[name] for name in names[:24] if name in bad}


def recipe(exif="ignore"):
    """Crops that are three to ten times as high as they are wide: where those fit, they do not fit sideways."""
    return gp.Recipe.train(size=24, scale=(0.05, 0.5), ratio=(0.1, 0.3), jitter=(0.4, 0.4, 0.4, 0.1), exif=exif)


def pil_loader(data, exif):
    """torchvision.datasets.folder.pil_loader, from memory, and the turning that exif="apply" asks for."""
    with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as image:
        if exif == "apply":
            image = ImageOps.exif_transpose(image)
        return np.array(image.convert("RGB"))


def expected(source, indices, made_by, *, epoch=0):
    """Index -> what torchvision's own transforms make of Pillow's pixels, with the draws of the plan."""
    found = {}
    for index in indices:
        pixels = pil_loader(source.files[source.names[index]], made_by.exif)
        plan = make_plan(made_by, seed=SEED, epoch=epoch, indices=[index], sizes=[pixels.shape[:2]])
        found[index] = stock(made_by, plan, 0, pixels)
    return found


def lsb(found, other, made_by):
    """The largest difference in 1/255 of the range before Normalize."""
    std = torch.tensor(made_by.normalize.std, dtype=torch.float64).view(3, 1, 1)
    return float(((found.double() - other.double()).abs() * std * 255).max())


def open_loader(source, made_by, backend, policy, **arguments):
    arguments = {"batch_size": 11, "seed": SEED, "fields": FIELDS} | arguments
    return loader(source, made_by, backend, on_error=gp.OnError(policy, max_bad=ANY_NUMBER), **arguments)


def rows_of(batches):
    return [row for batch in batches for row in zip(*batch, strict=True)]
