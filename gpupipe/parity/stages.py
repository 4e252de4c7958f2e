"""What each stage does alone, as recipes and records that any backend takes.

A stage is tested by giving both sides the *same* pixels, losslessly encoded, and a recipe with that stage only, so
that no difference of an earlier stage is left in it.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from gpupipe.errors import DecodeError
from gpupipe.headers import Header, scan
from gpupipe.parity.tolerances import decides
from gpupipe.pillow import use_image
from gpupipe.recipe import Output, Recipe
from gpupipe.records import JitterRows, Operation, OperationRows, Plan, Record
from gpupipe.steps import CenterCrop, Normalize, RandomCrop, RandomInvert, Step
from gpupipe.steps.choosing import Container

U8 = npt.NDArray[np.uint8]
Feed = Literal["file", "decoded", "resized", "before"]
Work = Literal["resize", "jitter", "operation", "normalise", "erase", "chain"]

# Pictures are compared on canvases of a few common sizes, because a backend is built for one output size.
_SMALLEST_CANVAS_PX = 256
_LARGEST_DOUBLED_PX = 4096
_LARGE_STEP_PX = 1024

_SAMPLINGS = {
    (1, 1): "4:4:4",
    (2, 1): "4:2:2",
    (1, 2): "4:4:0",
    (2, 2): "4:2:0",
    (4, 1): "4:1:1",
    (4, 2): "4:1:0",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """One stage behind the decoder.

    Attributes:
        name: As the report calls it.
        does: What kind of work it is.
        recipe: What both sides do.
        feed: What both sides get: the file, its decoded pixels, the resized ones, or what the reference made of those
            in the colour stages before this one.
    """

    name: str
    does: Work
    recipe: Recipe
    feed: Feed


def resize_stage(recipe: Recipe) -> Stage:
    """The recipe's geometry alone: crop, resize, flips."""
    geometry = [step for step in recipe.steps if step.STAGE in ("crop", "center", "flip")]
    name = "resize" if any(step.STAGE == "crop" for step in geometry) else "crop"
    return Stage(name=name, does="resize", recipe=_part(recipe, geometry), feed="decoded")


def later_stages(recipe: Recipe, *, same_pixels: bool) -> tuple[Stage, ...]:
    """What comes after the resize, and the whole chain.

    Args:
        recipe: The recipe.
        same_pixels: Add the whole chain on equal decoded pixels, for decoders that are known to differ.
    """
    keep_size: list[Step] = [CenterCrop(recipe.output_size)]
    normalize = [step for step in recipe.steps if isinstance(step, Normalize)]
    found = []

    def add(name: str, does: Work, steps: Sequence[Step], feed: Feed, output: Output) -> None:
        part = replace(_part(recipe, [*keep_size, *steps]), output=output)
        found.append(Stage(name=name, does=does, recipe=part, feed=feed))

    if recipe.colour_steps:
        add("jitter", "jitter", recipe.colour_steps, "before", Output())
    for name, steps in _operations(recipe):
        add(name, "operation", steps, "before", Output())
    if normalize or recipe.output.dtype != "float32":
        add("normalise", "normalise", normalize, "resized", recipe.output)
    if recipe.erasing_steps:
        add("erase", "erase", [*normalize, *recipe.erasing_steps], "resized", recipe.output)
    if same_pixels:
        same = replace(recipe, exif="ignore")
        found.append(Stage(name="chain, same pixels", does="chain", recipe=same, feed="decoded"))
    found.append(Stage(name="whole chain", does="chain", recipe=recipe, feed="file"))
    return tuple(found)


def _operations(recipe: Recipe) -> Iterator[tuple[str, list[Step]]]:
    """A name for each operation, and the steps that do it alone.

    Borders and flips are not among them: the resize has them.
    """
    seen: Counter[str] = Counter()
    for step in recipe.operation_steps:
        if isinstance(step, RandomCrop) or step.STAGE == "flip":
            continue
        name = _name(step)
        seen[name] += 1
        steps = [step] if step.STAGE == "operation" and not isinstance(step, Container) else [_AS_OPERATION, step]
        yield (name if seen[name] == 1 else f"{name} {seen[name]}"), steps


# Does nothing; what stands behind it is an operation, too, as it is in the recipe.
_AS_OPERATION = RandomInvert(p=0.0)


def _name(step: Step) -> str:
    inside = f"({', '.join(map(_name, step.steps))})" if isinstance(step, Container) else ""
    return type(step).__name__ + inside


def decode_recipe(recipe: Recipe, canvas: tuple[int, int]) -> Recipe:
    """Decode only: the picture, unchanged, in the middle of a black canvas."""
    return Recipe(steps=(CenterCrop(canvas),), precision=recipe.precision, exif=recipe.exif)


def canvas_size(height: int, width: int) -> tuple[int, int]:
    """The canvas for a picture: few different ones for many pictures."""
    return _canvas_side(height), _canvas_side(width)


def _canvas_side(side: int) -> int:
    if side > _LARGEST_DOUBLED_PX:
        return -(-side // _LARGE_STEP_PX) * _LARGE_STEP_PX
    return max(_SMALLEST_CANVAS_PX, 1 << (side - 1).bit_length())


def _part(recipe: Recipe, steps: list[Step]) -> Recipe:
    """Some steps; lossless records are upright already, and stages are compared in float32."""
    return Recipe(steps=tuple(steps), precision=recipe.precision)


def lossless(record: Record, pixels: U8) -> tuple[Record, Header]:
    """The same sample with these pixels as its file: a BMP, which every reader decodes to the same bytes.

    Args:
        record: Whose key, label and index to keep.
        pixels: uint8 (h, w, 3).
    """
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "BMP")
    data = buffer.getvalue()
    return replace(record, data=data), scan(data)


def strongest_factor(plan: Plan) -> npt.NDArray[np.float64]:
    """float64 (n,): the largest factor of brightness, contrast, saturation or sharpness of each row; at least 1."""
    found = np.ones(len(plan))
    for step in (*plan.colour, *plan.operations):
        if isinstance(step, JitterRows) and any(step.used[:3]):
            found = np.maximum(found, step.factors[:, :3][:, np.flatnonzero(step.used[:3])].max(axis=1))
        elif isinstance(step, OperationRows):
            found = np.maximum(found, np.where(np.isin(step.operation, _WITH_FACTOR), step.parameters[:, 0], 1.0))
    return found


_WITH_FACTOR = (Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.SHARPNESS)


def decided(plan: Plan, row: int) -> str:
    """By which operation of this row a rounding error can turn into another picture, pixel by pixel; "" for none.

    Each has rows of its own in the report: a share of all of them would hide what is wrong with one.
    """
    found = {
        Operation(step.operation[row]).name.lower()
        for step in plan.operations
        if isinstance(step, OperationRows) and decides(step, row)
    }
    return found.pop() if len(found) == 1 else "several operations" if found else ""


def kind(record: Record, header: Header) -> str:
    """What sort of file it is, as far as decoders care: "JPEG 4:2:0", "JPEG grey", "JPEG CMYK", "PNG", ..."""
    if header.format != "JPEG":
        return header.format
    try:
        return use_image(record.data, _jpeg_kind)
    except DecodeError:
        return "JPEG"


def _jpeg_kind(image: Image.Image) -> str:
    if image.mode != "RGB" or not isinstance(image, JpegImageFile):
        return {"L": "JPEG grey", "CMYK": "JPEG CMYK"}.get(image.mode, "JPEG")
    # (component, horizontal sampling, vertical sampling, table) each; luma first.
    (_, h, v, _), (_, chroma_h, chroma_v, _) = image.layer[:2]
    return "JPEG " + _SAMPLINGS.get((h // chroma_h, v // chroma_v), "other sampling")
