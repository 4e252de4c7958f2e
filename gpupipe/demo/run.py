"""The demo: data, backend, speed, parity, pictures, in this order and in under a minute."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe import backends, decode
from gpupipe.demo import pictures, sheet, speed
from gpupipe.errors import BackendUnavailable, ConfigError, GpupipeError, RecordError
from gpupipe.headers import scan_record
from gpupipe.loader import Loader
from gpupipe.parity import Report, check_parity
from gpupipe.recipe import Recipe
from gpupipe.records import Record
from gpupipe.sources.base import check_index, fingerprint_of
from gpupipe.sources.folder import ImageFolder

BATCH_SIZE = 32
JITTER = (0.4, 0.4, 0.4, 0.1)
PARITY_IMAGES = 40
SHEET_IMAGES = 16

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Demo:
    """What the demo found.

    Attributes:
        folder: The data set.
        images_per_second: Loader -> speed.
        reports: One for each backend that was compared with torchvision.
        written: The files it wrote, the data set apart.
    """

    folder: str
    images_per_second: dict[str, float]
    reports: tuple[Report, ...]
    written: tuple[Path, ...]

    @property
    def ok(self) -> bool:
        """Whether all parity reports are."""
        return all(report.ok for report in self.reports)


def demo(
    *,
    folder: str | os.PathLike[str] | None = None,
    out: str | os.PathLike[str] = "demo-out",
    images: int = 256,
    say: Say,
    progress: bool = False,
) -> Demo:
    """Show what gpupipe does on a small data set.

    Args:
        folder: A folder of class folders; None: images are made from what installed packages ship.
        out: Where everything is written.
        images: How many images to make, or to take from `folder`.
        say: Called with each line for the user.
        progress: Show bars on stderr, if tqdm is installed.

    Raises:
        ConfigError: `images` is too small.
        GpupipeError: No images, or nothing can be written to `out`.
    """
    if images < 1:
        raise ConfigError(f"images={images} is not valid: it must be at least 1", field="images", value=images)
    began = time.perf_counter()
    target = Path(out)
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpupipeError(f"cannot write to {target}: {error.strerror or error}") from error
    source = _made(target, images, say) if folder is None else _taken(folder, images, say)
    recipe = Recipe.train(size=224, jitter=JITTER)

    chosen = backends.choose("auto", None)
    say(f"backend   {chosen.reason}")
    choices = [chosen, *_others(chosen.name, say)]
    speeds = _speeds(source, recipe, choices, say, progress=progress)

    written, reports = [], []
    for choice in [choice for choice in choices if choice.name != "torchvision"] or choices:
        report = check_parity(
            source, recipe, backend=f"{choice.name}:{choice.device}", limit=PARITY_IMAGES, progress=progress
        )
        reports.append(report)
        written.append(report.write_html(target / f"parity-{choice.name}.html"))
        say(f"parity    {report.backend} against {report.reference}, {report.files} images: {report.verdict}")
        if not report.ok:
            say(report.table())

    some = source.spread(SHEET_IMAGES)
    written += [
        _sheet(some, recipe, target / "train.png", epochs=2),
        _sheet(some, Recipe.eval(size=224, resize=256), target / "eval.png", epochs=1),
    ]
    for path in written:
        say(f"written   {path}")
    say(f"done      in {time.perf_counter() - began:.0f} s")
    return Demo(folder=source.uri, images_per_second=speeds, reports=tuple(reports), written=tuple(written))


def _made(target: Path, count: int, say: Say) -> _Picked:
    root = target / f"images-{count}"
    files = list(pictures.make(root, count))
    folder = ImageFolder(root)
    size_mb = sum(path.stat().st_size for path in files) / 1e6
    say(
        f"data      {len(files)} JPEGs ({size_mb:.1f} MB) in {root}: views of {len(folder.classes)} pictures that "
        "scikit-image and scikit-learn ship"
    )
    return _Picked(folder, range(len(folder)))


def _taken(target: str | os.PathLike[str], count: int, say: Say) -> _Picked:
    """Images of the user's folder, evenly spaced, without those that cannot be decoded."""
    folder = ImageFolder(target)
    tried = _Picked(folder, range(len(folder))).spread(count).indices
    good = [index for index in tried if _is_good(folder, index)]
    bad = len(tried) - len(good)
    if not good:
        raise GpupipeError(f"none of the {bad} images tried in {folder.uri} can be decoded")
    left_out = f"; {bad} more cannot be decoded and are left out" if bad else ""
    say(f"data      {len(good)} of the {len(folder)} images in {folder.uri}{left_out}")
    return _Picked(folder, good)


def _is_good(folder: ImageFolder, index: int) -> bool:
    try:
        record = folder[index]
        decode.rgb(record.data, scan_record(record))
    except RecordError:
        return False
    return True


def _others(chosen: str, say: Say) -> list[backends.Choice]:
    """The backends besides the chosen one that run here."""
    found = [] if chosen == "torchvision" else [backends.choose("torchvision", "cpu")]
    if chosen != "dali":
        try:
            found.append(backends.choose("dali", "cpu"))
        except BackendUnavailable as error:
            say(f"          DALI is not compared: {error}")
        else:
            say("          DALI runs the GPU's graph on its CPU operators below: for parity, not for speed")
    return found


def _speeds(
    source: _Picked, recipe: Recipe, choices: Sequence[backends.Choice], say: Say, *, progress: bool
) -> dict[str, float]:
    """Of today's DataLoader and of each backend. The DataLoader comes first: it forks, which threads do not like."""
    found = {}

    def measure(name: str, batches: Any) -> None:
        found[name] = speed.images_per_second(batches, len(source), bar=name if progress else None)
        say(f"speed     {found[name]:6.0f} images/s  {name}")

    plain = speed.plain_loader(source.uri, source.indices, recipe, BATCH_SIZE)
    measure(f"torchvision + PIL, DataLoader(num_workers={speed.PLAIN_WORKERS})", plain)
    del plain  # ends its workers
    for choice in choices:
        loader = Loader(source, recipe, batch_size=BATCH_SIZE, shuffle=True, backend=choice.name, device=choice.device)
        with loader:
            measure(f"gpupipe, {choice}", loader)
    return found


def _sheet(source: _Picked, recipe: Recipe, path: Path, *, epochs: int) -> Path:
    """What the model would see of a few images, epoch by epoch."""
    rows = [("file", [sheet.original(source[index]) for index in range(len(source))])]
    with Loader(source, recipe, batch_size=len(source)) as loader:
        for epoch in range(epochs):
            for images, _ in loader:
                name = f"epoch {epoch}" if epochs > 1 else "model"
                rows.append((name, sheet.pictures(images, recipe.normalize)))
    steps = ", ".join(type(step).__name__ for step in recipe.steps if step is not recipe.normalize)
    title = f"What a model sees after {steps}: {recipe.output_size[0]} x {recipe.output_size[1]}"
    return sheet.write(path, title, source.captions, rows)


class _Picked:
    """Some images of a folder, as a source."""

    columns: tuple[str, ...] = ()

    def __init__(self, folder: ImageFolder, indices: Sequence[int]) -> None:
        self.folder, self.indices = folder, list(indices)
        self.uri = folder.uri

    def spread(self, count: int) -> _Picked:
        """At most `count` of them, evenly spaced."""
        have = len(self.indices)
        count = min(count, have)
        return _Picked(self.folder, [self.indices[position * have // count] for position in range(count)])

    @property
    def labels(self) -> npt.NDArray[np.int64]:
        return self.folder.labels[self.indices]

    @property
    def captions(self) -> list[str]:
        """The names of the labels."""
        return [self.folder.classes[label] for label in self.labels.tolist()]

    @property
    def fingerprint(self) -> str:
        return fingerprint_of([f"{self.folder.key(index)}\0".encode() for index in self.indices], self.labels)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Record:
        return replace(self.folder[self.indices[check_index(index, len(self))]], index=index)

    def close(self) -> None:
        self.folder.close()
