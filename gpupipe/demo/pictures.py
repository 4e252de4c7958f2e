"""A small labelled data set of JPEGs, made from pictures that installed packages ship. Nothing is downloaded."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from gpupipe.errors import GpupipeError

# Package -> folder and pictures that are inside its wheel; each picture is a class. Files that a release lacks are
# passed over. Not through skimage.data, which would download what it does not find.
_SHIPPED = {
    "skimage": (
        "data",
        (
            "astronaut.png",
            "brick.png",
            "camera.png",
            "chelsea.png",
            "coffee.png",
            "coins.png",
            "grass.png",
            "gravel.png",
            "hubble_deep_field.jpg",
            "ihc.png",
            "moon.png",
            "motorcycle_left.png",
            "retina.jpg",
            "rocket.jpg",
        ),
    ),
    "sklearn": ("datasets/images", ("china.jpg", "flower.jpg")),
}

# In turn, about as often as in photo collections; every 12th is grey, every 7th progressive.
_SUBSAMPLINGS = ("4:2:0", "4:4:4", "4:2:0", "4:2:2", "4:2:0")
_GREY_EVERY, _PROGRESSIVE_EVERY = 12, 7
_TURN_DEGREES = 10.0


def shipped() -> dict[str, Path]:
    """Label -> file of each picture that is there."""
    found = {}
    for package, (folder, names) in _SHIPPED.items():
        spec = importlib.util.find_spec(package)
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            for name in names:
                path = Path(root, folder, name)
                if path.is_file():
                    found[path.stem.removesuffix("_left").replace("_", " ")] = path
    return dict(sorted(found.items()))


def make(root: Path, count: int) -> Iterator[Path]:
    """Write `count` JPEGs into class folders below `root`, one after another; the same ones each time.

    Crops, scaled and turned a little, in the sizes of photo collections: mostly about 500 x 375 pixels, some small,
    some large.

    Yields:
        Each file, once it is written.

    Raises:
        GpupipeError: No picture is there, or a file cannot be written.
    """
    sources = shipped()
    if not sources:
        raise GpupipeError(
            "the demo makes its images from pictures that scikit-image and scikit-learn ship, and neither is "
            "installed: pip install 'gpupipe[demo]', or name a folder of class folders with --folder"
        )
    opened = {label: _open(path) for label, path in sources.items()}
    labels = list(opened)
    for number in range(count):
        label = labels[number % len(labels)]
        rng = np.random.default_rng([0, number])
        image = _view(opened[label], rng)
        if number % _GREY_EVERY == _GREY_EVERY - 1:
            image = image.convert("L")
        name = label.replace(" ", "_")
        path = root / name / f"{name}_{number // len(labels):03}.jpg"
        # Pillow knows no subsampling of a grey image.
        sampling: dict[str, Any] = {"subsampling": _SUBSAMPLINGS[number % len(_SUBSAMPLINGS)]}
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            image.save(
                path,
                quality=int(rng.integers(75, 96)),
                progressive=number % _PROGRESSIVE_EVERY == 0,
                **(sampling if image.mode == "RGB" else {}),
            )
        except OSError as error:
            raise GpupipeError(f"cannot write {path}: {error.strerror or error}") from error
        yield path


def _open(path: Path) -> Image.Image:
    with Image.open(path) as image:
        return image.convert("RGB")


def _view(picture: Image.Image, rng: np.random.Generator) -> Image.Image:
    """A part of the picture, turned by some degrees, in a size that photos have."""
    degrees = rng.uniform(-_TURN_DEGREES, _TURN_DEGREES)
    turned = picture.rotate(degrees, resample=Image.Resampling.BICUBIC)
    width, height = turned.size
    # What is left of either side without the black corners.
    sine, cosine = np.sin(np.radians(abs(degrees))), np.cos(np.radians(degrees))
    inside = 1 / (cosine + sine * max(width / height, height / width))
    out_w, out_h = _size(rng)
    scale = rng.uniform(0.6, 1.0) * inside * min(width / out_w, height / out_h)
    part_w, part_h = out_w * scale, out_h * scale
    slack_w, slack_h = width * inside - part_w, height * inside - part_h
    left = width * (1 - inside) / 2 + rng.uniform(0, max(slack_w, 0))
    top = height * (1 - inside) / 2 + rng.uniform(0, max(slack_h, 0))
    box = (left, top, left + part_w, top + part_h)
    image = turned.resize((out_w, out_h), Image.Resampling.LANCZOS, box=box)
    return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.3 else image


def _size(rng: np.random.Generator) -> tuple[int, int]:
    """Width and height: mostly a photo of 500 pixels, one in ten small, one in twelve large."""
    kind = rng.random()
    if kind < 0.1:
        long = int(rng.integers(64, 240))
    elif kind < 0.18:
        long = int(rng.integers(900, 1601))
    else:
        long = 500 if rng.random() < 0.6 else int(rng.integers(320, 801))
    short = round(long * rng.choice([0.6, 2 / 3, 0.75, 0.75, 0.8, 1.0]))
    return (short, long) if rng.random() < 0.25 else (long, short)
