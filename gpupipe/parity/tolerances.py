"""How far two backends may be apart, stage by stage, and why: the only place where these numbers stand.

All in LSB: 1/255 of the range of a pixel before normalisation (after it: 1/255 divided by that channel's std).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from gpupipe.recipe import Recipe
from gpupipe.records import Operation, OperationRows
from gpupipe.steps import ColorJitter, RandomResizedCrop, Resize

# Two correct float32 computations of the same stage differ by a few units in the last place. The largest normalised
# value is about 2.7, its last place 2.4e-7; times std * 255 that is 1.4e-5 LSB a rounding. Where "exact" is promised,
# this much is still allowed, because it cannot move an 8-bit pixel.
ROUNDING_LSB = 2e-4

# Above this factor a jitter step multiplies the errors before it by more than they were measured with.
STRONG_FACTOR = 1.8

# What stock torchvision works on, as people run it today.
Kind = Literal["PIL", "uint8"]

# One unit in the last place, relative to the value, of what the finished batch is stored as; two results that lie on
# different sides of a rounding boundary differ by that much.
DTYPE_RELATIVE = {"float32": 0.0, "float16": 1e-3, "bfloat16": 8e-3}

# Backends that reproduce torchvision's uint8 operators bit for bit.
BIT_EXACT_UINT8 = frozenset({"torchvision", "numba"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """A bound on the largest difference, or on all but a share of them.

    Attributes:
        max_lsb: The bound; None: the row is reported and not judged.
        share: The share of values that may be beyond the bound, by however much.
        relative: Allowed on top, as a share of the (normalised) value: the rounding of the batch's dtype.
        reason: Where the bound comes from, for the reader of the report.
    """

    max_lsb: float | None
    share: float = 0.0
    relative: float = 0.0
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """Which two backends are compared.

    Attributes:
        backend, reference: Their names.
        gpu: Whether either of them computes on a GPU.
        gpu_decode: Whether either of them decodes there.
    """

    backend: str
    reference: str
    gpu: bool = False
    gpu_decode: bool = False

    @property
    def bit_exact_uint8(self) -> bool:
        return {self.backend, self.reference} <= BIT_EXACT_UINT8


# stage -> (on CPUs, with a GPU, reason)
_FLOAT32: dict[str, tuple[float, float, str]] = {
    "crop": (0, 0, "crops and flips move pixels and compute nothing"),
    "resize": (0.02, 0.05, "antialiased bilinear in float32, nothing rounded in between"),
    "resize bicubic": (0.3, 0.3, "bicubic weights are worked out in another precision, then clamped to [0, 1]"),
    "jitter": (0.05, 0.1, "four clamped float32 steps, factors up to 1.8"),
    "jitter strong": (0.1, 0.2, "a factor above 1.8 multiplies the rounding before it"),
    "operation": (0.02, 0.05, "sums and coordinates in another order, and no more than doubled"),
    "operation strong": (0.05, 0.1, "as the other operations, and a factor above 1.8 multiplies it"),
    "chain": (0.05, 0.1, "same plan, nothing rounded between decode and output"),
    "chain bicubic": (0.3, 0.3, "as the bicubic resize, whose bound is the larger one"),
    "chain strong": (0.1, 0.2, "a jitter factor above 1.8 multiplies the difference of the resize"),
}
# Against stock torchvision on 8 bits, without jitter: two roundings of half an LSB, and weights in fixed point (1.0056
# was the most that the reference itself was off in 1380 crops of 92 photos).
_TODAY_PLAIN = 1.02
# With ColorJitter(0.4, 0.4, 0.4, 0.1): bound, and the most that the reference itself was off in 3680 draws. The tail
# grows slowly with the number of draws, hence the margin.
_TODAY_JITTER: dict[Kind, tuple[float, float]] = {"PIL": (30.0, 22.6), "uint8": (12.0, 9.5)}

_UINT8_JITTER_REASON = "uint8 steps truncate, so one rounding apart grows (up to 8 LSB seen)"
# Where an operation has a threshold, or takes the nearest pixel, two results that are one rounding apart can end
# anywhere. 0.006 % of the values of the worst image did (TrivialAugmentWide, RandAugment and AutoAugment, 31 photos, 3
# draws each, the whole chain in float32 on DALI's CPU operators).
_DECIDED_OTHERWISE = 1e-3
# The same in the whole chain: on CPUs; with a GPU, whose resize may be 2.5 times as far off; and behind a bicubic
# resize, of which 0.9 % of the values were beyond (RandomEqualize, 23 photos, 3 draws each, DALI's CPU operators).
_DECIDED_IN_CHAIN = (1e-3, 5e-3, 2e-2)
_DECIDED_REASON = "where a threshold or the nearest pixel decides, a rounding error can decide otherwise"
_STRETCHED = frozenset({Operation.POSTERIZE, Operation.SOLARIZE, Operation.AUTOCONTRAST, Operation.EQUALIZE})
"""Operations that can make any difference before them larger without a limit."""

_NORMALIZE_REASON = "(x - mean) / std in float32"


def decode(pair: Pair, kind: str) -> Tolerance:
    """For whole 8-bit pixels of one kind of file ("JPEG CMYK", "PNG", ...; see `stages.kind`)."""
    if not kind.startswith("JPEG"):
        return Tolerance(max_lsb=0, reason="the same code, Pillow, on every backend")
    if pair.gpu_decode:
        return Tolerance(max_lsb=None, reason="a GPU's JPEG decoder differs slightly; decode='cpu' is exact")
    if kind == "JPEG CMYK":
        return Tolerance(max_lsb=1, reason="the conversion from CMYK is rounded")
    return Tolerance(max_lsb=0, reason="libjpeg-turbo, accurate integer IDCT, fancy upsampling on all of them")


_UINT8_BICUBIC = Tolerance(
    max_lsb=1,
    share=0.002,  # 0.06 % seen on 92 photos, up to 18 levels
    reason="as bilinear; where bicubic overshoots, torchvision cuts that off after each of two passes, DALI once",
)


def resize(pair: Pair, recipe: Recipe) -> Tolerance:
    """For the recipe's geometry on equal decoded pixels."""
    if not any(isinstance(step, Resize | RandomResizedCrop) for step in recipe.steps):
        return _float32("crop", pair)
    if recipe.precision == "uint8":
        if recipe.interpolation == "bicubic" and not pair.bit_exact_uint8:
            return _UINT8_BICUBIC
        return _uint8(pair, "DALI's float result is rounded once, torchvision's uint8 resize rounds twice")
    return _float32("resize bicubic" if recipe.interpolation == "bicubic" else "resize", pair)


def jitter(pair: Pair, recipe: Recipe, *, strong: bool) -> Tolerance:
    """For the colour steps on equal resized pixels."""
    if recipe.precision == "uint8":
        if pair.bit_exact_uint8:
            return _uint8(pair, "")
        return Tolerance(max_lsb=None, reason=_UINT8_JITTER_REASON)
    return _float32("jitter strong" if strong else "jitter", pair)


def decides(step: OperationRows, row: int) -> bool:
    """Whether what an operation does to a sample can turn a rounding error into another picture, pixel by pixel."""
    operation = step.operation[row]
    nearest = step.interpolation == "nearest" and operation in (Operation.ROTATE, Operation.AFFINE)
    return bool(nearest or operation in _STRETCHED)


def operation(pair: Pair, recipe: Recipe, *, strong: bool, decided: bool) -> Tolerance:
    """For one step among the operations, on equal pixels.

    Args:
        pair: Which backends.
        recipe: The recipe.
        strong: Whether a factor is above `STRONG_FACTOR`.
        decided: Whether `decides` holds for an operation.
    """
    if recipe.precision == "uint8":
        if pair.bit_exact_uint8:
            return _uint8(pair, "")
        reason = (
            "torchvision's arithmetic on uint8, but for sums in another order, which can end on either side of a half"
        )
        return Tolerance(max_lsb=1 if pair.gpu else 0, share=_DECIDED_OTHERWISE, reason=reason)
    found = _float32("operation strong" if strong else "operation", pair)
    return replace(found, share=_DECIDED_OTHERWISE, reason=_DECIDED_REASON) if decided else found


def erase(recipe: Recipe) -> Tolerance:
    """For RandomErasing and the cast to the batch's dtype on equal pixels."""
    reason = f"numbers of the plan, or made from its key; else {_dtype_reason(recipe)}"
    return Tolerance(max_lsb=0, relative=DTYPE_RELATIVE[recipe.output.dtype], reason=reason)


def normalize(recipe: Recipe) -> Tolerance:
    """For (x - mean) / std and the cast to the batch's dtype on equal pixels."""
    return Tolerance(max_lsb=0, relative=DTYPE_RELATIVE[recipe.output.dtype], reason=_dtype_reason(recipe))


def chain(pair: Pair, recipe: Recipe, *, strong: bool, same_pixels: bool, decided: bool = False) -> Tolerance:
    """For the full recipe; from the file, or (`same_pixels`) from equal decoded pixels; see `operation`."""
    relative = DTYPE_RELATIVE[recipe.output.dtype]
    if pair.gpu_decode and not same_pixels:
        return Tolerance(max_lsb=None, reason="the decoders differ; judged on the same decoded pixels instead")
    if recipe.precision == "uint8":
        if (recipe.colour_steps or recipe.operation_steps) and not pair.bit_exact_uint8:
            return Tolerance(max_lsb=None, reason=_UINT8_JITTER_REASON)
        found = _uint8(pair, "as the resize: rounded once instead of twice")
        if recipe.interpolation == "bicubic" and not pair.bit_exact_uint8:
            found = _UINT8_BICUBIC
    elif recipe.interpolation == "bicubic":
        found = _float32("chain bicubic", pair)
    else:
        found = _float32("chain strong" if strong or decided else "chain", pair)
    if decided and recipe.precision == "float32":
        on_cpu, with_gpu, bicubic = _DECIDED_IN_CHAIN
        share = bicubic if recipe.interpolation == "bicubic" else with_gpu if pair.gpu else on_cpu
        found = replace(found, share=share, reason=_DECIDED_REASON)
    return replace(found, relative=relative)


def today(pair: Pair, recipe: Recipe, kind: Kind, *, strong: bool) -> Tolerance:
    """For the full recipe against the pipeline that people run today, on PIL images or uint8 tensors.

    Args:
        pair: Of the backend under test; the other side is stock torchvision.
        recipe: The recipe.
        kind: What stock torchvision works on.
        strong: Whether a jitter factor is above `STRONG_FACTOR`.
    """
    relative = DTYPE_RELATIVE[recipe.output.dtype]
    same_rounding = recipe.precision == kind == "uint8"
    if pair.gpu_decode:
        return Tolerance(max_lsb=None, reason="the decoders differ")
    if same_rounding and pair.backend in BIT_EXACT_UINT8:
        return Tolerance(max_lsb=0, relative=relative, reason="bit-identical to torchvision v2 on uint8 tensors")
    if recipe.interpolation == "bicubic" and not same_rounding:
        return Tolerance(max_lsb=None, reason="bicubic overshoots, and 8 bits cannot hold that (up to 18 LSB seen)")
    if recipe.interpolation == "bicubic" and not recipe.colour_steps and not recipe.operation_steps:
        return replace(_UINT8_BICUBIC, relative=relative)
    if recipe.colour_steps and recipe.precision == "uint8":
        return Tolerance(max_lsb=None, reason=_UINT8_JITTER_REASON)
    if recipe.operation_steps:
        return Tolerance(max_lsb=None, reason=f"operations on {kind} round, and decide, otherwise")
    if any(isinstance(step, ColorJitter) for step in recipe.steps):
        if strong:
            return Tolerance(max_lsb=None, reason=f"jitter on {kind} truncates after every step, and this much of it")
        bound, seen = _TODAY_JITTER[kind]
        return Tolerance(
            max_lsb=bound, relative=relative, reason=f"jitter on {kind} truncates after every step ({seen} LSB seen)"
        )
    if recipe.colour_steps:
        reason = f"{kind} rounds to 8 bits twice, and truncates where it turns grey"
        return Tolerance(max_lsb=_TODAY_PLAIN + 1, relative=relative, reason=reason)
    return Tolerance(max_lsb=_TODAY_PLAIN, relative=relative, reason=f"{kind} rounds to 8 bits twice, half an LSB each")


def _float32(row: str, pair: Pair) -> Tolerance:
    cpu, gpu, reason = _FLOAT32[row]
    return Tolerance(max_lsb=gpu if pair.gpu else cpu, reason=reason)


def _uint8(pair: Pair, reason: str) -> Tolerance:
    if pair.bit_exact_uint8:
        return Tolerance(max_lsb=0, reason="both are bit-identical to torchvision v2 on uint8 tensors")
    return Tolerance(max_lsb=1, reason=reason)


def _dtype_reason(recipe: Recipe) -> str:
    dtype = recipe.output.dtype
    return _NORMALIZE_REASON if dtype == "float32" else f"{_NORMALIZE_REASON}, then one rounding to {dtype}"
