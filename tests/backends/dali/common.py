"""What the DALI tests share: records, hand-made plans, and torchvision's functional operators as the oracle."""

from __future__ import annotations

import io
import warnings
from contextlib import contextmanager

import numpy as np
import torch
from PIL import Image, ImageOps
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from gpupipe import make_plan
from gpupipe.backends.base import Options
from gpupipe.backends.dali import DaliBackend
from gpupipe.headers import scan, upright_size
from gpupipe.records import JitterRows, Plan, Record
from tests import images

CPU = torch.device("cpu")
ADJUST = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)


def records_of(files):
    return [Record(data, label=0, index=i, key=f"{i:03}.jpg", path=f"/data/{i:03}.jpg") for i, data in enumerate(files)]


def lossless(arrays):
    """Records whose pixels are these, whoever decodes them."""
    return records_of([images.encode(pixels, "BMP") for pixels in arrays])


def photo_records(photos_dir, step=1):
    paths = sorted(photos_dir.glob("*/*"))[::step]
    return [Record(path.read_bytes(), 0, i, path.name, str(path)) for i, path in enumerate(paths)]


def planned(recipe, records, seed=1, epoch=2):
    headers = [scan(record.data) for record in records]
    sizes = [upright_size(header, recipe.exif) for header in headers]
    indices = [record.index for record in records]
    return headers, make_plan(recipe, seed=seed, epoch=epoch, indices=indices, sizes=sizes)


def plan_of(size, box, resized=None, window=None, flip=None, colour=()):
    """A plan that says exactly this; by default the box becomes `size`, with no window or flip."""
    n = len(box)
    return Plan(
        index=np.arange(n),
        occurrence=np.zeros(n, np.int64),
        box=np.asarray(box, np.int32),
        resized=np.broadcast_to(np.asarray(size if resized is None else resized, np.int32), (n, 2)).copy(),
        window=np.broadcast_to(np.asarray((0, 0) if window is None else window, np.int32), (n, 2)).copy(),
        size=size,
        flip=np.broadcast_to(np.asarray((False, False) if flip is None else flip, np.bool_), (n, 2)).copy(),
        colour=colour,
    )


@contextmanager
def backend(recipe, batch_size=64, threads=2, device=CPU, **options):
    made = DaliBackend(recipe, device=device, batch_size=batch_size, options=Options(threads=threads, **options))
    try:
        yield made
    finally:
        made.close()


def run(recipe, records, plan=None, batch_size=64, threads=2, device=CPU, **options):
    """All records through one backend, as one tensor."""
    headers = [scan(record.data) for record in records]
    plan = planned(recipe, records)[1] if plan is None else plan
    parts = [slice(first, first + batch_size) for first in range(0, len(records), batch_size)]
    with backend(recipe, batch_size, threads, device, **options) as dali:
        futures = [dali.submit(records[part], headers[part], plan.take(part)) for part in parts]
        found = [future.result() for future in futures]
    assert not any(applied.errors for applied in found), [applied.errors for applied in found]
    return torch.cat([applied.images for applied in found])


def decoded(record, recipe):
    """uint8 (height, width, 3), by Pillow."""
    with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(record.data)) as image:
        if recipe.exif == "apply":
            image = ImageOps.exif_transpose(image)
        return np.array(image.convert("RGB"))


def reference(pixels, plan, row, recipe):
    """One image by torchvision's functional operators, before Normalize: float32 (3, height, width) in [0, 1]."""
    image = torch.from_numpy(pixels).permute(2, 0, 1)
    if recipe.precision == "float32":
        image = image.float() / 255
    image = F.crop(image, *plan.box[row].tolist())
    mode = InterpolationMode(recipe.interpolation)
    image = F.resize(image, plan.resized[row].tolist(), interpolation=mode, antialias=True)
    if recipe.precision == "float32":
        image = image.clamp(0, 1)
    image = F.crop(image, *plan.window[row].tolist(), *plan.size)  # black outside of the image
    horizontally, vertically = plan.flip[row].tolist()
    image = F.horizontal_flip(image) if horizontally else image
    image = F.vertical_flip(image) if vertically else image
    for step in plan.colour:
        if isinstance(step, JitterRows):
            for operation in step.order[row].tolist():
                if step.used[operation]:
                    image = ADJUST[operation](image, float(step.factors[row, operation]))
        elif step.apply[row]:
            image = F.rgb_to_grayscale(image, num_output_channels=3)
    return image.float() / 255 if recipe.precision == "uint8" else image


def references(records, plan, recipe):
    """A batch of `reference`, normalised."""
    found = [reference(decoded(record, recipe), plan, row, recipe) for row, record in enumerate(records)]
    return F.normalize(torch.stack(found), recipe.normalize.mean, recipe.normalize.std)


def lsb(found, expected, recipe):
    """Absolute differences in 1/255 of the range before Normalize."""
    std = torch.tensor(recipe.normalize.std, dtype=torch.float64).view(3, 1, 1)
    return (found.double() - expected.double()).abs() * std * 255


def assert_within(found, expected, recipe, limit, p999=None):
    """The largest difference, and the 99.9th percentile of all, stay within limits in LSB."""
    difference = lsb(found, expected, recipe)
    worst = difference.amax(dim=(1, 2, 3))
    assert worst.max() <= limit, f"row {worst.argmax()}: {worst.max():.4f} LSB, allowed {limit}"
    if p999 is not None:
        beyond = (difference > p999).double().mean().item()
        assert beyond <= 0.001, f"{beyond:.2%} of the pixels are more than {p999} LSB off, allowed 0.1%"
