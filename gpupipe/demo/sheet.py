"""Contact sheets: files, and under each what a model would see of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from gpupipe.errors import GpupipeError
from gpupipe.pillow import use_image
from gpupipe.records import Record
from gpupipe.steps import Normalize

if TYPE_CHECKING:
    import torch

COLUMNS = 8
_CELL_PX, _GAP_PX, _GUTTER_PX, _HEAD_PX, _CAPTION_PX = 160, 8, 84, 56, 26
_PAPER, _INK, _SOFT, _EMPTY = "#f6f7f9", "#1c2330", "#5c6678", "#e4e7ec"


def pictures(images: torch.Tensor, normalize: Normalize) -> list[Image.Image]:
    """A batch as pictures, un-normalised.

    Args:
        images: (n, 3, h, w), normalised, of any float type, anywhere.
        normalize: The recipe's.
    """
    pixels = images.detach().float().cpu().permute(0, 2, 3, 1).numpy()
    pixels = (pixels * np.array(normalize.std, np.float32) + np.array(normalize.mean, np.float32)) * 255
    return [Image.fromarray(each) for each in np.clip(np.rint(pixels), 0, 255).astype(np.uint8)]


def original(record: Record) -> Image.Image:
    """The file itself."""
    return use_image(record.data, lambda image: image.convert("RGB"))


def write(path: Path, title: str, captions: Sequence[str], rows: Sequence[tuple[str, Sequence[Image.Image]]]) -> Path:
    """Write a sheet as PNG.

    Args:
        path: The file.
        title: Stands on top.
        captions: One for each picture of a row.
        rows: (name, pictures): shown under each other, in blocks of `COLUMNS`.

    Raises:
        GpupipeError: The file cannot be written.
    """
    blocks = -(-len(captions) // COLUMNS)
    row_px, block_px = _CELL_PX + _GAP_PX, _CAPTION_PX + len(rows) * (_CELL_PX + _GAP_PX) + 2 * _GAP_PX
    width = _GUTTER_PX + min(len(captions), COLUMNS) * (_CELL_PX + _GAP_PX) + _GAP_PX
    sheet = Image.new("RGB", (max(width, 480), _HEAD_PX + blocks * block_px), _PAPER)
    draw = ImageDraw.Draw(sheet)
    bold, plain = ImageFont.load_default(size=20), ImageFont.load_default(size=14)
    draw.text((_GAP_PX * 2, 18), title, font=bold, fill=_INK)
    for position, caption in enumerate(captions):
        block, column = divmod(position, COLUMNS)
        left, top = _GUTTER_PX + column * (_CELL_PX + _GAP_PX), _HEAD_PX + block * block_px
        draw.text((left, top + 4), _fitting(draw, caption, plain), font=plain, fill=_INK)
        for number, (name, shown) in enumerate(rows):
            y = top + _CAPTION_PX + number * row_px
            if column == 0:
                draw.text((_GAP_PX * 2, y + _CELL_PX // 2 - 8), name, font=plain, fill=_SOFT)
            cell = shown[position].copy()
            cell.thumbnail((_CELL_PX, _CELL_PX), Image.Resampling.LANCZOS)
            draw.rectangle((left, y, left + _CELL_PX - 1, y + _CELL_PX - 1), fill=_EMPTY)
            sheet.paste(cell, (left + (_CELL_PX - cell.width) // 2, y + (_CELL_PX - cell.height) // 2))
    try:
        sheet.save(path, "PNG")
    except OSError as error:
        raise GpupipeError(f"cannot write the contact sheet {path}: {error.strerror or error}") from error
    return path


def _fitting(draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    if draw.textlength(text, font=font) <= _CELL_PX:
        return text
    while text and draw.textlength(text + "…", font=font) > _CELL_PX:
        text = text[:-1]
    return text + "…"
