"""Conversion both ways, with torchvision's own transforms as the oracle of what a recipe must mean."""

import copy
import functools
import itertools
import pickle
import warnings

import numpy as np
import PIL.Image
import pytest
import torch
from hypothesis import assume, given, settings
from PIL import ImageOps
from torch import nn
from torchvision import models, tv_tensors
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from gpupipe import convert
from gpupipe.backends.erasing import erase
from gpupipe.convert import from_torchvision, notes, to_torchvision
from gpupipe.errors import ConfigError
from gpupipe.plan import make_plan
from gpupipe.recipe import Output, Recipe, fixed_size
from gpupipe.records import JitterRows, Plan
from gpupipe.steps import (
    AutoAugment,
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
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
    TrivialAugmentWide,
)
from tests import images
from tests.recipes import recipes

BOTH = pytest.mark.parametrize("t", [v1, v2], ids=["v1", "v2"])
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CROP, FLIP, NORMAL = RandomResizedCrop(224), RandomHorizontalFlip(), Normalize()
CENTER = CenterCrop(32)

TO_FLOAT = v2.ToDtype(torch.float32, scale=True)
# Ways from PIL to float tensors; each gives one list of transforms.
CONVERSIONS = {
    "v1 ToTensor": lambda: [v1.ToTensor()],
    "v1 PILToTensor": lambda: [v1.PILToTensor(), v1.ConvertImageDtype(torch.float32)],
    "v2 ToImage": lambda: [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)],
    "v2 PILToTensor": lambda: [v2.PILToTensor(), v2.ConvertImageDtype(torch.float32)],
    "v2 by type": lambda: [
        v2.ToImage(),
        v2.ToDtype({tv_tensors.Image: torch.float32, "others": None}, scale=True),
        v2.ToPureTensor(),
    ],
    "mixed": lambda: [v1.PILToTensor(), v2.ToDtype({torch.Tensor: torch.float32}, scale=True)],
}


def quiet_to_tensor() -> v2.Transform:
    """v2's deprecated ToTensor, which warns when it is made."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return v2.ToTensor()


def scripted(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.jit.script(module)


def problems(transform: object) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        from_torchvision(transform)
    error = caught.value
    assert error.field == "transform"
    for problem in error.value:
        assert problem in error.message
    assert pickle.loads(pickle.dumps(error)).value == error.value
    return error.value


def the_problem(transform: object) -> str:
    found = problems(transform)
    assert len(found) == 1, found
    return found[0]


# What is understood


@BOTH
@pytest.mark.parametrize("conversion", CONVERSIONS)
def test_train_recipe_in_every_spelling_is_read(t, conversion):
    transform = t.Compose(
        [t.RandomResizedCrop(224), t.RandomHorizontalFlip(), *CONVERSIONS[conversion](), t.Normalize(MEAN, STD)]
    )
    assert from_torchvision(transform) == Recipe.train()


@BOTH
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("place", range(3))
def test_eval_recipe_with_the_conversion_anywhere_is_read(t, conversion, place):
    steps = [t.Resize(256), t.CenterCrop(224)]
    steps[place:place] = CONVERSIONS[conversion]()
    assert from_torchvision(t.Compose([*steps, t.Normalize(MEAN, STD)])) == Recipe.eval()


@BOTH
def test_every_step_keeps_its_arguments(t):
    transform = t.Compose(
        [
            t.RandomVerticalFlip(0.25),
            t.RandomResizedCrop((96, 128), (0.35, 0.9), (0.5, 2.0), InterpolationMode.BICUBIC),
            t.RandomHorizontalFlip(p=0.1),
            t.CenterCrop((64, 48)),
            t.ColorJitter(0.4, (0.5, 0.7), 0, (-0.1, 0.2)),
            t.RandomGrayscale(0.3),
            t.Grayscale(num_output_channels=3),
            t.PILToTensor(),
            t.ConvertImageDtype(torch.float32),
            t.Normalize([0.5], [0.25]),
        ]
    )
    assert from_torchvision(transform) == Recipe(
        steps=(
            RandomVerticalFlip(0.25),
            RandomResizedCrop((96, 128), scale=(0.35, 0.9), ratio=(0.5, 2.0), interpolation="bicubic"),
            RandomHorizontalFlip(0.1),
            CenterCrop((64, 48)),
            ColorJitter((0.6, 1.4), (0.5, 0.7), None, (-0.1, 0.2)),
            RandomGrayscale(0.3),
            Grayscale(),
            Normalize(0.5, 0.25),
        ),
        precision="uint8",
    )


@BOTH
@pytest.mark.parametrize(
    ("size", "expected"), [(256, 256), ([256], 256), ((256,), 256), ([256, 200], (256, 200)), ((1, 2), (1, 2))]
)
def test_resize_sizes_of_every_form_are_read(t, size, expected):
    recipe = from_torchvision(t.Compose([t.Resize(size), t.CenterCrop(224), v1.ToTensor()]))
    assert recipe.steps[0] == Resize(expected)


@BOTH
@pytest.mark.parametrize(("size", "expected"), [(8, (8, 8)), ([8], (8, 8)), ((8,), (8, 8)), ([8, 9], (8, 9))])
def test_crop_sizes_of_every_form_are_read(t, size, expected):
    assert from_torchvision(t.Compose([t.CenterCrop(size), v1.ToTensor()])).steps == (CenterCrop(expected),)
    crop = from_torchvision(t.Compose([t.RandomResizedCrop(size), v1.ToTensor()])).steps
    assert crop == (RandomResizedCrop(expected),)


@BOTH
def test_resize_with_max_size_is_read(t):
    recipe = from_torchvision(t.Compose([t.Resize(256, max_size=300), t.CenterCrop(224), v1.ToTensor()]))
    assert recipe.steps == (Resize(256, max_size=300), CenterCrop(224))


@BOTH
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (InterpolationMode.BILINEAR, "bilinear"),
        (InterpolationMode.BICUBIC, "bicubic"),
        (2, "bilinear"),
        (3, "bicubic"),
        (PIL.Image.Resampling.BILINEAR, "bilinear"),
        (PIL.Image.BICUBIC, "bicubic"),
        ("bilinear", "bilinear"),
        ("bicubic", "bicubic"),
    ],
)
def test_interpolation_in_every_spelling_is_read(t, mode, expected):
    for step in (t.RandomResizedCrop(8, interpolation=mode), t.Resize((8, 8), interpolation=mode)):
        assert from_torchvision(t.Compose([step, v1.ToTensor()])).interpolation == expected


def test_containers_are_looked_into():
    plain = [v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ToImage(), TO_FLOAT, v2.Normalize(MEAN, STD)]
    for transform in (
        v2.Compose([v2.Compose(plain[:2]), v1.Compose([v2.Compose(plain[2:])])]),
        nn.Sequential(*plain),
        v1.Compose([nn.Sequential(*plain[:3]), nn.Sequential(nn.Sequential(plain[3]), plain[4])]),
        v1.Compose(tuple(plain)),
        v1.Compose(nn.ModuleList(plain)),
    ):
        assert from_torchvision(transform) == Recipe.train()


def test_a_single_transform_is_read():
    preset = models.ResNet50_Weights.IMAGENET1K_V1.transforms()
    assert from_torchvision(preset) == Recipe.eval()


def test_steps_that_change_nothing_are_passed_over():
    identity = v2.Compose([nn.Identity(), v2.RGB(), v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), v2.ToImage()])
    transform = v2.Compose(
        [
            v2.ToDtype(torch.float32, scale=True),  # passes PIL images on, as torchvision does
            v2.ConvertImageDtype(torch.float32),
            identity,  # ends with a uint8 tensor
            v2.PILToTensor(),
            quiet_to_tensor(),
            TO_FLOAT,
            v2.ToPureTensor(),
            v2.ToImage(),
            v2.ToDtype(torch.float32),  # float to float: nothing left to scale
            v1.Normalize(MEAN, STD),
            v2.ToPureTensor(),
        ]
    )
    assert from_torchvision(transform) == Recipe.train()
    assert isinstance(transform(pil(30, 40)), torch.Tensor)


def test_deprecated_v2_to_tensor_is_read():
    assert from_torchvision(v2.Compose([v2.CenterCrop(8), quiet_to_tensor()])).precision == "float32"


def test_normalize_takes_numbers_of_numpy_and_torch():
    for mean in (torch.tensor(MEAN, dtype=torch.float64), np.array(MEAN), [np.float64(m) for m in MEAN]):
        for t in (v1, v2):
            steps = from_torchvision(t.Compose([t.CenterCrop(8), v1.ToTensor(), t.Normalize(mean, STD)])).steps
            assert steps[-1] == Normalize()
    assert from_torchvision(v1.Compose([v1.CenterCrop(8), v1.ToTensor(), v1.Normalize(0.5, 0.25)])).steps[-1] == (
        Normalize(0.5, 0.25)
    )


@pytest.mark.parametrize(
    "upright",
    [
        ImageOps.exif_transpose,
        v1.Lambda(ImageOps.exif_transpose),
        v2.Lambda(ImageOps.exif_transpose),
        v2.Lambda(ImageOps.exif_transpose, PIL.Image.Image),
    ],
)
def test_exif_transpose_at_the_front_gives_exif_apply(upright):
    rest = [v2.CenterCrop(8), v1.ToTensor()]
    assert from_torchvision(v1.Compose([upright, *rest])) == Recipe(steps=(CenterCrop(8),), exif="apply")
    assert from_torchvision(v2.Compose([v2.RGB(), upright, *rest])).exif == "apply"
    assert from_torchvision(v1.Compose(rest)).exif == "ignore"


def test_exif_transpose_of_other_types_does_nothing():
    transform = v2.Compose([v2.Lambda(ImageOps.exif_transpose, torch.Tensor), v2.CenterCrop(8), v1.ToTensor()])
    assert from_torchvision(transform).exif == "ignore"


def every_classification_preset() -> list[str]:
    return [
        f"{type(weights).__name__}.{weights.name}"
        for name in models.list_models(module=models)
        for weights in models.get_model_weights(name)
    ]


def test_every_preset_of_torchvisions_classification_weights_is_read():
    names = every_classification_preset()
    assert len(names) > 100
    for name in names:
        preset = models.get_weight(name).transforms()
        recipe = from_torchvision(preset)
        assert recipe.steps == (
            Resize(preset.resize_size[0], interpolation=preset.interpolation.value),
            CenterCrop(preset.crop_size[0]),
            Normalize(preset.mean, preset.std),
        ), name
        assert recipe.precision == "float32"
        assert from_torchvision(v2.Compose([v2.PILToTensor(), preset])) == recipe


def test_timm_like_sequence_with_bicubic_keeps_its_filter():
    recipe = from_torchvision(
        v1.Compose(
            [
                v1.Resize(248, interpolation=InterpolationMode.BICUBIC),
                v1.CenterCrop(224),
                v1.ToTensor(),
                v1.Normalize(mean=torch.tensor(MEAN), std=torch.tensor(STD)),
            ]
        )
    )
    assert recipe.interpolation == "bicubic"
    np.testing.assert_allclose(recipe.normalize.mean, MEAN, rtol=1e-7)


# Precision and notes

JITTER = (0.4, 0.4, 0.4, 0.1)


@BOTH
@pytest.mark.parametrize("colour", ["ColorJitter", "RandomGrayscale", "Grayscale"])
def test_precision_follows_the_image_that_colour_steps_see(t, colour):
    step = t.Grayscale(3) if colour == "Grayscale" else getattr(t, colour)()

    def precision(*steps) -> str:
        return from_torchvision(t.Compose([t.RandomResizedCrop(8), *steps])).precision

    to_float = t.ConvertImageDtype(torch.float32)
    assert precision(step, v1.ToTensor()) == "uint8"
    assert precision(step, t.PILToTensor(), to_float) == "uint8"
    assert precision(t.PILToTensor(), step, to_float) == "uint8"
    assert precision(t.PILToTensor(), to_float, step) == "float32"
    assert precision(v1.ToTensor(), step) == "float32"
    assert precision(v1.ToTensor()) == "float32"


def test_precision_of_colour_on_pil_and_uint8_tensors_together_is_uint8():
    steps = [v1.CenterCrop(8), v1.ColorJitter(0.4), v1.PILToTensor(), v1.RandomGrayscale()]
    assert from_torchvision(v1.Compose([*steps, v1.ConvertImageDtype(torch.float32)])).precision == "uint8"


def test_explicit_uint8_behind_the_resize_asks_for_rounded_pixels():
    crop, uint8 = v2.RandomResizedCrop(8), v2.ToDtype(torch.uint8, scale=True)
    behind = v2.Compose([v2.ToImage(), crop, uint8, TO_FLOAT])
    before = v2.Compose([v2.ToImage(), uint8, crop, TO_FLOAT])  # as in torchvision's documentation
    assert from_torchvision(behind).precision == "uint8"
    assert from_torchvision(before).precision == "float32"


def notes_of(*steps) -> tuple[str, ...]:
    return from_torchvision(v2.Compose(list(steps))).notes


CROP_224, BICUBIC = v2.RandomResizedCrop(224), v2.RandomResizedCrop(224, interpolation=InterpolationMode.BICUBIC)
IMAGE, COLOUR, TENSOR = v2.ToImage(), v2.ColorJitter(*JITTER), v1.ToTensor()


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ((CROP_224, TENSOR), [notes.NOTE_UNROUNDED]),
        ((IMAGE, CROP_224, TO_FLOAT), [notes.NOTE_UNROUNDED]),
        ((IMAGE, TO_FLOAT, CROP_224), []),
        ((v2.CenterCrop(8), TENSOR), []),
        ((BICUBIC, TENSOR), [notes.NOTE_UNROUNDED, notes.NOTE_BICUBIC]),
        ((IMAGE, TO_FLOAT, BICUBIC), [notes.NOTE_BICUBIC_CLAMP]),
        ((CROP_224, COLOUR, TENSOR), [notes.NOTE_PIL_COLOUR, notes.NOTE_PIL_RESIZE]),
        ((CROP_224, IMAGE, COLOUR, TO_FLOAT), [notes.NOTE_PIL_RESIZE]),
        ((IMAGE, CROP_224, COLOUR, TO_FLOAT), []),
        ((IMAGE, BICUBIC, COLOUR, TO_FLOAT), []),
        ((CROP_224, TENSOR, COLOUR), [notes.NOTE_UNROUNDED, notes.NOTE_UNROUNDED_COLOUR]),
        ((IMAGE, TO_FLOAT, CROP_224, COLOUR), []),
        ((IMAGE, v1.RandomResizedCrop(224), COLOUR, TO_FLOAT), [notes.NOTE_V1_UINT8]),
        ((IMAGE, CROP_224, v1.ColorJitter(*JITTER), TO_FLOAT), [notes.NOTE_V1_UINT8]),
        ((IMAGE, v1.RandomResizedCrop(224), TO_FLOAT), [notes.NOTE_UNROUNDED]),
    ],
)
def test_notes_say_where_the_pixels_are_not_those_of_the_transform(steps, expected):
    assert list(notes_of(*steps)) == expected


def test_notes_give_the_figures():
    assert "1.3 levels" in notes.NOTE_PIL_COLOUR
    assert "20 levels" in notes.NOTE_PIL_COLOUR
    assert "18 levels" in notes.NOTE_BICUBIC


def test_flip_behind_normalize_is_moved_before_it_with_a_note():
    steps = [v2.CenterCrop(8), v1.ToTensor(), v2.Normalize(MEAN, STD)]
    transform = v2.Compose([*steps, v2.RandomHorizontalFlip(0.3), v2.RandomVerticalFlip(0.4)])
    recipe = from_torchvision(transform)
    assert recipe.steps == (CenterCrop(8), RandomHorizontalFlip(0.3), RandomVerticalFlip(0.4), Normalize())
    assert recipe.notes == (notes.NOTE_FLIP_MOVED,)


# antialias


@BOTH
def test_antialias_false_on_pil_images_is_ignored_as_torchvision_does(t):
    for antialias in (False, None):
        for step in (t.RandomResizedCrop(8, antialias=antialias), t.Resize((8, 8), antialias=antialias)):
            recipe = from_torchvision(t.Compose([step, v1.ToTensor()]))
            assert (notes.NOTE_ANTIALIAS in recipe.notes) == (antialias is False)


@BOTH
def test_antialias_false_on_tensors_is_refused(t):
    for antialias in (False, None):
        for step in (t.RandomResizedCrop(8, antialias=antialias), t.Resize((8, 8), antialias=antialias)):
            found = the_problem(t.Compose([t.PILToTensor(), step, t.ConvertImageDtype(torch.float32)]))
            assert found.startswith(f"transforms[1] {type(step).__name__}: antialias={antialias} on tensors")
            assert "use antialias=True" in found


def test_antialias_true_on_tensors_is_read():
    for antialias in (True, "warn"):  # a default of older releases; torchvision takes it as true
        transform = v1.Compose([v1.ToTensor(), v1.RandomResizedCrop(8, antialias=antialias)])
        assert from_torchvision(transform).steps == (RandomResizedCrop(8),)


# dtypes


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_at_the_end_is_the_output(dtype):
    half = getattr(torch, dtype)
    for last in (
        v2.ToDtype(half, scale=True),
        v2.ToDtype(half),
        v2.ConvertImageDtype(half),
        v1.ConvertImageDtype(half),
    ):
        recipe = from_torchvision(v2.Compose([v2.CenterCrop(8), v2.ToImage(), TO_FLOAT, v2.Normalize(MEAN, STD), last]))
        assert recipe == Recipe(steps=(CenterCrop(8), Normalize()), output=Output(dtype=dtype))
        assert recipe.notes == ()


def test_half_precision_before_normalize_is_read_with_a_note():
    half = v2.ToDtype(torch.float16, scale=True)
    recipe = from_torchvision(v2.Compose([v2.CenterCrop(8), v2.ToImage(), half, v2.Normalize(MEAN, STD)]))
    assert recipe.output.dtype == "float16"
    assert recipe.notes == (notes.NOTE_HALF_NORMALIZE.format(dtype="float16"),)


def test_half_precision_before_resize_or_colour_is_refused():
    half = v2.ToDtype(torch.float16, scale=True)
    found = problems(v2.Compose([v2.ToImage(), half, v2.RandomResizedCrop(8), v2.ColorJitter(0.4)]))
    assert found == [
        "transforms[2] RandomResizedCrop: resizing float16 is not supported; convert to float16 at the end",
        "transforms[3] ColorJitter: colour steps on float16 are not supported; convert to float16 at the end",
    ]


@pytest.mark.parametrize(
    ("before", "dtype", "said"),
    [
        ([], torch.float64, "float64 is not supported; use torch.float32, torch.float16 or torch.bfloat16"),
        ([], torch.int64, "int64 is not supported"),
        ([TO_FLOAT], torch.float64, "float64 is not supported"),
        ([TO_FLOAT], torch.uint8, "back from float32 to uint8 is not supported; leave it out"),
        ([v2.ToDtype(torch.float16, scale=True)], torch.float32, "from float16 to float32 is not supported"),
        ([v2.ToDtype(torch.float16, scale=True)], torch.bfloat16, "from float16 to bfloat16 is not supported"),
    ],
)
def test_dtype_that_cannot_be_expressed_is_refused(before, dtype, said):
    found = problems(v2.Compose([v2.CenterCrop(8), v2.ToImage(), *before, v2.ToDtype(dtype, scale=True)]))
    assert found[0].startswith(f"transforms[{2 + len(before)}] ToDtype: {said}")


def test_dtype_by_type_that_misses_the_image_is_refused():
    by_type = v2.ToDtype({tv_tensors.Image: torch.float32}, scale=True)
    found = problems(v2.Compose([v2.CenterCrop(8), v2.PILToTensor(), by_type]))
    assert "says nothing of <class 'torch.Tensor'>" in found[0]


def test_dtype_by_type_that_leaves_the_image_alone_does_so():
    by_type = v2.ToDtype({tv_tensors.Image: None, "others": torch.float32}, scale=True)
    assert "still uint8 tensors" in the_problem(v2.Compose([v2.CenterCrop(8), v2.ToImage(), by_type]))
    assert from_torchvision(v2.Compose([v2.CenterCrop(8), v2.PILToTensor(), by_type])).precision == "float32"


@BOTH
def test_pipeline_that_ends_without_floats_is_refused(t):
    for steps, kind in (([], "PIL images"), ([t.PILToTensor()], "uint8 tensors")):
        found = the_problem(t.Compose([t.CenterCrop(8), *steps]))
        assert found.startswith(f"at the end: images are still {kind}, and a batch is float; add ToTensor()")


def test_scale_false_with_mean_and_std_for_255_is_divided():
    mean, std = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
    steps = [v2.CenterCrop(8), v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize(mean, std)]
    recipe = from_torchvision(v2.Compose(steps))
    assert recipe.notes == (notes.NOTE_FULL_RANGE,)
    np.testing.assert_allclose(recipe.normalize.mean, MEAN)
    np.testing.assert_allclose(recipe.normalize.std, STD)
    image = pil(8, 8)
    expected = v2.Compose(steps)(image)
    torch.testing.assert_close(to_torchvision(recipe)(image), expected.as_subclass(torch.Tensor), rtol=1e-6, atol=2e-6)


def test_scale_false_with_mean_and_std_for_one_is_refused():
    found = the_problem(
        v2.Compose([v2.CenterCrop(8), v2.ToImage(), v2.ToDtype(torch.float32), v2.Normalize(MEAN, STD)])
    )
    assert found.startswith("transforms[3] Normalize: mean=[0.485")
    assert "add scale=True there" in found


def test_scale_false_without_normalize_is_refused():
    found = the_problem(v2.Compose([v2.CenterCrop(8), v2.ToImage(), v2.ToDtype(torch.float32)]))
    assert found.startswith("at the end: pixels are floats from 0 to 255")


def test_scale_false_before_colour_is_refused():
    found = problems(
        v2.Compose([v2.CenterCrop(8), v2.ToImage(), v2.ToDtype(torch.float32), v2.ColorJitter(0.4), v2.Grayscale(3)])
    )
    assert [problem.split(":")[0] for problem in found] == ["transforms[3] ColorJitter", "transforms[4] Grayscale"]
    assert all("convert with scale=True before" in problem for problem in found)


# What is refused

IN_TORCHVISION = [
    (v1.FiveCrop(8), "use CenterCrop"),
    (v2.TenCrop(8), "use CenterCrop"),
    (v1.Pad(3), "CenterCrop pads"),
    (v2.Pad(3), "CenterCrop pads"),
    (v2.RandomOrder([v2.ColorJitter(0.4)]), "a recipe has one order"),
    (v1.ToPILImage(), "leave it out"),
    (v2.ToPILImage(), "leave it out"),
    (v2.AugMix(), "use RandAugment or TrivialAugmentWide"),
    (v2.ElasticTransform(), 'unsupported="tail"'),
    (v2.MixUp(num_classes=3), "Recipe(mix=gpupipe.MixUp(...)), or apply it to the batches of the loader"),
    (v1.RandomPerspective(), "apply it to the batches of the loader"),
    (v2.JPEG(50), "apply it to the batches of the loader"),
    (models.detection.FasterRCNN_ResNet50_FPN_Weights.DEFAULT.transforms(), "apply it to the batches of the loader"),
]


@pytest.mark.parametrize(("step", "remedy"), IN_TORCHVISION, ids=lambda value: type(value).__name__)
def test_transform_of_torchvision_that_is_not_supported_is_named_with_a_remedy(step, remedy):
    found = problems(v2.Compose([v2.RandomResizedCrop(8), step, v1.ToTensor(), v2.Normalize(MEAN, STD)]))
    assert found[0].startswith(f"transforms[1] {type(step).__name__}: not supported; ")
    assert remedy in found[0]
    assert len(found) == 1


class MyCrop(v1.RandomResizedCrop):
    def forward(self, img):
        return img


class MyFlip(v2.RandomHorizontalFlip):
    pass


class MyCompose(v1.Compose):
    pass


class Cutout:
    def __call__(self, image):
        return image


def my_function(image):
    return image


@pytest.mark.parametrize(
    ("step", "name", "remedy"),
    [
        (
            MyCrop(8),
            "MyCrop",
            "a subclass of RandomResizedCrop, which may do something else: use RandomResizedCrop itse",
        ),
        (MyFlip(), "MyFlip", "a subclass of RandomHorizontalFlip"),
        (MyCompose([v1.CenterCrop(8)]), "MyCompose", "a subclass of Compose"),
        (Cutout(), "Cutout", "it is no transform of torchvision; from_torchvision(..., unsupported="),
        (nn.ReLU(), "ReLU", "it is no transform of torchvision"),
        (my_function, "my_function", "what a function does cannot be read"),
        (lambda image: image.convert("RGB"), "<lambda>", "leave it out where it converts to RGB"),
        (v1.Lambda(my_function), "Lambda", "what a function does cannot be read"),
        (v2.Lambda(my_function), "Lambda", "give PIL.ImageOps.exif_transpose itself"),
        (v1.ToTensor, "ToTensor", "it is a class: call it, ToTensor(...)"),
        (models.ResNet50_Weights.DEFAULT.value.transforms, "partial", "call it first, as in weights.transforms()"),
        (functools.partial(my_function), "partial", "call it first"),
        (scripted(v1.CenterCrop(8)), "RecursiveScriptModule", "as it was before torch.jit.script"),
        (None, "NoneType", "it is no transform of torchvision"),
        ("flip", "str", "it is no transform of torchvision"),
        (v1.Compose(None), "Compose", "it holds no list of transforms: give one"),
    ],
)
def test_thing_that_is_no_transform_of_torchvision_is_named_with_a_remedy(step, name, remedy):
    found = the_problem(v1.Compose([step]))
    assert found.startswith(f"transforms[0] {name}: not supported; ")
    assert remedy in found
    if callable(step):
        assert the_problem(step) == found.replace("transforms[0] ", "transform ")


@pytest.mark.parametrize("thing", [None, 3, "resize", [v2.CenterCrop(8), v2.ToImage()], {"a": 1}])
def test_thing_that_cannot_be_called_is_refused(thing):
    with pytest.raises(ConfigError, match=r"is no transform: give a Compose of torchvision.transforms or its v2"):
        from_torchvision(thing)


@BOTH
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "box", "hamming", "lanczos"])
def test_interpolation_that_is_not_supported_is_refused(t, mode):
    mode = InterpolationMode(mode)
    for step in (t.RandomResizedCrop(8, interpolation=mode), t.Resize((8, 8), interpolation=mode)):
        found = problems(t.Compose([step, v1.ToTensor()]))
        assert found == [
            f"transforms[0] {type(step).__name__}: interpolation={mode!r} is not supported; use "
            "InterpolationMode.BILINEAR or BICUBIC"
        ]


@BOTH
@pytest.mark.parametrize("mode", [0, 1, 4, 5])
def test_interpolation_numbers_of_pillow_that_are_not_supported_are_refused(t, mode):
    assert "is not supported; use InterpolationMode.BILINEAR" in the_problem(
        t.Compose([t.RandomResizedCrop(8, interpolation=mode), v1.ToTensor()])
    )


@BOTH
def test_grayscale_of_one_channel_is_refused(t):
    found = the_problem(t.Compose([t.CenterCrop(8), t.Grayscale(), v1.ToTensor()]))
    assert found.startswith("transforms[1] Grayscale: num_output_channels=1 is not supported")
    assert "use Grayscale(num_output_channels=3)" in found


def test_resize_by_the_longer_side_is_refused():
    found = problems(v2.Compose([v2.Resize(None, max_size=100), v2.CenterCrop(8), v1.ToTensor()]))
    assert found == ["transforms[0] Resize: size=None, which scales the longer side to max_size, is not supported; give size"]  # fmt: skip # noqa: E501


@BOTH
def test_normalize_before_floats_is_refused_as_torchvision_does(t):
    for steps, kind in (([], "PIL images"), ([t.PILToTensor()], "uint8 tensors")):
        transform = t.Compose([t.CenterCrop(8), *steps, t.Normalize(MEAN, STD)])
        with pytest.raises(TypeError):
            transform(pil(9, 9))
        found = problems(transform)
        assert found[0].startswith(f"transforms[{1 + len(steps)}] Normalize: torchvision refuses it on {kind}")


@pytest.mark.parametrize(
    "steps",
    [
        [v1.ToTensor(), v1.ToTensor()],
        [v1.PILToTensor(), v1.ToTensor()],
        [v1.ToTensor(), v1.PILToTensor()],
        [v1.ConvertImageDtype(torch.float32), v1.ToTensor()],
    ],
)
def test_conversion_that_v1_refuses_is_refused(steps):
    transform = v1.Compose([v1.CenterCrop(8), *steps])
    with pytest.raises(TypeError):
        transform(pil(9, 9))
    assert "torchvision refuses it on" in the_problem(transform)


@pytest.mark.parametrize(
    ("step", "said"),
    [
        (v1.RandomHorizontalFlip(p=2), "p=2 is not valid: it must be a probability from 0 to 1"),
        (v1.Normalize([0.5, 0.5], [1, 1]), "mean=[0.5, 0.5] is not valid: it must be one number or three"),
        (v1.Normalize(MEAN, (1, 1, 0)), "std="),
        (v1.Normalize(MEAN, "abc"), "cannot be read as numbers"),
        (v1.Normalize(None, STD), "cannot be read as numbers"),
    ],
)
def test_argument_that_a_recipe_refuses_is_named_with_its_position(step, said):
    found = the_problem(v1.Compose([v1.CenterCrop(8), v1.ToTensor(), step]))
    assert found.startswith(f"transforms[2] {type(step).__name__}: ")
    assert said in found


def test_sizes_that_a_recipe_refuses_are_named_with_their_position():
    found = problems(v1.Compose([v1.Resize(300, max_size=200), v1.CenterCrop((1, -3)), v1.ToTensor()]))
    assert found[0].startswith("transforms[0] Resize: max_size=200 is not valid: it must be larger than size=300")
    assert found[1].startswith("transforms[1] CenterCrop: size=(1, -3) is not valid")


WRONG_ORDER = [
    ([v2.ColorJitter(0.4), v2.RandomResizedCrop(8), TENSOR], 1, "before ColorJitter"),
    ([v2.Grayscale(3), v2.Resize((8, 8)), TENSOR], 1, "before Grayscale"),
    ([v2.RandomGrayscale(), v2.CenterCrop(8), TENSOR], 1, "before RandomGrayscale"),
    ([TENSOR, v2.Normalize(MEAN, STD), v2.RandomResizedCrop(8)], 2, "before Normalize"),
    ([v2.CenterCrop(8), TENSOR, v2.Normalize(MEAN, STD), v2.ColorJitter(0.4)], 3, "before Normalize"),
    ([v2.CenterCrop(9), v2.Resize((8, 8)), TENSOR], 1, "before CenterCrop"),
    ([v2.Resize(9), v2.RandomResizedCrop(8), TENSOR], 1, "given once; Resize came before"),
    ([v2.CenterCrop(9), v2.CenterCrop(8), TENSOR], 1, "given once"),
    ([v2.CenterCrop(9), TENSOR, v2.Normalize(MEAN, STD), v2.Normalize(MEAN, STD)], 3, "given once"),
]


@pytest.mark.parametrize(("steps", "position", "said"), WRONG_ORDER)
def test_step_in_the_wrong_place_is_named_with_its_position(steps, position, said):
    found = the_problem(v2.Compose(steps))
    assert found.startswith(f"transforms[{position}] {type(steps[position]).__name__}: it must be {said}")


def test_position_of_a_moved_flip_stays_that_of_the_transform():
    steps = [v2.CenterCrop(8), TENSOR, v2.Normalize(MEAN, STD), v2.RandomHorizontalFlip(), v2.CenterCrop(4)]
    assert the_problem(v2.Compose(steps)).startswith("transforms[4] CenterCrop: it must be before Normalize")
    steps[3:] = [v2.Normalize(MEAN, STD), v2.RandomHorizontalFlip()]
    assert the_problem(v2.Compose(steps)).startswith("transforms[3] Normalize: it must be given once")


def test_exif_transpose_that_is_not_first_is_refused():
    for steps in ([v2.CenterCrop(8), ImageOps.exif_transpose, TENSOR], [TENSOR, v1.Lambda(ImageOps.exif_transpose)]):
        found = problems(v1.Compose(steps))
        assert found[0].startswith("transforms[1] ")
        assert "must be the first step: move it to the front" in found[0]


def test_images_of_different_sizes_are_refused():
    found = the_problem(v2.Compose([v2.Resize(256), v2.RandomHorizontalFlip(), TENSOR]))
    assert found.startswith("at the end: images have different sizes, which make no batch; add RandomResizedCrop")
    assert "different sizes" in problems(nn.Sequential())[-1]


def test_colour_on_both_sides_of_the_conversion_is_refused():
    found = the_problem(v2.Compose([v2.CenterCrop(8), v2.ColorJitter(0.4), TENSOR, v2.RandomGrayscale()]))
    assert "before the conversion to float (transforms[1] ColorJitter) and behind it (transforms[3] RandomGray" in found


def test_one_error_lists_every_problem_with_its_nested_position():
    transform = v2.Compose(
        [
            v2.Compose([v2.RandomPerspective(), v2.RandomResizedCrop(8, interpolation=InterpolationMode.NEAREST)]),
            nn.Sequential(v2.ToImage(), nn.Sequential(v2.Grayscale())),
            my_function,
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4),
            v2.CenterCrop(4),
            v2.FiveCrop(4),
        ]
    )
    found = problems(transform)
    assert [problem.split(":")[0] for problem in found] == [
        "transforms[0][0] RandomPerspective",
        "transforms[0][1] RandomResizedCrop",
        "transforms[1][1][0] Grayscale",
        "transforms[2] my_function",
        "transforms[6] FiveCrop",
        "transforms[5] CenterCrop",
    ]
    with pytest.raises(ConfigError) as caught:
        from_torchvision(transform)
    assert caught.value.message.startswith(
        "the transform cannot be converted to a recipe (6 to change):\n  transforms[0]"
    )
    assert "ColorJitter" in caught.value.allowed


def test_problem_hides_only_its_own_consequences():
    """Behind an unknown function nobody can tell what the image is; behind RandomPerspective it is still PIL."""
    assert len(problems(v2.Compose([v2.CenterCrop(8), my_function]))) == 1
    assert len(problems(v2.Compose([v2.CenterCrop(8), v2.RandomPerspective()]))) == 2


# What conversion leaves alone


def state_of(transform: object) -> object:
    return repr(transform), [
        (name, repr(value)) for module in v1_modules(transform) for name, value in sorted(vars(module).items())
    ]


def v1_modules(transform: object) -> list[object]:
    if isinstance(transform, v1.Compose | v2.Compose):
        return [transform, *itertools.chain.from_iterable(map(v1_modules, transform.transforms))]
    return [transform]


@BOTH
def test_conversion_changes_neither_the_transform_nor_torchs_generator(t):
    mean, size = [0.5, 0.5, 0.5], [64, 48]
    transform = t.Compose(
        [
            t.Compose([t.RandomResizedCrop(size), t.RandomHorizontalFlip()]),
            t.ColorJitter(0.4),
            t.PILToTensor(),
            t.ConvertImageDtype(torch.float32),
            t.Normalize(mean, [1, 1, 1], inplace=True),
        ]
    )
    before, generator = state_of(transform), torch.get_rng_state()
    from_torchvision(transform)
    assert state_of(transform) == before
    assert (mean, size) == ([0.5, 0.5, 0.5], [64, 48])
    assert torch.equal(torch.get_rng_state(), generator)


def test_transforms_are_never_called():
    def refuse(*_: object) -> None:
        raise AssertionError("called")

    step = v1.CenterCrop(8)
    step.forward = refuse
    assert from_torchvision(v1.Compose([step, v1.ToTensor()])).output_size == (8, 8)


def test_recipe_methods_lead_here():
    transform = v2.Compose([v2.CenterCrop(8), v1.ToTensor()])
    assert Recipe.from_torchvision(transform) == from_torchvision(transform)
    assert repr(Recipe.eval().to_torchvision()) == repr(to_torchvision(Recipe.eval()))


# The way back


def without_layout(recipe: Recipe) -> Recipe:
    values = {name: getattr(recipe, name) for name in ("steps", "precision", "exif")}
    return Recipe(**values, output=Output(dtype=recipe.output.dtype))


@given(recipes)
def test_round_trip_any_recipe_is_equal(recipe):
    assert from_torchvision(to_torchvision(recipe)) == without_layout(recipe)


@given(recipes)
def test_round_trip_survives_pickle_and_deepcopy(recipe):
    transform = to_torchvision(recipe)
    for same in (pickle.loads(pickle.dumps(transform)), copy.deepcopy(transform)):
        assert from_torchvision(same) == without_layout(recipe)


@settings(max_examples=40)
@given(recipes)
def test_to_torchvision_any_recipe_takes_pil_images_and_uint8_tensors(recipe):
    # torch 2.14 fails on resizing some contiguous uint8 images to 1 x 1 (UpSampleKernelAVXAntialias.h).
    assume(recipe.precision == "float32" or (plan_for(recipe, pil(6, 9)).resized > 1).any())
    transform = to_torchvision(recipe)
    for image in (pil(6, 9), PIL.Image.new("L", (9, 6)), PIL.Image.new("RGBA", (9, 6)), torch.zeros(3, 6, 9).byte()):
        out = transform(image)
        assert type(out) is torch.Tensor
        assert out.shape == (3, *recipe.output_size)
        assert str(out.dtype) == f"torch.{recipe.output.dtype}"


def test_to_torchvision_applies_exif_where_the_recipe_does():
    image = pil(6, 9)
    image.getexif()[0x0112] = 6  # turned by 90 degrees
    whole = Recipe(steps=(CenterCrop((9, 6)),))
    upright = to_torchvision(Recipe(steps=whole.steps, exif="apply"))(image)
    assert torch.equal(upright, F.to_dtype(F.pil_to_tensor(ImageOps.exif_transpose(image)), torch.float32, scale=True))
    assert not torch.equal(to_torchvision(whole)(image), upright)


def test_to_v2_of_no_step_is_an_error():
    with pytest.raises(TypeError, match="is no step of a recipe"):
        convert.to_v2("Normalize")


# The same meaning: torchvision's transform, and our plan applied by hand with torchvision's operators


def pil(height: int, width: int, seed: int = 0) -> PIL.Image.Image:
    return PIL.Image.fromarray(images.photo(height, width, seed))


def apply_by_hand(recipe: Recipe, plan: Plan, image: PIL.Image.Image) -> torch.Tensor:
    """Row 0 of a plan, as PARITY.md defines it."""
    if recipe.exif == "apply":
        image = ImageOps.exif_transpose(image)
    out = F.pil_to_tensor(image)
    if recipe.precision == "float32":
        out = F.to_dtype(out, torch.float32, scale=True)
    out = F.crop(out, *plan.box[0].tolist())
    out = F.resize(out, plan.resized[0].tolist(), InterpolationMode(recipe.interpolation), antialias=True)
    if recipe.precision == "float32" and recipe.interpolation == "bicubic":
        out = out.clamp(0, 1)
    out = F.crop(out, *plan.window[0].tolist(), *plan.size)
    if plan.flip[0, 0]:
        out = F.horizontal_flip(out)
    if plan.flip[0, 1]:
        out = F.vertical_flip(out)
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    for rows in plan.colour:
        if isinstance(rows, JitterRows):
            for operation in rows.order[0]:
                if rows.used[operation]:
                    out = adjust[operation](out, float(rows.factors[0, operation]))
        elif rows.apply[0]:
            out = F.rgb_to_grayscale(out, num_output_channels=3)
    out = F.normalize(
        F.to_dtype(out, torch.float32, scale=True), list(recipe.normalize.mean), list(recipe.normalize.std)
    )
    return out.to(getattr(torch, recipe.output.dtype))


def plan_for(recipe: Recipe, image: PIL.Image.Image, index: int = 0) -> Plan:
    turned = ImageOps.exif_transpose(image) if recipe.exif == "apply" else image
    return make_plan(recipe, seed=0, epoch=0, indices=[index], sizes=[(turned.height, turned.width)])


def levels_apart(recipe: Recipe, one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, in 1/255 before normalisation."""
    std = torch.tensor(recipe.normalize.std).view(3, 1, 1)
    return float(((one - other) * std * 255).abs().max())


def draw_from(transform: object, plan: Plan) -> object:
    """A copy of the transform whose random steps take their parameters from row 0 of a plan, one of a kind."""
    transform = copy.deepcopy(transform)
    top, left, height, width = plan.box[0].tolist()
    for step in transform.transforms:
        if isinstance(step, v1.RandomResizedCrop):
            step.get_params = lambda *_: (top, left, height, width)
        elif isinstance(step, v2.RandomResizedCrop):
            step.make_params = lambda _: {"top": top, "left": left, "height": height, "width": width}
        elif isinstance(step, v1.RandomHorizontalFlip | v2.RandomHorizontalFlip):
            step.p = float(plan.flip[0, 0])
        elif isinstance(step, v1.RandomVerticalFlip | v2.RandomVerticalFlip):
            step.p = float(plan.flip[0, 1])
        elif isinstance(step, v1.ColorJitter | v2.ColorJitter):
            order, factors = plan.colour[0].order[0].tolist(), plan.colour[0].factors[0].tolist()
            step.get_params = lambda *_, order=order, factors=factors: (order, *factors)
            names = ("brightness_factor", "contrast_factor", "saturation_factor", "hue_factor")
            params = {"fn_idx": order, **dict(zip(names, factors, strict=True))}
            step.make_params = lambda _, params=params: params
        elif isinstance(step, v1.RandomGrayscale | v2.RandomGrayscale):
            step.p = float(plan.colour[1].apply[0])
    return transform


def train_steps(t, conversion: list, place: int) -> object:
    """Everything random once, with the conversion at a place: 0 at the front, 3 behind colour."""
    steps = [
        [t.RandomResizedCrop(56), t.RandomHorizontalFlip(), t.RandomVerticalFlip()],
        [t.ColorJitter(0.4, 0.4, 0.4, 0.1), t.RandomGrayscale(0.5)],
    ]
    steps.insert(place, conversion)
    return t.Compose([*itertools.chain.from_iterable(steps), t.Normalize(MEAN, STD)])


IMAGES = [pil(120, 160, 1), pil(97, 64, 2), pil(40, 300, 3), pil(30, 31, 4), pil(200, 201, 5), pil(64, 64, 6)]


@BOTH
@pytest.mark.parametrize("conversion", [name for name in CONVERSIONS if "by type" not in name and "mixed" not in name])
def test_train_on_float_tensors_equals_the_transform_with_the_same_draws(t, conversion):
    transform = train_steps(t, CONVERSIONS[conversion](), 0)
    recipe = from_torchvision(transform)
    assert recipe.precision == "float32"
    assert recipe.notes == ()
    for index, image in enumerate(IMAGES):
        plan = plan_for(recipe, image, index)
        expected = draw_from(transform, plan)(image)
        found = apply_by_hand(recipe, plan, image)
        # ToTensor divides by 255, ToDtype multiplies by 1/255: a rounding apart.
        torch.testing.assert_close(found, expected.as_subclass(torch.Tensor), rtol=0, atol=1e-4)


@BOTH
def test_train_on_uint8_tensors_equals_the_transform_bit_for_bit(t):
    transform = t.Compose(
        [
            t.PILToTensor(),
            t.RandomResizedCrop(56),
            t.RandomHorizontalFlip(),
            t.ColorJitter(0.4, 0.4, 0.4, 0.1),
            t.RandomGrayscale(0.5),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    recipe = from_torchvision(transform)
    assert recipe.precision == "uint8"
    assert recipe.notes == (() if t is v2 else (notes.NOTE_V1_UINT8,))
    for index, image in enumerate(IMAGES):
        plan = plan_for(recipe, image, index)
        tolerance = 0 if t is v2 else 9
        assert levels_apart(recipe, apply_by_hand(recipe, plan, image), draw_from(transform, plan)(image)) <= tolerance


@BOTH
def test_train_on_pil_images_is_as_near_as_the_note_says(t):
    transform = train_steps(t, [v1.ToTensor()], 2)
    recipe = from_torchvision(transform)
    assert recipe.precision == "uint8"
    apart, bias = [], []
    for index, image in enumerate(IMAGES):
        plan = plan_for(recipe, image, index)
        found, expected = apply_by_hand(recipe, plan, image), draw_from(transform, plan)(image)
        apart.append(levels_apart(recipe, found, expected))
        bias.append(float((found - expected).mean()) * 0.225 * 255)
    assert max(apart) <= 20
    assert abs(np.mean(bias)) < 0.6


@BOTH
def test_train_without_colour_on_pil_images_is_within_one_level(t):
    transform = t.Compose([t.RandomResizedCrop(56), t.RandomHorizontalFlip(), v1.ToTensor(), t.Normalize(MEAN, STD)])
    recipe = from_torchvision(transform)
    assert recipe.notes == (notes.NOTE_UNROUNDED,)
    for index, image in enumerate(IMAGES):
        plan = plan_for(recipe, image, index)
        assert levels_apart(recipe, apply_by_hand(recipe, plan, image), draw_from(transform, plan)(image)) < 1.05


EVALS = [
    [v2.Resize(72), v2.CenterCrop(64)],
    [v2.Resize(50), v2.CenterCrop((64, 31))],  # padded
    [v2.Resize(72, max_size=80), v2.CenterCrop(64)],
    [v2.Resize((48, 56))],
    [v2.CenterCrop(101)],
    [v1.Resize(72), v1.CenterCrop(64)],
    [v1.Resize(50), v1.CenterCrop((65, 30))],
    [v1.CenterCrop((33, 150))],
]


@pytest.mark.parametrize("steps", EVALS, ids=str)
@pytest.mark.parametrize("kind", ["pil", "uint8", "float32"])
def test_eval_equals_the_transform_exactly_or_within_one_level(steps, kind):
    conversion = {
        "pil": [*steps, v1.ToTensor()],
        "uint8": [v2.PILToTensor(), *steps, TO_FLOAT],
        "float32": [v2.PILToTensor(), TO_FLOAT, *steps],
    }
    transform = v2.Compose([*conversion[kind], v2.Normalize(MEAN, STD)])
    recipe = from_torchvision(transform)
    for image in IMAGES:
        found = apply_by_hand(recipe, plan_for(recipe, image), image)
        resamples = isinstance(recipe.steps[0], Resize) and kind != "float32"
        assert levels_apart(recipe, found, transform(image)) <= (1.05 if resamples else 1e-4)


@pytest.mark.parametrize("name", ["ResNet50_Weights.IMAGENET1K_V2", "EfficientNet_B1_Weights.IMAGENET1K_V1"])
def test_preset_equals_the_recipe_within_the_note(name):
    preset = models.get_weight(name).transforms()
    recipe = from_torchvision(preset)
    for image in IMAGES[:3]:
        found, expected = apply_by_hand(recipe, plan_for(recipe, image), image), preset(image)
        assert levels_apart(recipe, found, expected) <= (1.05 if recipe.interpolation == "bilinear" else 18)


@given(recipes)
def test_to_torchvision_any_recipe_without_chance_equals_the_plan(recipe):
    certain = (Resize, CenterCrop, RandomHorizontalFlip, RandomVerticalFlip, Grayscale, Normalize)
    steps = tuple(step for step in recipe.steps if isinstance(step, certain))
    steps = tuple(type(s)(round(s.p)) if isinstance(s, RandomHorizontalFlip | RandomVerticalFlip) else s for s in steps)
    if fixed_size(steps) is None:  # a crop that was left out fixed it
        steps = (Resize((20, 30)), *(step for step in steps if not isinstance(step, Resize)))
    recipe = Recipe(steps=steps, precision=recipe.precision, exif=recipe.exif, output=Output(dtype=recipe.output.dtype))
    image = pil(23, 31)
    image.getexif()[0x0112] = 8
    assume(recipe.precision == "float32" or (plan_for(recipe, image).resized > 1).any())  # torch's bug: see above
    expected = to_torchvision(recipe)(image)
    found = apply_by_hand(recipe, plan_for(recipe, image), image)
    # A flip before a resize is applied behind it: the same sums, added up in another order. In uint8 a rounding more.
    if recipe.precision == "uint8":
        std = torch.tensor(recipe.normalize.std).view(3, 1, 1)
        assert float(((found.float() - expected.float()) * std * 255).abs().max()) <= 1.5
    else:
        torch.testing.assert_close(found, expected, rtol=2e-2 if recipe.output.dtype == "bfloat16" else 2e-3, atol=2e-3)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_to_torchvision_with_the_draws_of_a_plan_equals_the_plan_bit_for_bit(precision, interpolation):
    recipe = Recipe(
        steps=(
            RandomResizedCrop(40, interpolation=interpolation),
            RandomHorizontalFlip(),
            RandomVerticalFlip(),
            ColorJitter(*JITTER),
            RandomGrayscale(0.5),
            Normalize(),
        ),
        precision=precision,
    )
    transform = to_torchvision(recipe)
    for index, image in enumerate(IMAGES):
        plan = plan_for(recipe, image, index)
        assert torch.equal(draw_from(transform, plan)(image), apply_by_hand(recipe, plan, image))


def test_real_photos_without_colour_stay_within_one_level(photos_dir):
    transform = v1.Compose([v1.Resize(256), v1.CenterCrop(224), v1.ToTensor(), v1.Normalize(MEAN, STD)])
    recipe = from_torchvision(transform)
    paths = sorted(path for path in photos_dir.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))[::6]
    assert len(paths) > 10
    for path in paths:
        with PIL.Image.open(path) as file:
            image = file.convert("RGB")
        assert levels_apart(recipe, apply_by_hand(recipe, plan_for(recipe, image), image), transform(image)) < 1.05


# The rest of the training recipes


def read(*steps, **more) -> Recipe:
    return from_torchvision(v2.Compose([v2.CenterCrop((40, 48)), *steps]), **more)


EVERY_STEP = {
    "RandomCrop": (
        lambda t: t.RandomCrop((30, 32), (1, 2, 3, 4), fill=51),
        RandomCrop((30, 32), padding=(1, 2, 3, 4), fill=0.2),
    ),
    "RandomCrop pair": (
        lambda t: t.RandomCrop(30, [1, 2], padding_mode="edge"),
        RandomCrop(30, padding=(1, 2, 1, 2), padding_mode="edge"),
    ),
    "RandomCrop grown": (lambda t: t.RandomCrop(60, pad_if_needed=True), RandomCrop(60, pad_if_needed=True)),
    "GaussianBlur": (lambda t: t.GaussianBlur((3, 5), (0.2, 1.0)), GaussianBlur((5, 3), (0.2, 1.0))),
    "GaussianBlur fixed": (lambda t: t.GaussianBlur(3, 0.7), GaussianBlur(3, 0.7)),
    "RandomSolarize": (lambda t: t.RandomSolarize(192, 0.3), RandomSolarize(192 / 255, 0.3)),
    "RandomPosterize": (lambda t: t.RandomPosterize(3, 0.3), RandomPosterize(3, 0.3)),
    "RandomInvert": (lambda t: t.RandomInvert(0.3), RandomInvert(0.3)),
    "RandomAutocontrast": (lambda t: t.RandomAutocontrast(0.3), RandomAutocontrast(0.3)),
    "RandomEqualize": (lambda t: t.RandomEqualize(0.3), RandomEqualize(0.3)),
    "RandomAdjustSharpness": (lambda t: t.RandomAdjustSharpness(2, 0.3), RandomAdjustSharpness(2, 0.3)),
    "RandomRotation": (
        lambda t: t.RandomRotation((-3, 8), InterpolationMode.BILINEAR, center=(3, 4), fill=(0, 51, 255)),
        RandomRotation((-3, 8), interpolation="bilinear", center=(3, 4), fill=(0, 0.2, 1)),
    ),
    "RandomAffine": (
        lambda t: t.RandomAffine(9, (0.1, 0.2), (0.5, 2), (1, 2, 3, 4), 2, 51, center=(3, 4)),
        RandomAffine(
            9,
            translate=(0.1, 0.2),
            scale=(0.5, 2),
            shear=(1, 2, 3, 4),
            interpolation="bilinear",
            fill=0.2,
            center=(3, 4),
        ),
    ),
    "RandomAffine one shear": (lambda t: t.RandomAffine(0, shear=7), RandomAffine(0, shear=7)),
    "TrivialAugmentWide": (
        lambda t: t.TrivialAugmentWide(20, InterpolationMode.BILINEAR),
        TrivialAugmentWide(20, interpolation="bilinear"),
    ),
    "RandAugment": (lambda t: t.RandAugment(1, 5, 11, fill=[51]), RandAugment(1, 5, 11, fill=0.2)),
    "AutoAugment": (lambda t: t.AutoAugment(), AutoAugment()),
    "AutoAugment svhn": (lambda t: t.AutoAugment(v1.AutoAugmentPolicy.SVHN), AutoAugment("svhn")),
    "RandomApply": (
        lambda t: t.RandomApply([t.ColorJitter(0.4), t.GaussianBlur(3)], 0.8),
        RandomApply((ColorJitter(0.4), GaussianBlur(3)), 0.8),
    ),
    "RandomApply modules": (lambda t: t.RandomApply(nn.ModuleList([t.RandomInvert()])), RandomApply((RandomInvert(),))),
    "RandomChoice": (
        lambda t: t.RandomChoice(
            [t.RandomInvert(), t.Compose([t.RandomGrayscale(), t.RandomVerticalFlip()]), nn.Identity()],
            [0.25, 0.25, 0.5],
        ),
        RandomChoice(
            (RandomInvert(), RandomApply((RandomGrayscale(), RandomVerticalFlip()), 1.0), RandomHorizontalFlip(0.0)),
            (0.25, 0.25, 0.5),
        ),
    ),
    "RandomChoice alike": (
        lambda t: t.RandomChoice([t.RandomInvert(), t.RandomEqualize()]),
        RandomChoice((RandomInvert(), RandomEqualize())),
    ),
}


@BOTH
@pytest.mark.parametrize("kind", ["pil", "uint8"])
@pytest.mark.parametrize("name", EVERY_STEP)
def test_step_of_a_training_recipe_keeps_its_arguments(t, name, kind):
    make, expected = EVERY_STEP[name]
    conversion = [t.PILToTensor()] if kind == "uint8" else []
    first = [] if isinstance(expected, RandomCrop) else [t.CenterCrop((40, 48))]
    rest = [v2.ToImage(), TO_FLOAT]
    recipe = from_torchvision(v2.Compose([*conversion, *first, make(t), *rest]))
    assert recipe.steps[-1] == expected
    assert recipe.precision == ("float32" if isinstance(expected, RandomCrop) else "uint8")
    assert from_torchvision(to_torchvision(recipe)) == recipe


def test_operations_on_float_images_have_their_units_and_precision():
    recipe = read(v2.ToImage(), TO_FLOAT, v2.RandomSolarize(0.3), v2.RandomRotation(5, fill=0.5), v2.RandAugment())
    assert recipe.steps[1:] == (RandomSolarize(0.3), RandomRotation(5, fill=0.5), RandAugment())
    assert recipe.precision == "float32"
    assert recipe.notes == ()


def test_fill_by_type_is_that_of_the_image_there():
    fill = {PIL.Image.Image: 51, tv_tensors.Image: (102, 0, 0), torch.Tensor: 153, "others": 255}
    for conversion, expected in (([], 0.2), ([v2.ToImage()], (0.4, 0, 0)), ([v2.PILToTensor()], 0.6)):
        recipe = read(*conversion, v2.RandomRotation(5, fill=dict(fill)), v2.ToImage(), TO_FLOAT)
        assert recipe.steps[-1] == RandomRotation(5, fill=expected)
    others = {"others": None, torch.Tensor: 1}
    assert read(v2.RandomAffine(5, fill=others), v2.ToImage(), TO_FLOAT).steps[-1] == RandomAffine(5, fill=None)


def test_operations_on_pil_images_are_noted_with_figures():
    assert notes.NOTE_PIL_GEOMETRY in read(v2.RandomRotation(5), TENSOR).notes
    assert notes.NOTE_PIL_TONES in read(v2.RandomEqualize(), TENSOR).notes
    assert set(read(v1.TrivialAugmentWide(), TENSOR).notes) == {notes.NOTE_PIL_GEOMETRY, notes.NOTE_PIL_TONES}
    assert read(v2.ToImage(), v2.TrivialAugmentWide(), TO_FLOAT).notes == ()
    assert read(v2.ToImage(), v1.TrivialAugmentWide(), TO_FLOAT).notes == (notes.NOTE_V1_UINT8,)
    assert "0.8 %" in notes.NOTE_PIL_GEOMETRY
    assert "1 level" in notes.NOTE_PIL_TONES


@pytest.mark.parametrize(
    "step",
    [v2.RandomPosterize(4, 1.0), v2.RandomSolarize(99, 1.0), v2.RandomInvert(1.0), v2.RandomEqualize(1.0),
     v2.RandomAutocontrast(1.0), v2.RandomAdjustSharpness(2, 1.0), v2.GaussianBlur(5, 1.0)],
    ids=lambda step: type(step).__name__,
)  # fmt: skip
def test_tones_on_pil_images_are_as_near_as_the_note_says(step):
    for image in IMAGES:
        on_pil = F.pil_to_tensor(step(image)).int()
        on_uint8 = step(F.pil_to_tensor(image)).int()
        assert int((on_pil - on_uint8).abs().max()) <= (1 if isinstance(step, v2.RandomAutocontrast) else 0)


REFUSED_IN_RECIPES = [
    (v2.RandomRotation(5, expand=True), "expand=True, which changes the size, is not supported; use expand=False"),
    (v2.RandomRotation(5, InterpolationMode.BICUBIC), "use InterpolationMode.NEAREST or BILINEAR"),
    (v2.RandomAffine(5, interpolation=InterpolationMode.NEAREST_EXACT), "use InterpolationMode.NEAREST or BILINEAR"),
    (v2.RandAugment(interpolation=3), "use InterpolationMode.NEAREST or BILINEAR"),
    (v2.RandAugment(magnitude=31), "magnitude=31 is not valid"),
    (v2.RandomSolarize(300), "threshold="),
    (v2.RandomRotation(5, fill=(1, 2)), "fill="),
    (v2.RandomApply([v2.ToImage()]), "it turns some images from pil into uint8"),
    (v2.RandomApply([my_function]), "what a function does cannot be read"),
    (v2.RandomChoice([v2.RandomInvert(), Cutout()]), "is no transform of torchvision"),
    (v2.RandomErasing(), "it is supported on tensors only"),
]


@pytest.mark.parametrize(("step", "said"), REFUSED_IN_RECIPES, ids=lambda value: type(value).__name__)
def test_argument_of_an_operation_that_is_not_supported_is_named_with_a_remedy(step, said):
    found = the_problem(v2.Compose([v2.CenterCrop(40), step, TENSOR]))
    assert found.startswith("transforms[1]")
    assert said in found


def test_operation_before_the_crop_is_refused_by_its_place():
    found = the_problem(v2.Compose([v2.RandomRotation(5), v2.RandomResizedCrop(8), TENSOR]))
    assert found.startswith("transforms[1] RandomResizedCrop: it must be before RandomRotation")


def test_operation_on_floats_that_v1_refuses_is_refused():
    for step in (v1.RandomPosterize(4), v1.RandomEqualize(), v1.AutoAugment(), v1.RandAugment()):
        assert "torchvision refuses it on float32" in the_problem(v2.Compose([v2.CenterCrop(8), TENSOR, step]))


def test_kernel_beyond_the_image_is_refused():
    with pytest.raises(ConfigError, match="less than twice as large as the image"):
        read(v2.GaussianBlur(99), TENSOR)


# RandomErasing

NORMALIZE = v2.Normalize(MEAN, STD)


@BOTH
@pytest.mark.parametrize(
    ("value", "expected"), [(0, 0.0), (0.5, 0.5), ((0.1, 0.2, 0.3), (0.1, 0.2, 0.3)), ("random", "pixels")]
)
def test_erasing_behind_normalize_is_read(t, value, expected):
    erasing = t.RandomErasing(0.3, (0.1, 0.2), (0.4, 2.0), value=value)
    recipe = read(TENSOR, NORMALIZE, erasing)
    assert recipe.steps[-1] == RandomErasing(0.3, scale=(0.1, 0.2), ratio=(0.4, 2.0), value=expected)
    assert recipe.notes == ()
    assert read(TENSOR, erasing).steps[-1] == recipe.steps[-1]


@pytest.mark.parametrize("kind", ["uint8", "float32"])
def test_erasing_before_normalize_gets_the_value_that_normalize_makes(kind):
    levels = 255 if kind == "uint8" else 1
    erasing = v2.RandomErasing(1.0, value=[level * levels for level in (0.2, 0.4, 1.0)])
    conversion = [v2.ToImage(), erasing, TO_FLOAT] if kind == "uint8" else [v2.ToImage(), TO_FLOAT, erasing]
    transform = v2.Compose([v2.CenterCrop((40, 48)), *conversion, NORMALIZE])
    recipe = from_torchvision(transform)
    assert recipe.notes == (notes.NOTE_ERASING_MOVED,)
    image = IMAGES[0]
    plan = plan_for(recipe, image)
    top, left, height, width = plan.erasing[0].box[0].tolist()
    v = torch.tensor(erasing.value)[:, None, None]
    erasing.make_params = lambda _: {"i": top, "j": left, "h": height, "w": width, "v": v}
    found = apply_by_hand(recipe, plan, image)
    erase(found, plan.erasing[0], 0)
    torch.testing.assert_close(found, transform(image).as_subclass(torch.Tensor), rtol=1e-6, atol=1e-6)


def test_random_erasing_before_normalize_is_refused():
    found = the_problem(v2.Compose([v2.CenterCrop(8), TENSOR, v2.RandomErasing(value="random"), NORMALIZE]))
    assert "transforms[2] RandomErasing before it draws random values" in found


def test_flip_behind_erasing_is_moved_before_it_with_a_note():
    recipe = read(TENSOR, NORMALIZE, v2.RandomErasing(), v2.RandomHorizontalFlip())
    assert [type(step).__name__ for step in recipe.steps[1:]] == ["RandomHorizontalFlip", "Normalize", "RandomErasing"]
    assert recipe.notes == (notes.NOTE_FLIP_BEFORE_ERASING,)


def test_step_behind_erasing_is_refused():
    found = the_problem(v2.Compose([v2.CenterCrop(8), TENSOR, v2.RandomErasing(), v2.ColorJitter(0.4), NORMALIZE]))
    assert found.startswith("transforms[3] ColorJitter: it stands behind RandomErasing")


def test_erasing_by_channel_survives_the_way_back():
    recipe = Recipe(steps=(CENTER, Normalize(), RandomErasing(1.0, value="channels", scale=(0.2, 0.3))))
    transform = to_torchvision(recipe)
    assert from_torchvision(transform) == recipe
    out = transform(PIL.Image.new("RGB", (40, 40)))
    assert len(out[0].unique()) == 2, "the image and one value"


# The tail


class Mine:
    def __call__(self, image):
        return image


def test_tail_begins_with_the_first_step_that_cannot_be_converted(caplog):
    recipe = read(v2.RandomHorizontalFlip(), Mine(), v2.RandomInvert(), TENSOR, NORMALIZE, unsupported="tail")
    assert recipe.steps == (CenterCrop((40, 48)), RandomHorizontalFlip())
    assert recipe.precision == "uint8"
    (function,) = recipe.functions
    assert [type(step).__name__ for step in function.fn.transforms] == ["Mine", "RandomInvert", "ToTensor", "Normalize"]
    assert function.fn.image == "pil"
    assert f"{__name__}.Mine, RandomInvert(p=0.5)" in function.name
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "4 transforms cannot be converted" in caplog.text


@pytest.mark.parametrize(
    ("steps", "image", "tv_image", "precision"),
    [
        ([v2.ToImage(), Mine(), TO_FLOAT], "uint8", True, "uint8"),
        ([v2.PILToTensor(), Mine(), TO_FLOAT], "uint8", False, "uint8"),
        ([TENSOR, Mine()], "float32", False, "float32"),
        ([v2.ColorJitter(0.4), TENSOR, NORMALIZE, Mine()], "float32", False, "uint8"),
        ([v2.ToImage(), TO_FLOAT, v2.RandomInvert(), v2.RandomPerspective()], "float32", True, "float32"),
        ([v2.ToImage(), v2.ToDtype(torch.float16, scale=True), Mine()], "float16", True, "float32"),
        # What has a place of its own or arguments that cannot be converted, and precisions that are mixed.
        ([v2.RandomInvert(), v2.CenterCrop((40, 48)), TENSOR], "pil", False, "uint8"),
        ([v2.RandomRotation(5, InterpolationMode.BICUBIC), TENSOR], "pil", False, "uint8"),
        ([v2.RandomInvert(), TENSOR, v2.RandomInvert()], "float32", False, "uint8"),
        # Erasing that no Normalize of the recipe follows.
        ([TENSOR, v2.RandomErasing(value="random"), NORMALIZE], "float32", False, "float32"),
        ([v2.PILToTensor(), v2.RandomErasing(value=51), Mine(), TO_FLOAT], "uint8", False, "uint8"),
    ],
)
def test_tail_finds_the_image_that_it_was_written_for(steps, image, tv_image, precision):
    recipe = read(*steps, unsupported="tail")
    tail = recipe.functions[0].fn
    assert (tail.image, tail.tv_image, recipe.precision) == (image, tv_image, precision)
    assert from_torchvision(to_torchvision(recipe)) == recipe


def test_tail_without_chance_equals_the_transform():
    transform = v2.Compose([v2.CenterCrop((40, 48)), v2.Lambda(ImageOps.mirror), TENSOR, NORMALIZE])
    recipe = from_torchvision(transform, unsupported="tail")
    image = IMAGES[0]
    pixels = F.to_dtype(F.pil_to_tensor(F.center_crop(image, [40, 48])), torch.float32, scale=True)
    assert torch.equal(recipe.functions[0].fn(pixels), transform(image))


def test_tail_needs_images_of_one_size():
    found = problems(v2.Compose([v2.Resize(40), Mine(), v2.CenterCrop(32), TENSOR]))
    with pytest.raises(ConfigError) as caught:
        from_torchvision(v2.Compose([v2.Resize(40), Mine(), v2.CenterCrop(32), TENSOR]), unsupported="tail")
    assert caught.value.value == found


@pytest.mark.parametrize("steps", [(NORMALIZE,), (Mine(), NORMALIZE)])
def test_mixing_is_no_part_of_a_tail_which_sees_one_image(steps):
    with pytest.raises(ConfigError, match=r"MixUp: not supported; it works on batches"):
        read(TENSOR, *steps, v2.MixUp(num_classes=3), unsupported="tail")


def test_without_anything_unsupported_there_is_no_tail(caplog):
    assert read(v2.RandomInvert(), TENSOR, unsupported="tail") == read(v2.RandomInvert(), TENSOR)
    assert not caplog.records


def test_unsupported_that_is_unknown_is_refused():
    with pytest.raises(ConfigError, match="unsupported='skip' is not valid: it must be 'error' or 'tail'"):
        read(TENSOR, unsupported="skip")


def test_functions_and_mixing_have_no_way_back():
    for recipe, said in (
        (Recipe.eval().then(abs), r"functions of its own \(builtins.abs\)"),
        (Recipe.eval().then(abs, per="sample"), "functions of its own"),
        (Recipe(steps=(CENTER,), mix=MixUp(0.2)), "mix, which works on batches"),
    ):
        with pytest.raises(ConfigError, match=said):
            to_torchvision(recipe)


# timm


def timm_transform(**more) -> object:
    data = pytest.importorskip("timm.data")
    return data.create_transform(224, **more)


def test_timm_eval_transform_is_read():
    recipe = from_torchvision(timm_transform(interpolation="bicubic", crop_pct=0.95))
    assert recipe.steps[:2] == (Resize(235, interpolation="bicubic"), CenterCrop(224))
    np.testing.assert_allclose(recipe.normalize.mean, MEAN, rtol=1e-6)
    squashed = from_torchvision(timm_transform(crop_mode="squash"))
    assert squashed.steps[:2] == (Resize((256, 256)), CenterCrop(224))


def test_timm_train_transform_is_read():
    recipe = from_torchvision(
        timm_transform(
            is_training=True, interpolation="bicubic", vflip=0.1, color_jitter=(0.1, 0.2, 0.3), color_jitter_prob=0.8,
            grayscale_prob=0.2, gaussian_blur_prob=0.5, re_prob=0.25, re_mode="pixel",
        )
    )  # fmt: skip
    assert recipe.steps[:6] == (
        RandomResizedCrop(224, interpolation="bicubic"),
        RandomHorizontalFlip(),
        RandomVerticalFlip(0.1),
        RandomApply((ColorJitter(0.1, 0.2, 0.3),), 0.8),
        RandomGrayscale(0.2),
        RandomApply((GaussianBlur(23),), 0.5),
    )
    erasing = recipe.erasing_steps[0]
    assert (erasing.p, erasing.scale, erasing.value) == (0.25, (0.02, 1 / 3), "pixels")
    np.testing.assert_allclose(erasing.ratio, (0.3, 1 / 0.3))
    assert recipe.precision == "uint8"


@pytest.mark.parametrize(("mode", "value"), [("const", (0.0, 0.0, 0.0)), ("rand", "channels"), ("pixel", "pixels")])
def test_timm_erasing_modes_are_read(mode, value):
    recipe = from_torchvision(timm_transform(is_training=True, re_prob=0.5, re_mode=mode, color_jitter=None))
    assert recipe.erasing_steps[0].value == value
    assert recipe.precision == "float32"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"is_training": True, "interpolation": "random"}, 'interpolation="bicubic"'),
        ({"is_training": True, "re_prob": 0.1, "re_count": 3}, "use re_count=1"),
        ({"is_training": True, "auto_augment": "rand-m9-mstd0.5"}, "draw from Python's random"),
        ({"is_training": True, "auto_augment": "augmix-m5"}, "draw from Python's random"),
        ({"is_training": True, "train_crop_mode": "rkrc"}, "rounds the longer side"),
        ({"crop_mode": "border"}, "rounds the longer side"),
        ({"crop_mode": "border"}, "is not supported; use black"),
        ({"use_prefetcher": True}, "still uint8 tensors"),
    ],
)
def test_timm_option_that_is_not_supported_is_named_with_a_remedy(more, said):
    assert any(said in problem for problem in problems(timm_transform(**more)))


def test_timm_augmentation_runs_as_a_tail():
    transform = timm_transform(is_training=True, interpolation="bicubic", auto_augment="rand-m9-mstd0.5")
    recipe = from_torchvision(transform, unsupported="tail")
    assert [type(step).__name__ for step in recipe.steps] == ["RandomResizedCrop", "RandomHorizontalFlip"]
    out = recipe.functions[0].fn(torch.rand(3, 224, 224))
    assert out.shape == (3, 224, 224)
