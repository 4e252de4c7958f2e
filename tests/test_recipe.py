"""Recipes: what they refuse, and that they stay the same through JSON, pickle and time."""

import copy
import dataclasses
import json
import math
import pickle
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from torchvision.transforms import v2

from gpupipe import recipe as module
from gpupipe.errors import ConfigError
from gpupipe.recipe import Output, Recipe
from gpupipe.steps import (
    STEP_TYPES,
    AutoAugment,
    CenterCrop,
    ColorJitter,
    CutMix,
    GaussianBlur,
    Grayscale,
    Mix,
    MixUp,
    Normalize,
    RandAugment,
    RandomAdjustSharpness,
    RandomAffine,
    RandomApply,
    RandomAutocontrast,
    RandomChoice,
    RandomCrop,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomInvert,
    RandomPosterize,
    RandomResizedCrop,
    RandomRotation,
    RandomSolarize,
    RandomVerticalFlip,
    Resize,
    Step,
    TrivialAugmentWide,
)
from gpupipe.steps.base import MAX_SIDE_PX
from gpupipe.steps.colour import IMAGENET_MEAN, IMAGENET_STD
from tests.recipes import recipes

NAN, INF, HUGE = math.nan, math.inf, 10**400

FLIP = RandomHorizontalFlip()
# (what is made, field that the error names, what the message says is allowed)
REFUSED = [
    *[(lambda p=p: RandomApply((FLIP,), p), "p", "probability") for p in (-0.1, 1.1, None, "1", NAN)],
    *[
        (lambda kind=kind, steps=steps: kind(steps), "steps", "may stand behind the crop")
        for kind in (RandomApply, RandomChoice)
        for steps in ((), None, FLIP, (Normalize(),), (CenterCrop(8),), (RandomErasing(),), (RandomCrop(8),), "ab")
    ],
    *[
        (lambda p=p: RandomChoice((FLIP, FLIP), p), "p", "weights")
        for p in ((1,), (1, 2, 3), (-1, 2), (0, 0), (NAN, 1), "ab", 0.5)
    ],
    *[
        (lambda kernel=kernel: GaussianBlur(kernel), "kernel_size", "odd number")
        for kernel in (0, 2, -1, (3, 4), (3,), (3, 3, 3), None, 3.0, True)
    ],
    *[(lambda sigma=sigma: GaussianBlur(3, sigma), "sigma", "") for sigma in (0, -1, (0, 1), (2, 1), None, NAN, INF)],
    (lambda: Recipe(steps=(CenterCrop((20, 4)), GaussianBlur((3, 9)))), "kernel_size", "twice as large as the image"),
    *[(lambda t=t: RandomSolarize(t), "threshold", "from 0 to 1") for t in (-0.1, 1.1, 128, None, NAN)],
    *[(lambda bits=bits: RandomPosterize(bits), "bits", "integer from 0 to 8") for bits in (-1, 9, 4.0, None, True)],
    *[(lambda f=f: RandomAdjustSharpness(f), "sharpness_factor", "not negative") for f in (-1, None, INF)],
    *[
        (lambda kind=kind, degrees=degrees: kind(degrees), "degrees", "")
        for kind in (RandomRotation, RandomAffine)
        for degrees in (-1, (2, 1), (1,), None, NAN, 1e7)
    ],
    *[
        (lambda kind=kind, mode=mode: kind(interpolation=mode), "interpolation", "'nearest', 'bilinear'")
        for kind in (partial(RandomRotation, 1), partial(RandomAffine, 1), TrivialAugmentWide, RandAugment, AutoAugment)
        for mode in ("bicubic", None, 2)
    ],
    *[
        (lambda kind=kind, fill=fill: kind(fill=fill), "fill", "from 0 (black) to 1 (white)")
        for kind in (partial(RandomRotation, 1), partial(RandomAffine, 1), TrivialAugmentWide, RandAugment, AutoAugment)
        for fill in (128, -0.1, (0, 0), (0, 0, 2), "black", NAN)
    ],
    (lambda: RandomRotation(1, center=(1,)), "center", "two numbers"),
    *[(lambda t=t: RandomAffine(1, translate=t), "translate", "two") for t in ((0.1,), (0, 1.1), (-0.1, 0), 0.1)],
    *[(lambda s=s: RandomAffine(1, scale=s), "scale", "") for s in ((0, 1), (2, 1), (1,), 1)],
    *[(lambda s=s: RandomAffine(1, shear=s), "shear", "") for s in (-1, (2, 1), (1, 2, 3), (1, 2, 4, 3), "ab")],
    *[(lambda n=n: TrivialAugmentWide(n), "num_magnitude_bins", "integer from 2") for n in (1, 0, 3.0, None)],
    *[(lambda n=n: RandAugment(n), "num_ops", "integer from 0") for n in (-1, 1.0, None)],
    *[(lambda m=m: RandAugment(2, m), "magnitude", "integer from 0 to 30") for m in (-1, 31, 9.0)],
    *[
        (lambda policy=policy: AutoAugment(policy), "policy", "'imagenet', 'cifar10', 'svhn'")
        for policy in ("ra", None)
    ],
    *[(lambda mode=mode: RandomCrop(8, padding_mode=mode), "padding_mode", "'reflect'") for mode in ("wrap", None)],
    *[
        (lambda width=width: RandomCrop(8, padding=width), "padding", "widths in pixels")
        for width in (-1, 1.0, (1, 2, 3), (1, -1), "ab", True)
    ],
    (lambda: RandomCrop(8, padding=4, padding_mode="reflect"), "padding", "less than half of size"),
    (lambda: RandomCrop(8, pad_if_needed=True, padding_mode="edge"), "padding_mode", '"constant" with pad_if_needed'),
    *[(lambda fill=fill: RandomCrop(8, fill=fill), "fill", "from 0 (black)") for fill in (128, None, (1, 2))],
    *[(lambda scale=scale: RandomErasing(scale=scale), "scale", "") for scale in ((0.5, 0.1), (0, 1.1), 0.1)],
    *[(lambda ratio=ratio: RandomErasing(ratio=ratio), "ratio", "") for ratio in ((0, 1), (2, 1), 1)],
    *[
        (lambda value=value: RandomErasing(value=value), "value", '"pixels" or "channels"')
        for value in ("random", None, (1, 2), NAN)
    ],
    *[
        (lambda size=size, kind=kind: kind(size), "size", f"from 1 to {MAX_SIDE_PX}")
        for kind in (RandomResizedCrop, Resize, CenterCrop)
        for size in (0, -1, 1.5, True, None, "224", (224,), (1, 2, 3), (0, 5), (5, 2.0), MAX_SIDE_PX + 1, HUGE, {1, 2})
    ],
    *[
        (lambda kind=kind, mode=mode: kind(224, interpolation=mode), "interpolation", "'bilinear', 'bicubic'")
        for kind in (RandomResizedCrop, Resize)
        for mode in ("nearest", "BILINEAR", None, 2, "lanczos", ["bilinear"])
    ],
    *[
        (lambda scale=scale: RandomResizedCrop(8, scale=scale), "scale", "low <= high")
        for scale in ((0.5, 0.1), (-0.1, 1), (0.1,), 0.5, None, (NAN, 1), (0.1, INF), (0.1, HUGE), "ab", (True, 1))
    ],
    (lambda: RandomResizedCrop(8, scale=(0, 0)), "scale", "upper end is above 0"),
    *[
        (lambda ratio=ratio: RandomResizedCrop(8, ratio=ratio), "ratio", "low <= high")
        for ratio in ((2, 1), (-1, 1), (1,), 1.0, None, (1, NAN), ("a", "b"))
    ],
    (lambda: RandomResizedCrop(8, ratio=(0, 1)), "ratio", "positive"),
    *[
        (lambda most=most: Resize(256, max_size=most), "max_size", "larger than size=256")
        for most in (256, 100, 0, -5, 300.0, True, "300", MAX_SIDE_PX + 1)
    ],
    (lambda: Resize((3, 4), max_size=10), "max_size", "None when size is (height, width)"),
    *[
        (lambda kind=kind, p=p: kind(p), "p", "a probability from 0 to 1")
        for kind in (RandomHorizontalFlip, RandomVerticalFlip, RandomGrayscale)
        for p in (-0.1, 1.1, None, "0.5", NAN, True, (0.5,), HUGE)
    ],
    *[
        (lambda name=name, value=value: ColorJitter(**{name: value}), name, "from 0 to 999999")
        for name in ("brightness", "contrast", "saturation")
        for value in (-0.1, 1e6, 1e300)
    ],
    *[
        (lambda name=name, value=value: ColorJitter(**{name: value}), name, "(low, high) with 0 <= low <= high")
        for name in ("brightness", "contrast", "saturation")
        for value in ((1, 0.5), (-1, 1), "0.4", (1,), (1, 2, 3), True, INF, NAN, HUGE, (0, INF), {"a": 1})
    ],
    *[(lambda value=value: ColorJitter(hue=value), "hue", "from 0 to 0.5 (turns)") for value in (-0.1, 0.6, 180)],
    *[
        (lambda value=value: ColorJitter(hue=value), "hue", "with -0.5 <= low <= high <= 0.5")
        for value in ((-0.6, 0), (0, 0.6), (0.2, 0.1), "0.1", NAN)
    ],
    *[
        (lambda name=name, value=value: Normalize(**{name: value}), name, "one number or three")
        for name in ("mean", "std")
        for value in ((1, 2), (), (1, 2, 3, 4), "abc", None, NAN, (0.5, INF, 0.5), (0.1, "a", 0.2), HUGE, True)
    ],
    *[(lambda std=std: Normalize(0.5, std), "std", "positive") for std in (0, -0.1, (0.1, 0, 0.1))],
    *[
        (lambda dtype=dtype: Output(dtype=dtype), "output.dtype", "'float32', 'float16', 'bfloat16'")
        for dtype in ("float64", "uint8", None, np.float32)
    ],
    *[
        (lambda layout=layout: Output(memory_format=layout), "output.memory_format", "'contiguous', 'channels_last'")
        for layout in ("NHWC", None, 1)
    ],
    *[
        (lambda value=value: Recipe.train(precision=value), "precision", "'float32', 'uint8'")
        for value in ("float16", None, "exact")
    ],
    *[(lambda value=value: Recipe.eval(exif=value), "exif", "'ignore', 'apply'") for value in (True, None, "rotate")],
    *[(lambda value=value: Recipe.train(output=value), "output", "an Output") for value in ("float16", 0, Output, {})],
    *[(lambda value=value: Recipe.train(hflip=value), "hflip", "from 0 to 1") for value in (-1, None, "yes")],
    *[
        (lambda value=value: Recipe.train(jitter=value), "jitter", "(brightness, contrast, saturation, hue)")
        for value in (0.4, "0.4", (), (1, 2, 3, 4, 5), {"hue": 1})
    ],
    *[
        (lambda value=value: Recipe(steps=value), "steps", "a sequence of gpupipe steps (RandomResizedCrop, ")
        for value in (None, "abc", 3, [CenterCrop], [v2.CenterCrop(3)], [lambda: 0], {CenterCrop(3)}, [Step()])
    ],
    *[
        (lambda value=value: Recipe(steps=(CenterCrop(8),), notes=value), "notes", "a sequence of strings")
        for value in ("a note", None, 3, [1], {"a"})
    ],
]


@pytest.mark.parametrize(("make", "field", "allowed"), REFUSED)
def test_value_that_cannot_work_is_refused_by_field_value_and_what_is_allowed(make, field, allowed):
    with pytest.raises(ConfigError) as caught:
        make()
    error = caught.value
    assert error.field == field
    assert allowed in error.allowed
    assert error.message == f"{field}={error.value!r} is not valid: it must be {error.allowed}"


# Steps, the position that is wrong, what it must be.
CROP, RESIZE, CENTER = RandomResizedCrop(8), Resize(9), CenterCrop(8)
FLIP, JITTER, GREY, NORMAL = RandomHorizontalFlip(), ColorJitter(0.4), Grayscale(), Normalize()
WRONG_ORDER = [
    ((CROP, CROP), 1, "given once; RandomResizedCrop came before"),
    ((RESIZE, CROP), 1, "given once; Resize came before"),
    ((CENTER, CENTER), 1, "given once; CenterCrop came before"),
    ((CENTER, RESIZE), 1, "before CenterCrop (padding and rounding"),
    ((CENTER, CROP), 1, "before CenterCrop (padding and rounding"),
    ((JITTER, CROP), 1, "before ColorJitter (colour steps see the finished size"),
    ((CROP, GREY, CENTER), 2, "before Grayscale (colour steps see the finished size"),
    ((NORMAL, CROP), 1, "before Normalize (it works on pixels in [0, 1]"),
    ((CROP, NORMAL, JITTER), 2, "before Normalize"),
    ((CROP, NORMAL, NORMAL), 2, "given once; Normalize came before"),
    ((CROP, NORMAL, FLIP), 2, "before Normalize"),
]


@pytest.mark.parametrize(("steps", "position", "allowed"), WRONG_ORDER)
def test_steps_in_an_order_that_cannot_work_are_refused_by_position(steps, position, allowed):
    with pytest.raises(ConfigError) as caught:
        Recipe(steps=steps)
    assert caught.value.field == f"steps[{position}]"
    assert caught.value.value == type(steps[position]).__name__
    assert allowed in caught.value.allowed


def test_order_problems_lists_every_step_in_the_wrong_place():
    problems = module.order_problems((NORMAL, CROP, FLIP, GREY, NORMAL))
    assert [position for position, _ in problems] == [1, 2, 3, 4]


@pytest.mark.parametrize("steps", [(), (FLIP,), (RESIZE,), (Resize(5, max_size=6), FLIP, NORMAL), (GREY,)])
def test_steps_that_leave_images_of_different_sizes_are_refused(steps):
    with pytest.raises(
        ConfigError, match=r"different sizes.*add RandomResizedCrop, CenterCrop, RandomCrop, or Resize"
    ) as caught:
        Recipe(steps=steps)
    assert caught.value.field == "steps"
    assert caught.value.value == [type(step).__name__ for step in steps]


@pytest.mark.parametrize(
    ("steps", "size"),
    [
        ((RandomResizedCrop((3, 4)),), (3, 4)),
        ((Resize((3, 4)),), (3, 4)),
        ((CenterCrop((3, 4)),), (3, 4)),
        ((Resize(9), CenterCrop(8)), (8, 8)),
        ((RandomResizedCrop(20), FLIP, CenterCrop((5, 6))), (5, 6)),
        ((FLIP, Resize((3, 4)), FLIP, CenterCrop(7), GREY, FLIP, JITTER, NORMAL), (7, 7)),
    ],
)
def test_output_size_is_that_of_the_last_crop_or_resize(steps, size):
    assert Recipe(steps=steps).output_size == size


# ColorJitter's arguments against torchvision's own constructor.

NUMBERS = st.floats(-1.5, 3) | st.integers(-1, 3) | st.sampled_from([0, 0.0, 1, 0.5, -0.5, 0.25, -0.0])
ARGUMENTS = st.none() | NUMBERS | st.tuples(NUMBERS, NUMBERS) | st.lists(NUMBERS, max_size=3) | st.just("x")


@given(brightness=ARGUMENTS, contrast=ARGUMENTS, saturation=ARGUMENTS, hue=ARGUMENTS)
def test_color_jitter_ranges_equal_torchvisions_or_both_refuse(brightness, contrast, saturation, hue):
    for name, value in (("brightness", brightness), ("contrast", contrast), ("saturation", saturation), ("hue", hue)):
        try:
            theirs = getattr(v2.ColorJitter(**{name: value}), name)
        except (TypeError, ValueError):
            with pytest.raises(ConfigError):
                ColorJitter(**{name: value})
        else:
            assert getattr(ColorJitter(**{name: value}), name) == theirs


def test_color_jitter_of_range_one_to_one_does_nothing():
    assert ColorJitter(0, (1, 1), None, (0, 0)).ranges == (None, None, None, None)
    assert ColorJitter((0.5, 0.5), hue=(0.1, 0.1)).ranges == ((0.5, 0.5), None, None, (0.1, 0.1))


# The two recipes that people type.


def test_train_defaults_are_torchvisions():
    theirs = v2.RandomResizedCrop(224)
    assert Recipe.train().steps == (
        RandomResizedCrop(theirs.size, scale=theirs.scale, ratio=theirs.ratio),
        RandomHorizontalFlip(v2.RandomHorizontalFlip().p),
        Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    )
    assert (Recipe.train().precision, Recipe.train().exif, Recipe.train().output) == ("float32", "ignore", Output())


def test_train_with_everything_given_has_it_in_its_steps():
    output = Output(dtype="float16", memory_format="channels_last")
    recipe = Recipe.train(
        (96, 128),
        scale=(0.5, 1),
        ratio=(1, 2),
        hflip=0,
        jitter=(0.4, 0.3),
        interpolation="bicubic",
        mean=0.5,
        std=0.25,
        precision="uint8",
        exif="apply",
        output=output,
    )
    assert recipe.steps == (
        RandomResizedCrop((96, 128), scale=(0.5, 1), ratio=(1, 2), interpolation="bicubic"),
        ColorJitter(0.4, 0.3),
        Normalize((0.5,) * 3, (0.25,) * 3),
    )
    assert (recipe.precision, recipe.exif, recipe.output) == ("uint8", "apply", output)


def test_eval_defaults_are_torchvisions():
    assert Recipe.eval().steps == (Resize(256), CenterCrop(224), Normalize())


def test_properties_of_a_recipe_without_resize_colour_and_normalize_change_nothing():
    bare = Recipe(steps=(CenterCrop(8),))
    assert bare.interpolation == "bilinear"
    assert bare.colour_steps == ()
    assert bare.normalize == Normalize(0.0, 1.0)


def test_properties_find_their_steps():
    steps = (Resize(9, interpolation="bicubic"), CENTER, GREY, FLIP, JITTER, Normalize(0.25, 0.5))
    recipe = Recipe(steps=steps)
    assert recipe.interpolation == "bicubic"
    assert recipe.colour_steps == (GREY, JITTER)
    assert recipe.normalize == Normalize(0.25, 0.5)


# JSON


@given(recipes)
def test_json_round_trip_any_recipe_is_equal(recipe):
    back = Recipe.from_json(recipe.to_json())
    assert back == recipe
    assert back.notes == recipe.notes
    assert back.fingerprint == recipe.fingerprint
    assert back.to_json() == recipe.to_json()


@given(recipes)
def test_json_is_strict(recipe):
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(recipe.to_json(), parse_constant=refuse)


def test_json_of_a_known_recipe_is_still_read():
    text = """{"version": 1, "steps": [{"step": "RandomResizedCrop", "size": [32, 48]}, {"step": "ColorJitter",
        "hue": 0.1}, {"step": "Grayscale"}], "precision": "uint8"}"""
    assert Recipe.from_json(text) == Recipe(
        steps=(RandomResizedCrop((32, 48)), ColorJitter(hue=0.1), Grayscale()), precision="uint8"
    )


GOOD = Recipe.train(size=32).to_dict()
BAD_JSON = [
    ("", "text", "invalid JSON"),
    ("{", "text", "invalid JSON"),
    (None, "text", "invalid JSON"),
    (7, "text", "invalid JSON"),
    pytest.param("[" * 100_000, "text", "invalid JSON", id="too deep"),
    ("null", "version", "version 1"),
    ("[]", "version", "version 1"),
    ("{}", "version", "version 1"),
    (GOOD | {"version": 2}, "version", "version 1"),
    (GOOD | {"version": "1"}, "version", "version 1"),
    (GOOD | {"steps": None}, "version", '"steps"'),
    (GOOD | {"steps": {}}, "version", '"steps"'),
    (GOOD | {"augment": 1, "device": 2}, "recipe", "['augment', 'device']"),
    (GOOD | {"steps": [{"step": "Rotate"}]}, "steps[0]", "one of RandomResizedCrop, Resize"),
    (GOOD | {"steps": ["CenterCrop"]}, "steps[0]", "'step' is one of"),
    (GOOD | {"steps": [{}]}, "steps[0]", "'step' is one of"),
    (GOOD | {"steps": [{"step": ["CenterCrop"]}]}, "steps[0]", "'step' is one of"),
    (GOOD | {"steps": [{"step": "CenterCrop"}]}, "steps[0]", "those of CenterCrop: size"),
    (GOOD | {"steps": [{"step": "CenterCrop", "size": 3, "fill": 1}]}, "steps[0]", "those of CenterCrop: size"),
    (GOOD | {"steps": [{"step": "Grayscale", "p": 1}]}, "steps[0]", "no further entries"),
    (GOOD | {"steps": [{"step": "CenterCrop", "size": [[1], 2]}]}, "size", "(height, width)"),
    (GOOD | {"precision": "half"}, "precision", "'float32'"),
    (GOOD | {"exif": None}, "exif", "'ignore'"),
    (GOOD | {"output": []}, "output", '"dtype" and "memory_format"'),
    (GOOD | {"output": {"layout": 1}}, "output", '"dtype" and "memory_format"'),
    (GOOD | {"output": {"dtype": "int8"}}, "output.dtype", "'float32'"),
    (GOOD | {"functions": None}, "functions", "a list of objects"),
    (GOOD | {"functions": [3]}, "functions", '"per" ("batch" or "sample")'),
    (GOOD | {"functions": [{"per": [], "name": "f"}]}, "functions", '"per" ("batch" or "sample")'),
    (GOOD | {"functions": [{"per": "batch", "name": []}]}, "functions", '"per" ("batch" or "sample")'),
    (GOOD | {"functions": [{"per": "batch", "name": "f"}]}, "functions", "give the function itself"),
    (GOOD | {"notes": None}, "notes", "a sequence of strings"),
    (GOOD | {"notes": "abc"}, "notes", "a sequence of strings"),
    (json.dumps(GOOD).replace("0.08", "NaN"), "scale", "low <= high"),
    (json.dumps(GOOD).replace("0.08", "1e999"), "scale", "low <= high"),
]


@pytest.mark.parametrize(("found", "field", "said"), BAD_JSON)
def test_json_that_is_no_recipe_is_refused(found, field, said):
    with pytest.raises(ConfigError) as caught:
        Recipe.from_json(json.dumps(found) if isinstance(found, dict) else found)
    assert caught.value.field == field
    assert said in caught.value.message


# Identity

KNOWN = Recipe(
    steps=(
        RandomResizedCrop((224, 192), scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3), interpolation="bicubic"),
        RandomHorizontalFlip(0.5),
        RandomVerticalFlip(0.25),
        ColorJitter(0.4, (0.5, 1.5), None, 0.1),
        RandomGrayscale(0.1),
        Grayscale(),
        Normalize(),
    ),
    precision="uint8",
    exif="apply",
    output=Output(dtype="bfloat16", memory_format="channels_last"),
    notes=("hello",),
)


def test_fingerprint_of_known_recipes_never_changes():
    """Recorded once. A saved state holds the fingerprint: a change here makes everybody's states refuse to load."""
    assert KNOWN.fingerprint == "3b55a7223eca369d3d78811cfb3614a76b304092c7d8d8686496d8b5f94a9c62"
    assert Recipe.train().fingerprint == "3d410f59a5d22738393412fe3b93593ba1d8c1e205b09feaf643743940d61781"
    assert Recipe.eval().fingerprint == "c8e54f9768ee77d03c7c8278e2dc67ea31174d6781b0547e67dcc6bff067e39c"


def variants() -> list[Recipe]:
    """Recipes of which each two differ in one field only of one step, or in one field of the recipe."""
    base = KNOWN

    def with_step(position: int, step: Step) -> Recipe:
        return dataclasses.replace(base, steps=(*base.steps[:position], step, *base.steps[position + 1 :]))

    crop = {"size": (224, 192), "scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), "interpolation": "bicubic"}
    jitter = dict(zip(("brightness", "contrast", "saturation", "hue"), base.steps[3].ranges, strict=True))
    return [
        base,
        *[
            with_step(0, RandomResizedCrop(**crop | change))
            for change in (
                {"size": (192, 224)},
                {"scale": (0.080001, 1.0)},
                {"scale": (0.08, 0.9)},
                {"ratio": (0.7, 4 / 3)},
                {"ratio": (3 / 4, 1.3)},
                {"interpolation": "bilinear"},
            )
        ],
        with_step(0, Resize((224, 192), interpolation="bicubic")),
        with_step(0, CenterCrop((224, 192))),
        with_step(1, RandomHorizontalFlip(0.5000001)),
        with_step(1, RandomVerticalFlip(0.5)),
        with_step(2, RandomVerticalFlip(0.3)),
        *[with_step(3, ColorJitter(**jitter | {name: (0.1, 0.2)})) for name in jitter],
        with_step(3, ColorJitter(**jitter | {"hue": None})),
        with_step(4, RandomGrayscale(0.2)),
        with_step(6, Normalize((0.485, 0.456, 0.4), IMAGENET_STD)),
        with_step(6, Normalize(IMAGENET_MEAN, (0.229, 0.224, 0.2))),
        *[with_step(4, step) for step in other_steps()],
        *[with_step(1, step) for step in other_crops()],
        *[dataclasses.replace(base, steps=(*base.steps, step)) for step in other_erasings()],
        base.then(abs),
        base.then(abs, name="other"),
        base.then(abs, per="sample"),
        dataclasses.replace(base, mix=MixUp(0.2)),
        dataclasses.replace(base, mix=CutMix(0.2)),
        dataclasses.replace(base, mix=MixUp(0.3)),
        dataclasses.replace(base, mix=Mix(choices=(MixUp(0.2), CutMix(0.2)), weights=(1, 2), p=0.5, num_classes=3)),
        dataclasses.replace(base, steps=base.steps[:-1]),
        dataclasses.replace(base, steps=(base.steps[1], base.steps[0], *base.steps[2:])),
        dataclasses.replace(base, precision="float32"),
        dataclasses.replace(base, exif="ignore"),
        dataclasses.replace(base, output=Output(dtype="float16", memory_format="channels_last")),
        dataclasses.replace(base, output=Output(dtype="bfloat16")),
    ]


def other_steps() -> list[Step]:
    """Operations and containers of which each two differ in the kind or in one field."""
    turn = RandomRotation(10)
    moves = (
        {},
        {"translate": (0.1, 0.2)},
        {"scale": (0.9, 1.1)},
        {"shear": 5},
        {"shear": (1, 2, 3, 4)},
        {"interpolation": "bilinear"},
        {"center": (3, 4)},
        {"fill": None},
    )
    policies = ({}, {"interpolation": "bilinear"}, {"fill": 0.5})
    return [
        *[GaussianBlur(*values) for values in (((3, 5),), ((5, 3),), ((3, 5), 1.0))],
        *[RandomSolarize(*values) for values in ((0.5,), (0.25,), (0.5, 0.1))],
        *[RandomPosterize(*values) for values in ((4,), (5,), (4, 0.1))],
        *[kind(p) for kind in (RandomInvert, RandomAutocontrast, RandomEqualize) for p in (0.1, 0.2)],
        *[RandomAdjustSharpness(*values) for values in ((2,), (0.5,), (2, 0.1))],
        turn,
        RandomRotation(11),
        RandomRotation(10, interpolation="bilinear"),
        RandomRotation(10, center=(1, 2)),
        RandomRotation(10, fill=0.5),
        RandomAffine(9),
        *[RandomAffine(10, **more) for more in moves],
        TrivialAugmentWide(30),
        *[TrivialAugmentWide(**more) for more in policies],
        *[RandAugment(*values) for values in ((1,), (2, 8), (2, 9, 30))],
        *[RandAugment(**more) for more in policies],
        *[AutoAugment(policy) for policy in ("cifar10", "svhn")],
        *[AutoAugment(**more) for more in policies],
        *[RandomApply(steps, p) for steps, p in (((turn,), 0.5), ((turn,), 0.4), ((turn, turn), 0.5))],
        *[RandomChoice(steps, p) for steps, p in (((turn,), None), ((turn, turn), None), ((turn, turn), (1, 2)))],
    ]


def other_crops() -> list[Step]:
    """In the place of a flip."""
    return [
        RandomCrop(64),
        RandomCrop((64, 65)),
        RandomCrop(64, padding=4),
        RandomCrop(64, padding=4, pad_if_needed=True),
        RandomCrop(64, padding=4, fill=0.5),
        *[RandomCrop(64, padding=4, padding_mode=mode) for mode in ("edge", "reflect", "symmetric")],
    ]


def other_erasings() -> list[Step]:
    """Behind Normalize."""
    return [
        RandomErasing(),
        RandomErasing(0.4),
        RandomErasing(scale=(0.1, 0.2)),
        RandomErasing(ratio=(0.5, 2)),
        *[RandomErasing(value=value) for value in (0.5, (0, 0, 1), "pixels", "channels")],
    ]


def test_fingerprint_differs_when_any_field_does():
    found = variants()
    assert len({recipe.fingerprint for recipe in found}) == len(found)
    assert len(set(found)) == len(found)
    assert all(a != b for n, a in enumerate(found) for b in found[:n])
    functions = {"builtins.abs": abs, "other": abs}
    assert all(Recipe.from_json(recipe.to_json(), functions=functions) == recipe for recipe in found)


def test_variants_touch_every_field_there_is():
    """So that a field added later is not forgotten above."""
    fields = {f.name for f in dataclasses.fields(Recipe)} - {"notes"}
    assert fields == {"steps", "precision", "exif", "output", "functions", "mix"}
    assert {name: [f.name for f in dataclasses.fields(kind)] for name, kind in STEP_TYPES.items()} == {
        "RandomResizedCrop": ["size", "scale", "ratio", "interpolation"],
        "Resize": ["size", "max_size", "interpolation"],
        "CenterCrop": ["size"],
        "RandomHorizontalFlip": ["p"],
        "RandomVerticalFlip": ["p"],
        "ColorJitter": ["brightness", "contrast", "saturation", "hue"],
        "Grayscale": [],
        "RandomGrayscale": ["p"],
        "Normalize": ["mean", "std"],
        "RandomCrop": ["size", "padding", "pad_if_needed", "fill", "padding_mode"],
        "GaussianBlur": ["kernel_size", "sigma"],
        "RandomSolarize": ["threshold", "p"],
        "RandomPosterize": ["bits", "p"],
        "RandomInvert": ["p"],
        "RandomAutocontrast": ["p"],
        "RandomEqualize": ["p"],
        "RandomAdjustSharpness": ["sharpness_factor", "p"],
        "RandomRotation": ["degrees", "interpolation", "center", "fill"],
        "RandomAffine": ["degrees", "translate", "scale", "shear", "interpolation", "center", "fill"],
        "TrivialAugmentWide": ["num_magnitude_bins", "interpolation", "fill"],
        "RandAugment": ["num_ops", "magnitude", "num_magnitude_bins", "interpolation", "fill"],
        "AutoAugment": ["policy", "interpolation", "fill"],
        "RandomApply": ["steps", "p"],
        "RandomChoice": ["steps", "p"],
        "RandomErasing": ["p", "scale", "ratio", "value"],
    }


def test_fingerprint_of_resize_depends_on_max_size():
    found = [Recipe(steps=(Resize(9, max_size=most), CENTER)) for most in (None, 10, 11)]
    assert len({recipe.fingerprint for recipe in found}) == 3


def test_notes_are_no_part_of_identity():
    other = dataclasses.replace(KNOWN, notes=("another", "story"))
    assert other == KNOWN
    assert hash(other) == hash(KNOWN)
    assert other.fingerprint == KNOWN.fingerprint


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Normalize(0, 1), Normalize((-0.0, 0.0, 0), (1, 1.0, 1))),
        (RandomHorizontalFlip(1), RandomHorizontalFlip(1.0)),
        (RandomHorizontalFlip(-0.0), RandomHorizontalFlip(0)),
        (RandomResizedCrop(8, scale=(-0.0, 1)), RandomResizedCrop([8, 8], scale=[0, 1.0])),
        (ColorJitter((-0.0, 1), hue=(-0.0, 0.25)), ColorJitter(brightness=[0, 1], hue=[0, 0.25])),
        (ColorJitter(0.4), ColorJitter((0.6, 1.4))),
        (ColorJitter(), ColorJitter(0, (1, 1), -0.0, (-0.0, 0))),
        (CenterCrop(8), CenterCrop((8, 8))),
    ],
)
def test_equal_steps_have_equal_hashes_and_fingerprints(one, other):
    assert one == other
    assert hash(one) == hash(other)
    before = () if isinstance(one, CenterCrop | RandomResizedCrop) else (CROP,)
    first, second = Recipe(steps=(*before, one)), Recipe(steps=(*before, other))
    assert first == second
    assert first.fingerprint == second.fingerprint


def test_steps_of_different_kinds_with_equal_fields_differ():
    assert RandomHorizontalFlip(0.5) != RandomVerticalFlip(0.5)
    assert Recipe.train() != "recipe"


@given(recipes, recipes)
def test_recipes_are_equal_exactly_where_fingerprints_are(one, other):
    assert (one == other) == (one.fingerprint == other.fingerprint)
    assert one == copy.deepcopy(one)


@given(recipes)
def test_pickle_round_trip_any_recipe_is_equal(recipe):
    back = pickle.loads(pickle.dumps(recipe))
    assert back == recipe
    assert back.notes == recipe.notes
    assert hash(back) == hash(recipe)


@pytest.mark.parametrize("thing", [KNOWN, KNOWN.output, *KNOWN.steps[:-2], Normalize()], ids=lambda t: type(t).__name__)
def test_fields_cannot_be_set_or_added(thing):
    for name in [f.name for f in dataclasses.fields(thing)]:
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(thing, name, getattr(thing, name))
        with pytest.raises(dataclasses.FrozenInstanceError):
            delattr(thing, name)
    with pytest.raises((AttributeError, TypeError)):
        thing.colour = 1


def test_lists_given_as_arguments_are_copied():
    steps, scale, mean = [RandomResizedCrop(8, scale=[0.1, 1])], [0.1, 1.0], [0.1, 0.2, 0.3]
    recipe = Recipe(steps=steps, notes=["a"])
    steps.append(GREY)
    crop, normal = RandomResizedCrop(8, scale=scale), Normalize(mean)
    scale[0], mean[0] = 0.9, 0.9
    assert recipe.steps == (RandomResizedCrop(8, scale=(0.1, 1)),)
    assert recipe.notes == ("a",)
    assert crop.scale == (0.1, 1.0)
    assert normal.mean == (0.1, 0.2, 0.3)


def test_repr_shows_each_step_on_a_line_and_the_output():
    assert repr(KNOWN) == (
        "Recipe(\n"
        "    RandomResizedCrop(size=(224, 192), interpolation='bicubic')\n"
        "    RandomHorizontalFlip()\n"
        "    RandomVerticalFlip(p=0.25)\n"
        "    ColorJitter(brightness=(0.6, 1.4), contrast=(0.5, 1.5), hue=(-0.1, 0.1))\n"
        "    RandomGrayscale()\n"
        "    Grayscale()\n"
        "    Normalize(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))\n"
        "    precision='uint8', exif='apply', output=bfloat16 channels_last 224 x 192\n"
        ")"
    )


@given(recipes)
def test_repr_any_recipe_has_a_line_for_each_step(recipe):
    assert len(repr(recipe).splitlines()) == len(recipe.steps) + 3
