"""Run two backends over the same records and plans, stage by stage, and sum up how far apart they are."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from gpupipe import plan as planning
from gpupipe.backends.base import Applied, Options
from gpupipe.errors import BackendError, BackendUnavailable, ConfigError, RecordError
from gpupipe.headers import scan_record, upright_size
from gpupipe.parity import stages, tolerances
from gpupipe.parity.environment import environment
from gpupipe.parity.plain import PlainBackend
from gpupipe.parity.report import BadFile, Report, Row
from gpupipe.parity.sides import Both, Sample, Side, Sides
from gpupipe.parity.tally import F32, Tally
from gpupipe.parity.tolerances import ROUNDING_LSB, STRONG_FACTOR, Kind, Pair, Tolerance
from gpupipe.recipe import Recipe
from gpupipe.records import Plan, Record
from gpupipe.sources import open_source
from gpupipe.sources.base import Source

if TYPE_CHECKING:
    import torch

BATCH_SIZE = 32
# Of one backend's decoded batch. Large pictures come in smaller batches.
BATCH_BYTES = 96 << 20
TODAY: tuple[Kind, ...] = ("PIL", "uint8")

Draw = tuple[int, int]


def check_parity(  # noqa: PLR0913 - the options of the command, each with a default
    source: str | os.PathLike[str] | Source,
    recipe: Recipe | object,
    *,
    backend: str = "auto",
    reference: str = "torchvision",
    seeds: Sequence[int] = (0,),
    epochs: Sequence[int] = (0,),
    limit: int | None = None,
    options: Options | None = None,
    progress: bool = False,
) -> Report:
    """Compare two backends stage by stage on real files: decode, resize, jitter, operations, ..., the whole chain.

    Every stage gets the same pixels on both sides, so that a difference belongs to it alone. The whole chain is also
    compared with what people run today, stock torchvision on PIL images and on uint8 tensors. Functions of your own
    and the mixing of batches are left out: they are the same code on every backend.

    Args:
        source: What `gpupipe.open_source` takes.
        recipe: A `Recipe`, or a torchvision transform.
        backend: The backend under test: a name, or name:device ("dali:cpu", "dali:cuda:0"). "auto" is the one that a
            `Loader` takes; where that is the reference itself, DALI's CPU operators, if DALI is installed.
        reference: What it is compared with; likewise.
        seeds, epochs: Crops, flips and all else is drawn for each pair of them; once if the recipe has nothing random.
        limit: At most this many files, evenly spaced over the source; None: all.
        options: For both backends.
        progress: Show a bar on stderr, if tqdm is installed.

    Returns:
        A `Report`; its `ok` says whether every tolerance holds.

    Raises:
        ConfigError: An argument that cannot work, or a source without samples.
        BackendUnavailable: A backend or device that this machine does not have.
        BackendError: A backend failed for a reason other than its input.

    Parity: `gpupipe.parity.tolerances` holds the bounds and their reasons.
    """
    began = time.perf_counter()
    opened = open_source(source)
    found = recipe if isinstance(recipe, Recipe) else Recipe.from_torchvision(recipe)
    indices = _chosen(len(opened), limit)
    if not indices:
        raise ConfigError(f"{opened.uri} has no samples to compare", field="source", value=opened.uri)
    other = Side.of(reference, options)
    under_test = Side.of(backend, options)
    if backend == "auto" and under_test == other:
        with contextlib.suppress(BackendUnavailable):
            under_test = Side.of("dali:cpu", options)
    draws = _draws(found, seeds, epochs)
    steps = replace(found, functions=(), mix=None)
    comparison = _Comparison(opened, steps, under_test, other, draws)
    comparison.run(indices, _bar(progress, len(indices) * len(draws)))
    return Report(
        backend=str(under_test),
        reference=str(other),
        recipe=found,
        source=opened.uri,
        draws=draws,
        files=len(indices),
        rows=comparison.rows(),
        undecodable=tuple(sorted(comparison.bad.values(), key=lambda file: file.index)),
        environment=environment(),
        seconds=time.perf_counter() - began,
    )


@dataclass(slots=True)
class _Found:
    """What is being summed up for one row of the report."""

    tolerance: Tolerance
    tally: Tally = field(default_factory=Tally)


class _Comparison:
    """The work of one `parity` call."""

    def __init__(self, source: Source, recipe: Recipe, backend: Side, reference: Side, draws: tuple[Draw, ...]) -> None:
        self.source, self.recipe, self.draws = source, recipe, draws
        self.sides = backend, reference
        self.pair = Pair(
            backend=backend.name,
            reference=reference.name,
            gpu=backend.gpu or reference.gpu,
            gpu_decode=backend.gpu_decode or reference.gpu_decode,
        )
        self.bad: dict[int, BadFile] = {}
        self._found: dict[tuple[str, str], _Found] = {}
        self._random = _is_random(recipe)
        self._resize = stages.resize_stage(recipe)
        self._later = stages.later_stages(recipe, same_pixels=self.pair.gpu_decode)
        self._today = tuple(PlainBackend(recipe, kind) for kind in TODAY)

    def rows(self) -> tuple[Row, ...]:
        """In the order of the chain."""
        order = ["decode", self._resize.name, *(stage.name for stage in self._later)]
        found = sorted(self._found.items(), key=lambda item: (order.index(item[0][0]), item[0][1]))
        return tuple(Row.of(stage, variant, row.tally, row.tolerance) for (stage, variant), row in found)

    def run(self, indices: Sequence[int], bar: AbstractContextManager[Callable[[int], object]]) -> None:
        """Canvas by canvas, because a backend is built for one output size."""
        with bar as advance, ExitStack() as stack:
            groups: dict[tuple[int, int], list[int]] = {}
            for index in indices:
                sample = self._read(index)
                if sample is None:
                    advance(len(self.draws))
                else:
                    canvas = stages.canvas_size(*upright_size(sample[1], self.recipe.exif))
                    groups.setdefault(canvas, []).append(index)
            geometry = stack.enter_context(Both.of(self.sides, self._resize.recipe, BATCH_SIZE))
            later = [
                (stage, stack.enter_context(Both.of(self.sides, stage.recipe, BATCH_SIZE))) for stage in self._later
            ]
            for canvas, members in sorted(groups.items()):
                batch_size = int(np.clip(BATCH_BYTES // (12 * canvas[0] * canvas[1]), 1, BATCH_SIZE))
                decode_recipe = stages.decode_recipe(self.recipe, canvas)
                with Both.of(self.sides, decode_recipe, batch_size) as decoders:
                    for first in range(0, len(members), batch_size):
                        read = [self._read(index) for index in members[first : first + batch_size]]
                        samples = [sample for sample in read if sample is not None]
                        decoded = self._decode(decoders, decode_recipe, samples)
                        for draw in self.draws:
                            self._draw(draw, decoded, geometry, later)
                            advance(len(read))

    def _read(self, index: int) -> Sample | None:
        """A record and its header; None, and a note in `bad`, where nobody could even begin to decode it."""
        if index in self.bad:
            return None
        try:
            record = self.source[index]
            return record, scan_record(record)
        except RecordError as error:
            key = error.key or str(index)
            self.bad[index] = BadFile(key=key, index=index, reasons={"source": _why(error)}, agreed=True)
            return None

    def _decode(self, both: Both, recipe: Recipe, samples: list[Sample]) -> list[tuple[Sample, Sample]]:
        """Compare the decoders; the samples that both read, with their pixels as the reference has them."""
        if not samples:
            return []
        plan = self._plan(recipe, samples, (0, 0))
        applied = both.apply(samples, plan)
        backend, reference = (np.rint(255 * _numpy(side.images)) for side in applied)
        self._note_errors(samples, applied)
        good = []
        for row, sample in enumerate(samples):
            record, header = sample
            if record.index in self.bad:
                continue
            top, left = -plan.window[row]
            height, width = plan.box[row, 2:]
            area = np.s_[row, top : top + height, left : left + width]
            kind = stages.kind(record, header)
            self._add("decode", kind, tolerances.decode(self.pair, kind), backend[area], reference[area], record, None)
            pixels = np.clip(reference[area], 0, 255).astype(np.uint8)
            good.append((sample, stages.lossless(record, pixels)))
        return good

    def _draw(
        self,
        draw: Draw,
        decoded: list[tuple[Sample, Sample]],
        geometry: Both,
        later: list[tuple[stages.Stage, Both]],
    ) -> None:
        """Everything behind the decoder, for one seed and epoch."""
        if not decoded:
            return
        files, lossless = [file for file, _ in decoded], [pixels for _, pixels in decoded]
        applied = geometry.apply(lossless, self._plan(self._resize.recipe, lossless, draw))
        self._refuse_errors(self._resize.name, lossless, applied)
        backend, reference = (255 * _numpy(side.images) for side in applied)
        for row, (record, _) in enumerate(lossless):
            tolerance = tolerances.resize(self.pair, self.recipe)
            self._add(self._resize.name, "", tolerance, backend[row], reference[row], record, draw)
        small = np.clip(np.rint(reference), 0, 255).astype(np.uint8)
        resized = [stages.lossless(record, pixels) for (record, _), pixels in zip(lossless, small, strict=True)]
        feeds = {"file": files, "decoded": lossless, "resized": resized, "before": resized}
        for stage, both in later:
            samples = feeds[stage.feed]
            plan = self._plan(stage.recipe, samples, draw)
            applied = both.apply(samples, plan)
            if stage.feed == "file":
                self._note_errors(samples, applied)
                self._compare_with_today(samples, plan, applied[0], draw)
            else:
                self._refuse_errors(stage.name, samples, applied)
            reference = self._compare(stage, samples, plan, applied, draw)
            if stage.feed == "before":
                pixels = np.clip(np.rint(reference), 0, 255).astype(np.uint8)
                feeds["before"] = [
                    stages.lossless(record, image) for (record, _), image in zip(samples, pixels, strict=True)
                ]

    def _compare(self, stage: stages.Stage, samples: list[Sample], plan: Plan, applied: Sides, draw: Draw) -> F32:
        """Returns the reference's images, as `_in_lsb` does."""
        backend, reference = (_in_lsb(side.images, stage.recipe) for side in applied)
        factors = stages.strongest_factor(plan)
        for row, (record, _) in enumerate(samples):
            if record.index in self.bad:
                continue
            strong, decided = bool(factors[row] > STRONG_FACTOR), stages.decided(plan, row)
            match stage.does:
                case "normalise":
                    tolerance = tolerances.normalize(self.recipe)
                case "erase":
                    tolerance = tolerances.erase(self.recipe)
                case "jitter":
                    tolerance = tolerances.jitter(self.pair, self.recipe, strong=strong)
                case "operation":
                    tolerance = tolerances.operation(self.pair, self.recipe, strong=strong, decided=bool(decided))
                case _:
                    same = stage.feed == "decoded"
                    tolerance = tolerances.chain(
                        self.pair, self.recipe, strong=strong, same_pixels=same, decided=bool(decided)
                    )
            variant = decided if tolerance.share and decided else _variant(strong=strong)
            self._add(stage.name, variant, tolerance, backend[row], reference[row], record, draw)
        return reference

    def _compare_with_today(self, samples: list[Sample], plan: Plan, applied: Applied, draw: Draw) -> None:
        backend = _in_lsb(applied.images, self.recipe)
        factors = stages.strongest_factor(plan)
        for plain in self._today:
            stock = plain.submit([s[0] for s in samples], [s[1] for s in samples], plan).result()
            reference = _in_lsb(stock.images, self.recipe)
            for row, (record, _) in enumerate(samples):
                if record.index not in self.bad and row not in stock.errors:
                    strong = bool(factors[row] > STRONG_FACTOR)
                    tolerance = tolerances.today(self.pair, self.recipe, plain.kind, strong=strong)
                    variant = ", ".join(filter(None, (f"vs {plain.kind} today", _variant(strong=strong))))
                    self._add("whole chain", variant, tolerance, backend[row], reference[row], record, draw)

    def _add(
        self,
        stage: str,
        variant: str,
        tolerance: Tolerance,
        backend: F32,
        reference: F32,
        record: Record,
        draw: Draw | None,
    ) -> None:
        allowed: F32 | float = 0.0
        if tolerance.relative:  # a share of the normalised value
            black = 255 * np.array(self.recipe.normalize.mean, np.float32)
            allowed = np.float32(tolerance.relative) * np.abs(reference - black)
        seed, epoch = draw if draw is not None and self._random else (None, None)
        found = self._found.setdefault((stage, variant), _Found(tolerance))
        bound = math.inf if tolerance.max_lsb is None else tolerance.max_lsb + ROUNDING_LSB
        which = {"key": record.key, "index": record.index, "seed": seed, "epoch": epoch}
        found.tally.add(backend, reference, allowed=allowed, bound=bound, **which)

    def _plan(self, recipe: Recipe, samples: list[Sample], draw: Draw) -> Plan:
        return planning.make_plan(
            recipe,
            seed=draw[0],
            epoch=draw[1],
            indices=[record.index for record, _ in samples],
            sizes=[upright_size(header, recipe.exif) for _, header in samples],
        )

    def _note_errors(self, samples: list[Sample], applied: Sides) -> None:
        """Files that a side cannot read; it is a fault of the backends only if they do not agree."""
        for row, (record, _) in enumerate(samples):
            if record.index in self.bad:
                continue
            reasons = {
                who: _why(side.errors[row])
                for who, side in zip(("backend", "reference"), applied, strict=True)
                if row in side.errors
            }
            if reasons:
                self.bad[record.index] = BadFile(
                    key=record.key, index=record.index, reasons=reasons, agreed=len(reasons) == 2
                )

    def _refuse_errors(self, stage: str, samples: list[Sample], applied: Sides) -> None:
        for side, made in zip(self.sides, applied, strict=True):
            for row, error in made.errors.items():
                raise BackendError(
                    f"{side} cannot read the lossless BMP of {samples[row][0].key} in stage {stage}: {error}",
                    backend=side.name,
                    stage=stage,
                ) from error


def _numpy(images: torch.Tensor) -> F32:
    """(n, 3, h, w) of any type and place -> float32 (n, h, w, 3)."""
    found: npt.NDArray[np.float32] = images.detach().float().cpu().permute(0, 2, 3, 1).numpy()
    return found


def _in_lsb(images: torch.Tensor, recipe: Recipe) -> F32:
    """float32 (n, h, w, 3), un-normalised."""
    mean, std = (255 * np.array(values, np.float32) for values in (recipe.normalize.mean, recipe.normalize.std))
    found: F32 = _numpy(images) * std + mean
    return found


def _variant(*, strong: bool) -> str:
    return f"factor > {STRONG_FACTOR:g}" if strong else ""


def _why(error: RecordError) -> str:
    """The reason alone: the report names the file itself."""
    cause = error.__cause__
    return cause.message if isinstance(cause, RecordError) else error.message


def _chosen(length: int, limit: int | None) -> list[int]:
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
        raise ConfigError(
            f"limit={limit!r} is not valid: it must be None or an integer of at least 1",
            field="limit",
            value=limit,
            allowed="None or an integer >= 1",
        )
    count = length if limit is None else min(limit, length)
    return [index * length // count for index in range(count)] if count else []


def _is_random(recipe: Recipe) -> bool:
    """Whether the recipe draws anything."""
    return planning.draw(recipe, seed=0, epoch=0, indices=[0]).uniforms.size > 0


def _draws(recipe: Recipe, seeds: Sequence[int], epochs: Sequence[int]) -> tuple[Draw, ...]:
    for name, values in (("seeds", seeds), ("epochs", epochs)):
        if not isinstance(values, Sequence) or not values:
            raise ConfigError(
                f"{name}={values!r} is not valid: it must be a sequence of at least one integer, like (0, 1)",
                field=name,
                value=values,
                allowed="integers >= 0",
            )
    found = tuple((seed, epoch) for seed in dict.fromkeys(seeds) for epoch in dict.fromkeys(epochs))
    # Nothing random: every draw would be the same work again.
    return found if _is_random(recipe) else found[:1]


@contextlib.contextmanager
def _bar(show: bool, total: int) -> Iterator[Callable[[int], object]]:  # noqa: FBT001 - private
    if show:
        try:
            from tqdm import tqdm
        except ImportError:
            pass
        else:
            with tqdm(total=total, unit="image", desc="parity", leave=False) as bar:
                yield bar.update
            return
    yield lambda _: None
