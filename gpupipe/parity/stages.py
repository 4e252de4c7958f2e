"""What each stage does alone, as recipes and records that any backend takes.

A stage is tested by giving both sides the *same* pixels, losslessly encoded, and a recipe with that stage only, so
that no difference of an earlier stage is left in it.
"""

from __future__ import annotations

import io
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from gpupipe.errors import DecodeError
from gpupipe.headers import Header, scan
from gpupipe.pillow import use_image
from gpupipe.recipe import Output, Recipe
from gpupipe.records import JitterRows, Plan, Record
from gpupipe.steps import CenterCrop, Normalize, Step

U8 = npt.NDArray[np.uint8]
Feed = Literal["file", "decoded", "resized"]

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
        recipe: What both sides do.
        feed: What both sides get: the file, its decoded pixels, or the resized ones.
    """

    name: str
    recipe: Recipe
    feed: Feed


def resize_stage(recipe: Recipe) -> Stage:
    """The recipe's geometry alone: crop, resize, flips."""
    geometry = [step for step in recipe.steps if step.STAGE in ("crop", "center", "flip")]
    name = "resize" if any(step.STAGE == "crop" for step in geometry) else "crop"
    return Stage(name=name, recipe=_part(recipe, geometry), feed="decoded")


def later_stages(recipe: Recipe, *, same_pixels: bool) -> tuple[Stage, ...]:
    """What comes after the resize, and the whole chain.

    Args:
        recipe: The recipe.
        same_pixels: Add the whole chain on equal decoded pixels, for decoders that are known to differ.
    """
    keep_size: list[Step] = [CenterCrop(recipe.output_size)]
    found = []
    if recipe.colour_steps:
        found.append(Stage(name="jitter", recipe=_part(recipe, [*keep_size, *recipe.colour_steps]), feed="resized"))
    normalize = [step for step in recipe.steps if isinstance(step, Normalize)]
    if normalize or recipe.output.dtype != "float32":
        alone = replace(_part(recipe, [*keep_size, *normalize]), output=recipe.output)
        found.append(Stage(name="normalise", recipe=alone, feed="resized"))
    if same_pixels:
        found.append(Stage(name="chain, same pixels", recipe=replace(recipe, exif="ignore"), feed="decoded"))
    found.append(Stage(name="whole chain", recipe=recipe, feed="file"))
    return tuple(found)


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
    return replace(recipe, steps=tuple(steps), exif="ignore", output=Output(), notes=())


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
    """float64 (n,): the largest brightness, contrast or saturation factor of each row; 1 where there is none."""
    found = np.ones(len(plan))
    for step in plan.colour:
        if isinstance(step, JitterRows) and any(step.used[:3]):
            found = np.maximum(found, step.factors[:, :3][:, np.flatnonzero(step.used[:3])].max(axis=1))
    return found


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
