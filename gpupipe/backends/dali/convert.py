"""Recipe and plan in the units of the graph: pixels from 0 to 255, hue in sixths of a turn.

The colour steps of a recipe become a fixed row of slots, the same for every sample: DALI's graphs are fixed. A sample
uses those slots that its own order of operations needs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from gpupipe.recipe import Recipe
from gpupipe.records import JitterRows, Plan
from gpupipe.steps import ColorJitter
from gpupipe.steps.choosing import leaves

F32 = npt.NDArray[np.float32]
F64 = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

WHITE = 255.0
SIXTHS_IN_A_TURN = 6.0

# The numbering of `JitterRows.order`.
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)

Slot = Literal["blend", "hue"]
"""A place for one operation on colours.

blend: clamp(image * x + mean * mean(grey(x)) + grey * grey(x)), which is brightness, contrast, saturation and
greyscale; hue: a turn of the hue.
"""


def slots(recipe: Recipe) -> tuple[Slot, ...]:
    """The slots of a recipe.

    A ColorJitter with a hue has its other operations twice, in front of the hue and behind it: three blends on either
    side hold all 24 orders, with one turn of the hue, which costs as much as all the rest.
    """
    found: list[Slot] = []
    for step in leaves(recipe.colour_steps):
        if isinstance(step, ColorJitter):
            blends, hue = _jitter_slots(tuple(bounds is not None for bounds in step.ranges))
            found += [*blends, *hue, *(blends if hue else ())]
        else:
            found.append("blend")
    return tuple(found)


def _jitter_slots(used: tuple[bool, ...]) -> tuple[list[Slot], list[Slot]]:
    return ["blend"] * sum(used[:_HUE]), ["hue"] * used[_HUE]


@dataclass(frozen=True, slots=True)
class BlendRows:
    """Parameters of one blend; see `Slot`.

    Attributes:
        used: bool (n,).
        image, mean, grey: float32 (n,): the weights.
    """

    used: Bools
    image: F32
    mean: F32
    grey: F32

    @property
    def mixes(self) -> Bools:
        """bool (n,): whether anything of the grey image is added."""
        return np.array((self.mean != 0) | (self.grey != 0))


@dataclass(frozen=True, slots=True)
class HueRows:
    """Parameters of one turn of the hue.

    Attributes:
        used: bool (n,).
        shift: float32 (n,), in sixths of a turn.
    """

    used: Bools
    shift: F32


SlotRows = BlendRows | HueRows


def slot_rows(plan: Plan) -> tuple[SlotRows, ...]:
    """The parameters of a plan, one entry for each of `slots`."""
    found: list[SlotRows] = []
    for step in plan.colour:
        if isinstance(step, JitterRows):
            found += _jitter_rows(step)
        else:
            grey = step.apply.astype(np.float32)
            found.append(BlendRows(used=step.apply, image=1 - grey, mean=np.zeros_like(grey), grey=grey))
    return tuple(found)


def _jitter_rows(step: JitterRows) -> list[SlotRows]:
    """Deal each sample's operations to slots in its order.

    Those in front of the hue fill the first blends from the left, those behind it the last blends from the left.
    """
    n = len(step.order)
    blends, hue = _jitter_slots(step.used)
    total = len(blends) * (2 if hue else 1)
    used = np.zeros((total, n), np.bool_)
    image, mean, grey = np.ones((total, n)), np.zeros((total, n)), np.zeros((total, n))
    behind_hue = np.zeros(n, np.bool_)
    filled = np.zeros(n, np.intp)
    rows = np.arange(n)
    for turn in range(step.order.shape[1]):
        operation = step.order[:, turn].astype(np.intp)
        is_hue = operation == _HUE
        behind_hue |= is_hue & step.used[_HUE]
        filled[is_hue] = 0 if step.used[_HUE] else filled[is_hue]
        taken = np.asarray(step.used)[operation] & ~is_hue
        row, operation = rows[taken], operation[taken]
        slot = filled[row] + np.where(behind_hue[row], len(blends), 0)
        factor = step.factors[row, operation]
        used[slot, row] = True
        image[slot, row] = factor
        mean[slot, row] = np.where(operation == _CONTRAST, 1 - factor, 0)
        grey[slot, row] = np.where(operation == _SATURATION, 1 - factor, 0)
        filled[row] += 1
    # A factor of 1 changes nothing, in torchvision either.
    used &= (image != 1) & step.apply
    found: list[SlotRows] = [BlendRows(used[i], _f32(image[i]), _f32(mean[i]), _f32(grey[i])) for i in range(total)]
    if hue:
        found.insert(len(blends), HueRows(step.apply, _f32(step.factors[:, _HUE] * SIXTHS_IN_A_TURN)))
    return found


def _f32(values: F64) -> F32:
    return values.astype(np.float32)


def normalisation(recipe: Recipe) -> tuple[list[float], list[float]]:
    """Mean and standard deviation for pixels from 0 to 255."""
    step = recipe.normalize
    return [mean * WHITE for mean in step.mean], [std * WHITE for std in step.std]
