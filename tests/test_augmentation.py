"""Operations of the plan against torchvision's own transforms: their pixels, given the plan's draws, and their draws.

What is random in a transform is replaced by the plan's row (of automatic augmentation, by the plan's numbers), and the
transform does the rest: so what the parameters mean is compared, not a call of ours.
"""

import collections
import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from gpupipe import augmentation
from gpupipe.backends import torchvision_cpu
from gpupipe.backends.erasing import erase
from gpupipe.convert import to_v2
from gpupipe.errors import ConfigError
from gpupipe.plan import make_plan
from gpupipe.recipe import Recipe
from gpupipe.records import JitterRows, Operation, OperationRows, Plan
from gpupipe.steps import (
    AutoAugment,
    CenterCrop,
    ColorJitter,
    GaussianBlur,
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
from gpupipe.steps.base import Step
from tests import images

SIZE = (37, 52)
PIXELS = images.photo(*SIZE, 3)
PRECISIONS = pytest.mark.parametrize("precision", ["uint8", "float32"])
# Each comparison of distributions must hold; seeds are fixed, so it either always passes or never.
LEAST_P = 1e-4


def plan_of(*steps: Step, n: int = 1, size=SIZE, seed: int = 0, crop: Step | None = None) -> Plan:
    recipe = Recipe(steps=(crop or CenterCrop(size), *steps))
    return make_plan(recipe, seed=seed, epoch=0, indices=np.arange(n), sizes=[size] * n)


def applied(step: Step, plan: Plan, row: int, precision: str) -> torch.Tensor:
    """By the reference backend, in the units of that precision."""
    recipe = Recipe(steps=(CenterCrop(SIZE), step), precision=precision)
    made = torchvision_cpu.apply_row(PIXELS, plan, row, recipe)
    return made.mul(255).round().to(torch.uint8) if precision == "uint8" else made


def image_of(precision: str) -> torch.Tensor:
    image = tv_tensors.Image(torch.from_numpy(PIXELS).permute(2, 0, 1).contiguous())
    return image if precision == "uint8" else F.to_dtype(image, torch.float32, scale=True)


def levels(precision: str) -> int:
    return 255 if precision == "uint8" else 1


# The pixels of the steps that are one operation


def parameters(rows: OperationRows, row: int) -> dict[str, object]:
    """What `make_params` of torchvision's transform would have returned."""
    values = rows.parameters[row].tolist()
    match Operation(rows.operation[row]):
        case Operation.BLUR:
            return {"sigma": [values[0]] * 2}
        case Operation.ROTATE:
            return {"angle": values[0]}
        case Operation.AFFINE:
            angle, right, down, scale, shear_x, shear_y, *_ = values
            return {
                "angle": angle,
                "translate": (int(right), int(down)),
                "scale": scale,
                "shear": (shear_x, shear_y),
            }
    return {}


FILLS = (0.0, None, (16 / 255, 1.0, 0.5))
MOVING = [
    make(interpolation=mode, fill=fill, center=center)
    for mode, fill in itertools.product(("nearest", "bilinear"), FILLS)
    for center in (None, (3.0, 11.5))
    for make in (
        lambda **more: RandomRotation((-170, 170), **more),
        lambda **more: RandomAffine(60, translate=(0.3, 0.2), scale=(0.6, 1.7), shear=(-20, 20, -15, 30), **more),
    )
]
ONE_OPERATION = [
    *MOVING,
    RandomAffine((10, 20)),
    RandomAffine(0, translate=(0.5, 0.5)),
    RandomAffine(0, shear=30, interpolation="bilinear"),
    GaussianBlur((3, 9)),
    GaussianBlur(5, (0.3, 4.0)),
    GaussianBlur(1, 2.0),
    RandomInvert(1.0),
    RandomAutocontrast(1.0),
    RandomEqualize(1.0),
    *[RandomSolarize(threshold / 255, 1.0) for threshold in (0, 1, 77, 128, 192, 254, 255)],
    *[RandomPosterize(bits, 1.0) for bits in range(9)],
    *[RandomAdjustSharpness(factor, 1.0) for factor in (0.0, 0.3, 1.0, 2.0, 7.5)],
]


@PRECISIONS
@pytest.mark.parametrize("step", ONE_OPERATION, ids=str)
def test_operation_equals_torchvisions_transform_bit_for_bit(step, precision):
    plan = plan_of(step, n=4)
    transform = to_v2(step, levels=levels(precision))
    image = image_of(precision)
    (rows,) = plan.operations
    for row in range(len(plan)):
        expected = transform.transform(image, parameters(rows, row))
        assert torch.equal(applied(step, plan, row, precision), expected.as_subclass(torch.Tensor))


@pytest.mark.parametrize("step", [RandomSolarize(128 / 255, 1.0), RandomSolarize(0.5, 1.0)], ids=str)
def test_solarize_inverts_at_the_threshold_itself(step):
    ramp = np.broadcast_to(np.arange(256, dtype=np.uint8)[None, :, None], (2, 256, 3)).copy()
    plan = plan_of(step, size=(2, 256))
    recipe = Recipe(steps=(CenterCrop((2, 256)), step), precision="uint8")
    found = torchvision_cpu.apply_row(ramp, plan, 0, recipe).mul(255).round().int()[0, 0].numpy()
    expected = np.where(np.arange(256) >= 128, 255 - np.arange(256), np.arange(256))
    np.testing.assert_array_equal(found, expected)


def test_fill_of_uint8_images_is_the_level_given():
    step = RandomAffine(0, translate=(1.0, 1.0), fill=[level / 255 for level in (41, 83, 200)])
    plan = plan_of(step, n=20)
    row = int(np.abs(plan.operations[0].parameters[:, 1:3]).min(axis=1).argmax())
    found = applied(step, plan, row, "uint8")
    outside = [found[:, top, left].tolist() for top in (0, -1) for left in (0, -1)]
    assert [41, 83, 200] in outside


# The pixels of automatic augmentation


POLICIES = [
    kind(*more, interpolation=mode, fill=fill)
    for mode, fill in (("nearest", None), ("bilinear", None), ("bilinear", (1.0, 0.0, 16 / 255)))
    for kind, *more in (
        (TrivialAugmentWide,),
        (RandAugment, 2, 9),
        (RandAugment, 1, 30),
        (AutoAugment, "imagenet"),
        (AutoAugment, "cifar10"),
        (AutoAugment, "svhn"),
    )
]


def replayed(step: Step, numbers: list[float], image: torch.Tensor, precision: str) -> torch.Tensor:
    """torchvision's own `forward`, with its draws taken from a list of numbers in [0, 1).

    `torch.randint(n, ())` is floor(u * n) and `torch.rand(())` is u: this is where the plan's numbers enter, in the
    order in which torchvision asks for them.
    """
    queue = collections.deque(numbers)

    def randint(high: int, size: tuple[()]) -> torch.Tensor:
        assert size == ()
        return torch.tensor(int(queue.popleft() * high))

    def rand(size: tuple[()]) -> torch.Tensor:
        assert size == ()
        return torch.tensor(queue.popleft(), dtype=torch.float64)

    transform = to_v2(step, levels=levels(precision))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randint", randint)
        patch.setattr(torch, "rand", rand)
        return transform(image).as_subclass(torch.Tensor)


def asked_for(step: Step, numbers: np.ndarray) -> list[float]:
    """The plan's numbers (blocks, 4) in torchvision's order, those left out that torchvision does not ask for."""
    names = list(to_v2(step)._AUGMENTATION_SPACE.items())
    found: list[float] = []

    def magnitude(name: str, bin_number: float | None, sign: float) -> None:
        values, signed = dict(names)[name]
        if values(10, *SIZE) is None:
            return
        found.extend([] if bin_number is None else [bin_number])
        found.extend([sign] if signed else [])

    match step:
        case TrivialAugmentWide():
            which, strong, sign, _ = numbers[0]
            found.append(which)
            magnitude(names[int(which * len(names))][0], strong, sign)
        case RandAugment():
            for which, _, sign, _ in numbers:
                found.append(which)
                magnitude(names[int(which * len(names))][0], None, sign)
        case AutoAugment():
            (policy, first_chance, first_sign, _), (second_chance, second_sign, _, _) = numbers
            pairs = to_v2(step)._policies
            found.append(policy)
            chances = ((first_chance, first_sign), (second_chance, second_sign))
            for (name, p, _), (chance, sign) in zip(pairs[int(policy * len(pairs))], chances, strict=True):
                found.append(chance)
                if chance <= p:
                    magnitude(name, None, sign)
    return found


@PRECISIONS
@pytest.mark.parametrize("step", POLICIES, ids=str)
def test_policy_equals_torchvisions_forward_with_the_plans_numbers_bit_for_bit(step, precision):
    from gpupipe.plan import draw, resolve

    n = 30
    recipe = Recipe(steps=(CenterCrop(SIZE), step), precision=precision)
    draws = draw(recipe, seed=1, epoch=0, indices=np.arange(n))
    plan = resolve(recipe, draws, [SIZE] * n)
    image = image_of(precision)
    for row in range(n):
        numbers = asked_for(step, draws.uniforms[:, :, row])
        expected = replayed(step, numbers, image, precision)
        assert torch.equal(applied(step, plan, row, precision), expected), (row, plan.operations)


def test_policies_use_every_operation_that_torchvision_has():
    seen = set()
    for step in (TrivialAugmentWide(), RandAugment(), AutoAugment(), AutoAugment("cifar10"), AutoAugment("svhn")):
        for rows in plan_of(step, n=2000).operations:
            seen |= set(rows.operation.tolist())
    not_drawn = {Operation.BLUR, Operation.HORIZONTAL_FLIP, Operation.VERTICAL_FLIP, Operation.BORDER}
    assert {Operation(number) for number in seen} == set(Operation) - not_drawn


@pytest.mark.parametrize("policy", ["imagenet", "cifar10", "svhn"])
def test_policy_tables_are_torchvisions(policy):
    names, probabilities, levels_of = augmentation.AUTO_AUGMENT_POLICIES[policy]
    expected = v2.AutoAugment(v2.AutoAugmentPolicy(policy))._policies
    for row, pair in enumerate(expected):
        for place, (name, probability, level) in enumerate(pair):
            assert augmentation._NAMES[names[row, place]] == name
            assert probabilities[row, place] == probability
            assert levels_of[row, place] == (level or 0)
    assert len(expected) == len(names)


@pytest.mark.parametrize("bins", [2, 10, 31, 32])
@pytest.mark.parametrize("size", [(224, 224), (37, 52), (1, 600)])
def test_magnitudes_are_torchvisions_to_the_last_bit(bins, size):
    for wide, kind in ((True, v2.TrivialAugmentWide), (False, v2.RandAugment), (False, v2.AutoAugment)):
        for name, (values, _) in kind._AUGMENTATION_SPACE.items():
            expected = values(bins, *size)
            found = augmentation._magnitudes(name, bins, size, wide=wide)
            if expected is None:
                assert found is None
            else:
                np.testing.assert_array_equal(found, expected.double().numpy(), err_msg=name)


# Erasing


def test_erasing_equals_torchvisions_transform_bit_for_bit():
    for value in (0.0, (0.1, -0.2, 3.0)):
        step = RandomErasing(1.0, value=value)
        plan = plan_of(Normalize(), step, n=30)
        (rows,) = plan.erasing
        assert (rows.box[:, 2] > 0).all()
        transform = to_v2(step)
        image = F.normalize(image_of("float32"), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
        for row in range(30):
            top, left, height, width = rows.box[row].tolist()
            v = torch.tensor(transform.value)[:, None, None]
            expected = transform.transform(image, {"i": top, "j": left, "h": height, "w": width, "v": v})
            found = image.as_subclass(torch.Tensor).clone()
            erase(found, rows, row)
            assert torch.equal(found, expected.as_subclass(torch.Tensor))


@pytest.mark.parametrize("value", ["pixels", "channels"])
def test_erasing_draws_standard_normal_values(value):
    plan = plan_of(RandomErasing(1.0, value=value, scale=(0.2, 0.3)), n=400)
    (rows,) = plan.erasing
    drawn = []
    for row in range(400):
        image = torch.full((3, *SIZE), math.inf)
        erase(image, rows, row)
        top, left, height, width = rows.box[row].tolist()
        box = image[:, top : top + height, left : left + width]
        assert torch.isfinite(box).all()
        assert torch.isinf(image).sum() == image.numel() - box.numel()
        if value == "channels":
            assert (box == box[:, :1, :1]).all()
            drawn.append(box[:, 0, 0])
        else:
            drawn.append(box.flatten()[:50])
    assert stats.kstest(torch.cat(drawn).numpy(), "norm").pvalue > LEAST_P


# Distributions


@pytest.fixture
def torch_seed():
    """torch's global generator with a seed of its own for one test."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4321)
        yield


def torchvision_draws(step: Step, n: int) -> list[dict[str, object]]:
    transform, image = to_v2(step), image_of("uint8")
    return [transform.make_params([image]) for _ in range(n)]


def assert_like(found: np.ndarray, expected: np.ndarray) -> None:
    assert stats.ks_2samp(found, expected).pvalue > LEAST_P


@pytest.mark.usefixtures("torch_seed")
def test_blur_and_rotation_draw_as_torchvision_does():
    n = 3000
    blur, turn = GaussianBlur(3, (0.2, 1.9)), RandomRotation((-20, 70))
    assert_like(plan_of(blur, n=n).operations[0].parameters[:, 0],
                np.array([drawn["sigma"][0] for drawn in torchvision_draws(blur, n)]))  # fmt: skip
    assert_like(plan_of(turn, n=n).operations[0].parameters[:, 0],
                np.array([drawn["angle"] for drawn in torchvision_draws(turn, n)]))  # fmt: skip


@pytest.mark.usefixtures("torch_seed")
def test_affine_draws_as_torchvision_does():
    step, n = RandomAffine((-20, 70), translate=(0.3, 0.1), scale=(0.5, 1.2), shear=(-5, 20, -9, 1)), 3000
    found = plan_of(step, n=n).operations[0].parameters
    drawn = torchvision_draws(step, n)
    expected = np.array([[d["angle"], *d["translate"], d["scale"], *d["shear"]] for d in drawn])
    for column in range(6):
        assert_like(found[:, column], expected[:, column])
    correlation = np.corrcoef(found[:, :6].T) - np.eye(6)
    assert np.abs(correlation).max() < 0.08


@pytest.mark.usefixtures("torch_seed")
@pytest.mark.parametrize("step", [RandomErasing(1.0), RandomErasing(1.0, scale=(0.3, 1.0), ratio=(0.3, 5.0))], ids=str)
def test_erasing_draws_as_torchvision_does(step):
    n = 3000
    found = plan_of(step, n=n).erasing[0].box
    drawn = [d for d in torchvision_draws(step, n) if d["v"] is not None]
    erased = found[found[:, 2] > 0]
    assert abs(len(erased) - len(drawn)) <= 4 * math.sqrt(n) / 2  # boxes that fit
    expected = np.array([[d["i"], d["j"], d["h"], d["w"]] for d in drawn])
    for column in range(4):
        assert_like(erased[:, column], expected[:, column])


def shares(values: list[object], of: list[object]) -> list[int]:
    counts = collections.Counter(values)
    assert set(counts) <= set(of)
    return [counts[value] for value in of]


def assert_counts_alike(one: list[int], other: list[int]) -> None:
    table = np.array([one, other])
    assert stats.chi2_contingency(table[:, table.sum(axis=0) > 0]).pvalue > LEAST_P


@pytest.mark.usefixtures("torch_seed")
@pytest.mark.parametrize(
    "step",
    [TrivialAugmentWide(7), RandAugment(2, 5), AutoAugment(), AutoAugment("cifar10"), AutoAugment("svhn")],
    ids=str,
)
def test_policy_draws_as_torchvision_does(step, monkeypatch):
    """Which operations with which strength, one after another: the sequences are counted."""
    n = 4000
    transform, image = to_v2(step), image_of("uint8")
    expected: list[tuple] = []

    def note(_self, image, name, magnitude, **_):
        expected[-1] += (kind_and_strength(name, magnitude),) if name != "Identity" else ()
        return image

    monkeypatch.setattr(v2.AutoAugment.__mro__[1], "_apply_image_or_video_transform", note)
    for _ in range(n):
        expected.append(())
        transform(image)
    found = [()] * n
    for rows in plan_of(step, n=n, seed=5).operations:
        for row, (number, values) in enumerate(zip(rows.operation.tolist(), rows.parameters.tolist(), strict=True)):
            found[row] += ((Operation(number), round(values[0] - (Operation(number) in FACTORS), 4)),) if number else ()
    sequences = sorted({tuple(kind for kind, _ in row) for row in (*expected, *found)})
    assert_counts_alike(
        *[shares([tuple(kind for kind, _ in row) for row in rows], sequences) for rows in (found, expected)]
    )
    strengths = sorted({one for row in (*expected, *found) for one in row})
    assert_counts_alike(*[shares([one for row in rows for one in row], strengths) for rows in (found, expected)])


FACTORS = (Operation.BRIGHTNESS, Operation.CONTRAST, Operation.SATURATION, Operation.SHARPNESS)


def kind_and_strength(name: str, magnitude: float) -> tuple[Operation, float]:
    """As the plan has it; shears and shifts are affine maps, whose first parameter is an angle of 0."""
    operation = augmentation._ACTIONS[name]
    return operation, 0.0 if operation is Operation.AFFINE else round(magnitude, 4) + 0.0


# Crops with borders


BORDERS = [
    ("constant", (3, 1, 4, 2), (16 / 255, 1.0, 0.5)),
    ("constant", (3, 1, 4, 2), 0.0),
    ("constant", (0, 0, 9, 0), 0.2),
    ("edge", (3, 1, 4, 2), 0.0),
    ("reflect", (7, 6, 5, 7), 0.0),
    ("symmetric", (7, 6, 5, 7), 0.0),
]


@PRECISIONS
@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(("mode", "padding", "fill"), BORDERS)
def test_crop_with_border_equals_torchvisions_pad_and_crop_bit_for_bit(mode, padding, fill, before, behind, precision):
    step = RandomCrop((30, 44), padding=padding, padding_mode=mode, fill=fill)
    flip = (RandomHorizontalFlip(1.0),)
    recipe = Recipe(steps=(*flip * before, step, *flip * behind), precision=precision)
    plan = make_plan(recipe, seed=0, epoch=0, indices=np.arange(20), sizes=[SIZE] * 20)
    transform, image = to_v2(step, levels=levels(precision)), image_of(precision)
    image = F.horizontal_flip(image) if before else image
    corners = set()
    for row in range(20):
        top, left = plan.window[row].tolist()
        left = SIZE[1] - left - 44 if before else left  # windows are counted in the image as it was
        corner = {"top": top + padding[1], "left": left + padding[0]}
        corners.add(tuple(corner.values()))
        expected = transform.transform(image, transform.make_params([image]) | corner | {"needs_crop": True})
        expected = F.horizontal_flip(expected) if behind else expected
        found = torchvision_cpu.apply_row(PIXELS, plan, row, recipe)
        found = found.mul(255).round().to(torch.uint8) if precision == "uint8" else found
        assert torch.equal(found, expected.as_subclass(torch.Tensor))
    assert len(corners) > 10


@pytest.mark.usefixtures("torch_seed")
@pytest.mark.parametrize("size", [(37, 52), (20, 90), (9, 9)])
def test_crop_with_border_draws_corners_as_torchvision_does(size):
    step, n = RandomCrop((30, 33), padding=(2, 3, 4, 5), pad_if_needed=True), 3000
    plan = make_plan(Recipe(steps=(step,)), seed=0, epoch=0, indices=np.arange(n), sizes=[size] * n)
    transform, image = to_v2(step), torch.zeros(3, *size, dtype=torch.uint8)
    drawn = [transform.make_params([image]) for _ in range(n)]
    for axis, (name, before) in enumerate((("top", 1), ("left", 0))):
        expected = np.array([d[name] - d["padding"][before] for d in drawn])
        values = sorted({*expected.tolist(), *plan.window[:, axis].tolist()})
        assert_counts_alike(*[shares(rows.tolist(), values) for rows in (plan.window[:, axis], expected)])


def test_crop_of_an_image_that_is_too_small_is_refused_with_the_sample():
    with pytest.raises(ConfigError, match=r"sample 1 is 9 x 40 pixels where RandomCrop takes 30 x 30 .* pad_if_needed"):
        make_plan(
            Recipe(steps=(RandomCrop(30, padding=2),)), seed=0, epoch=0, indices=[0, 1], sizes=[(40, 40), (9, 40)]
        )
    for mode in ("reflect", "symmetric"):
        recipe = Recipe(steps=(RandomCrop(9, padding=4, padding_mode=mode),))
        make_plan(recipe, seed=0, epoch=0, indices=[0], sizes=[(5, 5)])
        with pytest.raises(ConfigError, match="sample 0 is 4 x 9 pixels, too small for a border"):
            make_plan(recipe, seed=0, epoch=0, indices=[0], sizes=[(4, 9)])


# Steps that hold steps


def gates(plan: Plan) -> np.ndarray:
    """(n, entries): what is done to each sample."""
    return np.stack(
        [rows.operation > 0 if isinstance(rows, OperationRows) else rows.apply for rows in plan.operations], axis=1
    )


def test_random_apply_does_all_of_its_steps_or_none_with_its_probability():
    inner = (RandomInvert(1.0), ColorJitter(0.4), RandomHorizontalFlip(1.0))
    found = gates(plan_of(RandomApply(inner, 0.3), n=4000))
    assert (found.all(axis=1) | ~found.any(axis=1)).all()
    assert stats.binomtest(int(found[:, 0].sum()), 4000, 0.3).pvalue > LEAST_P


def test_random_apply_multiplies_the_probabilities_of_what_it_holds():
    found = gates(plan_of(RandomApply((RandomApply((RandomInvert(0.5),), 0.5),), 0.8), n=4000))
    assert stats.binomtest(int(found.sum()), 4000, 0.2).pvalue > LEAST_P


@pytest.mark.parametrize("p", [None, (1, 2, 5), (0.0, 1.0, 0.0), (3, 0, 1)])
def test_random_choice_takes_one_of_its_steps_by_weight(p):
    inner = (RandomInvert(1.0), RandomPosterize(3, 1.0), RandomHorizontalFlip(1.0))
    found = gates(plan_of(RandomChoice(inner, p), n=4000))
    assert (found.sum(axis=1) == 1).all()
    weights = np.array(p or (1, 1, 1)) / sum(p or (1, 1, 1))
    counts = found.sum(axis=0)
    assert (counts[weights == 0] == 0).all()
    if (weights > 0).sum() > 1:
        assert stats.chisquare(counts[weights > 0], 4000 * weights[weights > 0]).pvalue > LEAST_P


def test_containers_of_colour_steps_count_as_colour():
    apply = RandomApply((ColorJitter(0.4, 0.4, 0.2, 0.1),), 0.8)
    recipe = Recipe(steps=(RandomResizedCrop(64), RandomHorizontalFlip(), apply, RandomGrayscale(0.2)))
    assert recipe.operation_steps == ()
    plan = make_plan(recipe, seed=0, epoch=0, indices=np.arange(1000), sizes=[(90, 90)] * 1000)
    jitter = plan.colour[0]
    assert isinstance(jitter, JitterRows)
    assert stats.binomtest(int(jitter.apply.sum()), 1000, 0.8).pvalue > LEAST_P


@PRECISIONS
def test_steps_of_every_kind_run_in_the_order_given(precision):
    """Flips and colour steps behind an operation stay behind it."""
    steps = (
        RandomHorizontalFlip(0.5),
        RandomRotation(40, center=(5, 9)),
        RandomHorizontalFlip(0.5),
        ColorJitter(0.4, 0.4, 0.4, 0.1),
        RandomVerticalFlip(0.5),
        RandomAffine(0, translate=(0.4, 0)),
        RandomGrayscale(0.5),
    )
    recipe = Recipe(steps=(CenterCrop(SIZE), *steps), precision=precision)
    plan = make_plan(recipe, seed=0, epoch=0, indices=np.arange(20), sizes=[SIZE] * 20)
    turn, flip, jitter, upside, shift, grey = plan.operations
    transforms = [to_v2(step, levels=levels(precision)) for step in steps]
    adjust = (F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue)
    for row in range(20):
        image = image_of(precision)
        image = F.horizontal_flip(image) if plan.flip[row, 0] else image
        image = transforms[1].transform(image, parameters(turn, row))
        image = F.horizontal_flip(image) if flip.operation[row] else image
        for number in jitter.order[row].tolist():
            image = adjust[number](image, float(jitter.factors[row, number]))
        image = F.vertical_flip(image) if upside.operation[row] else image
        image = transforms[5].transform(image, parameters(shift, row))
        image = F.rgb_to_grayscale(image, 3) if grey.apply[row] else image
        found = torchvision_cpu.apply_row(PIXELS, plan, row, recipe)
        found = found.mul(255).round().to(torch.uint8) if precision == "uint8" else found
        assert torch.equal(found, image.as_subclass(torch.Tensor))


# Stability


STEADY = Recipe(
    steps=(
        Resize((50, 60)),
        RandomCrop((40, 44), padding=4, padding_mode="reflect"),
        RandomApply((ColorJitter(0.4, hue=0.1),), 0.5),
        RandomChoice((GaussianBlur(3), RandomRotation(30), RandomInvert(0.5)), (1, 2, 3)),
        RandomAffine(10, translate=(0.1, 0.2), scale=(0.8, 1.2), shear=(1, 2, 3, 4)),
        RandomSolarize(0.5),
        RandomPosterize(4),
        RandomAutocontrast(),
        RandomEqualize(),
        RandomAdjustSharpness(2),
        TrivialAugmentWide(),
        RandAugment(),
        AutoAugment(),
        Normalize(),
        RandomErasing(value="channels"),
    )
)


def test_plan_of_known_arguments_never_changes():
    """The draws are part of the pixels of every run that was ever started: this must not be edited, only added to."""
    plan = make_plan(STEADY, seed=11, epoch=2, indices=[0, 7, 123_456], occurrences=[0, 1, 0], sizes=[(90, 80)] * 3)
    assert plan.window.tolist() == WINDOWS
    assert [rows.operation.tolist() if isinstance(rows, OperationRows) else rows.apply.tolist()
            for rows in plan.operations] == OPERATIONS  # fmt: skip
    found = [rows.parameters[:, 0].tolist() for rows in plan.operations if isinstance(rows, OperationRows)]
    np.testing.assert_allclose(found, FIRST_PARAMETERS, rtol=1e-9, atol=1e-12)
    assert plan.erasing[0].box.tolist() == BOXES
    np.testing.assert_allclose(plan.erasing[0].value, VALUES, rtol=1e-5)
    assert plan.erasing[0].key.tolist() == KEYS


WINDOWS = [[10, 9], [11, -1], [13, 9]]
OPERATIONS = [
    [0, 15, 15],
    [True, True, True],
    [0, 0, 0],
    [11, 0, 0],
    [0, 9, 9],
    [12, 12, 12],
    [6, 6, 0],
    [5, 5, 5],
    [7, 0, 0],
    [0, 8, 0],
    [4, 4, 0],
    [0, 3, 0],
    [12, 12, 3],
    [0, 12, 7],
    [0, 0, 11],
    [0, 8, 3],
]
FIRST_PARAMETERS = [
    [0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0],
    [17.047838810161416, 0.0, 0.0],
    [0.0, 0.0, 0.0],
    [-7.633669705601063, 4.747017225901546, -4.043879746373675],
    [0.5, 0.5, 0.0],
    [4.0, 4.0, 4.0],
    [0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0],
    [2.0, 2.0, 0.0],
    [0.0, 1.231000006198883, 0.0],
    [0.0, 0.0, 1.2699999809265137],
    [0.0, 0.0, 0.0],
    [0.0, 0.0, 26.66666603088379],
    [0.0, 0.0, 1.199999988079071],
]
BOXES = [[0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
VALUES = [[-0.260956, 0.5717741, 0.1519359], [0.3005024, 0.1116743, 0.5985305], [-0.9482185, 0.6388683, -1.7794771]]
KEYS = [8664548702095278, 8094914801863545, 8913739757222296]
