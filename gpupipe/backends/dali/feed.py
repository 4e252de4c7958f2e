"""From records, headers and a plan to the inputs of the graph, without copying what need not be copied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from gpupipe import decode
from gpupipe.backends.dali.convert import BlendRows, slot_rows
from gpupipe.backends.dali.geometry import as_stored, locate
from gpupipe.backends.plain_scan import is_one_plain_scan
from gpupipe.headers import Header, upright_size
from gpupipe.recipe import Recipe
from gpupipe.records import Encoded, Plan, Record

U8 = npt.NDArray[np.uint8]
Arrays = dict[str, "npt.NDArray[np.generic] | list[U8]"]

# What stands in the unused one of the two inputs for pixels, and for images that cannot be decoded.
_NO_FILE = np.zeros(1, np.uint8)
_BLACK_PIXEL = np.zeros((1, 1, 3), np.uint8)


class Feed:
    """The inputs of one batch.

    Args:
        recipe: Of the graph.
        records, headers, plan: As in `Backend.submit`.
        in_part: Whether DALI decodes no more of a file than it needs. Then it gets only those in which it cannot
            overlook damage.

    Attributes:
        records, headers, plan: As given.
    """

    def __init__(
        self, recipe: Recipe, records: Sequence[Record], headers: Sequence[Header], plan: Plan, *, in_part: bool
    ) -> None:
        self.records, self.headers, self.plan = records, headers, plan
        self._recipe, self._in_part = recipe, in_part
        self._native = np.array(
            [
                header.native and not (in_part and not is_one_plain_scan(cast("Encoded", record.data)))
                for record, header in zip(records, headers, strict=True)
            ],
            np.bool_,
        )
        self._upright = self._stored = locate(plan, recipe.interpolation)
        self._cut = self._upright.region
        self._transposed = np.zeros(len(plan), np.bool_)
        if recipe.exif == "apply":
            sizes = np.array([upright_size(header, "apply") for header in headers], np.int32)
            orientation = np.array([header.orientation for header in headers], np.int32)
            self._stored, self._cut, self._transposed = as_stored(self._upright, sizes, orientation)

    @property
    def native_rows(self) -> list[int]:
        """The rows whose files DALI decodes, if nothing speaks against it."""
        return [int(row) for row in np.flatnonzero(self._native)]

    @property
    def other_rows(self) -> list[int]:
        """The rows whose files are decoded here in any case."""
        return [int(row) for row in np.flatnonzero(~self._native)]

    def region(self, row: int) -> U8:
        """Decode one record here and cut out what the graph needs of it.

        Returns:
            uint8 (height, width, 3), in C order and independent of the whole image.

        Raises:
            DecodeError: The record cannot be decoded.
        """
        header = self.headers[row]
        pixels = decode.rgb(self.records[row].data, header)
        if self._recipe.exif == "apply":
            pixels = decode.upright(pixels, header.orientation)
        top, left, height, width = self._upright.region[row].tolist()
        return pixels[top : top + height, left : left + width].copy(order="C")

    def arrays(self, raw: Mapping[int, U8], bad: Mapping[int, object]) -> Arrays:
        """The inputs by name.

        Args:
            raw: Row -> what `region` returned, for all rows that are not to be decoded by DALI.
            bad: Rows that cannot be decoded; something black takes their place.
        """
        here = np.zeros(len(self.plan), np.bool_)
        here[[*raw, *bad]] = True
        found: Arrays = {
            "encoded": [_NO_FILE if skip else _view(record) for record, skip in zip(self.records, here, strict=True)],
            "raw": [raw.get(row, _BLACK_PIXEL) for row in range(len(self.plan))],
            "native": ~here,
            "region_corner": self._cut[:, :2].copy(),
            "region_extent": self._cut[:, 2:].copy(),
        }
        if self._recipe.exif == "apply":
            found["transposed"] = self._transposed & ~here
        return found | self._geometry_arrays(here, sorted(bad)) | _colour_arrays(self.plan)

    def _geometry_arrays(self, here: npt.NDArray[np.bool_], bad: list[int]) -> Arrays:
        upright, stored = self._upright, self._stored
        before = np.where(here[:, None], upright.before, stored.before)
        after = np.where(here[:, None], upright.after, stored.after)
        start = np.where(here[:, None], upright.start, stored.start)
        end = np.where(here[:, None], upright.end, stored.end)
        margin: npt.NDArray[np.bool_] = np.any(before | after, axis=1)
        margin[bad], start[bad], end[bad] = False, 0, 1  # the whole of the black pixel
        weighted = (upright.rows != 1).any(axis=1) | (upright.columns != 1).any(axis=1)
        return {
            "margin": margin,
            "margin_corner": -before.astype(np.int32),
            "margin_extent": (stored.region[:, 2:] + before + after).astype(np.int32),
            "roi_start": start,
            "roi_end": end,
            "weighted": weighted,
            "rows": upright.rows[:, None, :, None],
            "columns": upright.columns[:, None, None, :],
        }

    def alone(self, row: int) -> Feed:
        """The same for one row."""
        return Feed(
            self._recipe,
            [self.records[row]],
            [self.headers[row]],
            self.plan.take(slice(row, row + 1)),
            in_part=self._in_part,
        )


def _view(record: Record) -> U8:
    return np.frombuffer(record.data, np.uint8)


def _colour_arrays(plan: Plan) -> Arrays:
    found: Arrays = {}
    for number, rows in enumerate(slot_rows(plan)):
        found[f"used_{number}"] = rows.used
        if isinstance(rows, BlendRows):
            found[f"mixes_{number}"] = rows.mixes
            found[f"image_{number}"], found[f"mean_{number}"] = rows.image, rows.mean
            found[f"grey_{number}"] = rows.grey
        else:
            found[f"shift_{number}"] = rows.shift
    return found
