"""Plans against torchvision: the same boxes where nothing is random, the same distributions where something is."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from torchvision.transforms.v2.functional._geometry import _compute_resized_output_size

from gpupipe.errors import ConfigError
from gpupipe.plan import draw, make_plan, resolve
from gpupipe.recipe import Recipe
from gpupipe.records import GreyRows, JitterRows, Plan
from gpupipe.steps import (
    CenterCrop,
    ColorJitter,
    Grayscale,
    Normalize,
    RandomCrop,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)
from tests.recipes import recipes

FULL = Recipe(
    steps=(
        RandomHorizontalFlip(),
        RandomResizedCrop(64),
        RandomVerticalFlip(0.3),
        RandomHorizontalFlip(0.3),
        ColorJitter(0.4, 0.4, 0.4, 0.1),
        RandomGrayscale(0.2),
        Grayscale(),
        ColorJitter(hue=(0.1, 0.2)),
        Normalize(),
    )
)


def plan_of(*steps, sizes, seed=0, epoch=0, indices=None, **more) -> Plan:
    indices = np.arange(len(sizes)) if indices is None else indices
    return make_plan(Recipe(steps=steps), seed=seed, epoch=epoch, indices=indices, sizes=sizes, **more)


def columns(plan: Plan) -> dict[str, np.ndarray]:
    """Every array of a plan by name."""
    found = {name: getattr(plan, name) for name in ("index", "occurrence", "box", "resized", "window", "flip")}
    for part in ("colour", "operations", "erasing"):
        for number, rows in enumerate(getattr(plan, part)):
            for field in dataclasses.fields(rows):
                value = getattr(rows, field.name)
                if isinstance(value, np.ndarray):
                    found[f"{part} {number} {field.name}"] = value
    return found


def assert_same(one: Plan, other: Plan) -> None:
    a, b = columns(one), columns(other)
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)
    assert one.size == other.size


# What a plan is


def test_plan_has_the_documented_types_and_shapes():
    plan = make_plan(FULL, seed=1, epoch=2, indices=[5, 6, 7], occurrences=[0, 1, 0], sizes=[(90, 80)] * 3)
    assert {name: (array.dtype.name, array.shape) for name, array in columns(plan).items()} == {
        "index": ("int64", (3,)),
        "occurrence": ("int64", (3,)),
        "box": ("int32", (3, 4)),
        "resized": ("int32", (3, 2)),
        "window": ("int32", (3, 2)),
        "flip": ("bool", (3, 2)),
        "colour 0 order": ("uint8", (3, 4)),
        "colour 0 factors": ("float64", (3, 4)),
        "colour 0 apply": ("bool", (3,)),
        "colour 1 apply": ("bool", (3,)),
        "colour 2 apply": ("bool", (3,)),
        "colour 3 order": ("uint8", (3, 4)),
        "colour 3 factors": ("float64", (3, 4)),
        "colour 3 apply": ("bool", (3,)),
    }
    assert plan.size == (64, 64)
    assert len(plan) == 3
    assert [rows.used for rows in plan.colour if isinstance(rows, JitterRows)] == [(True,) * 4, (False,) * 3 + (True,)]
    assert plan.colour[2].apply.all()
    np.testing.assert_array_equal(plan.colour[3].factors[:, :3], 1)


def test_plan_of_no_samples_is_empty():
    plan = make_plan(FULL, seed=0, epoch=0, indices=[], sizes=[])
    assert len(plan) == 0
    assert all(len(array) == 0 for array in columns(plan).values())


def test_plan_of_known_arguments_never_changes():
    """Recorded once: a change here changes the pixels of everybody's runs."""
    plan = make_plan(FULL, seed=7, epoch=3, indices=[11, 500], occurrences=[0, 2], sizes=[(375, 500), (500, 333)])
    assert plan.box.tolist() == [[62, 94, 212, 204], [74, 6, 265, 269]]
    assert plan.flip.tolist() == [[False, True], [True, True]]
    assert plan.colour[0].order.tolist() == [[1, 0, 2, 3], [2, 1, 0, 3]]
    assert plan.colour[0].factors.round(12).tolist() == [
        [1.165216920122, 1.111213376575, 0.791385737314, -0.009876302748],
        [1.208059319847, 0.609820722465, 0.962802356413, -0.03804008752],
    ]
    assert plan.colour[1].apply.tolist() == [False, True]
    assert plan.colour[3].factors[:, 3].round(12).tolist() == [0.187212250857, 0.173939674526]


# What a row depends on

INDEX = st.integers(0, 2**63 - 1)
ROWS = st.lists(st.tuples(INDEX, st.integers(0, 5), st.integers(1, 700), st.integers(1, 700)), min_size=1, max_size=12)


@given(recipe=recipes, rows=ROWS, seed=INDEX, epoch=INDEX, shuffle=st.randoms(use_true_random=False))
def test_row_does_not_depend_on_the_other_rows_or_their_order(recipe, rows, seed, epoch, shuffle):
    index, occurrence, height, width = (np.array(column) for column in zip(*rows, strict=True))
    sizes = np.stack([height, width], axis=1)

    def plan(rows_: np.ndarray) -> Plan:
        return make_plan(
            recipe, seed=seed, epoch=epoch, indices=index[rows_], occurrences=occurrence[rows_], sizes=sizes[rows_]
        )

    whole = plan(np.arange(len(rows)))
    order = list(range(len(rows)))
    shuffle.shuffle(order)
    assert_same(plan(np.array(order)), whole.take(np.array(order)))
    for row in range(len(rows)):
        assert_same(plan(np.array([row])), whole.take(slice(row, row + 1)))


@given(recipe=recipes, rows=ROWS, seed=INDEX)
def test_draws_taken_apart_resolve_to_the_same_rows(recipe, rows, seed):
    index, occurrence, height, width = (np.array(column) for column in zip(*rows, strict=True))
    sizes = np.stack([height, width], axis=1)
    draws = draw(recipe, seed=seed, epoch=1, indices=index, occurrences=occurrence)
    whole = resolve(recipe, draws, sizes)
    middle = len(rows) // 2
    for part in (slice(0, middle), slice(middle, None), np.arange(len(rows))[::-1]):
        assert len(draws.take(part)) == len(index[part])
        assert_same(resolve(recipe, draws.take(part), sizes[part]), whole.take(part))


def test_repeated_index_gets_other_numbers_by_its_occurrence():
    n = 50
    plans = [
        make_plan(FULL, seed=0, epoch=0, indices=np.arange(n), occurrences=np.full(n, o), sizes=[(400, 500)] * n)
        for o in (0, 1, 2)
    ]
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert (plans[one].box != plans[other].box).any(axis=1).all()
        assert (plans[one].colour[0].factors != plans[other].colour[0].factors).any(axis=1).all()
        for name in ("flip", "colour 1 apply"):
            assert (columns(plans[one])[name] != columns(plans[other])[name]).any()


def test_occurrences_left_out_are_zero():
    given_ = {"seed": 3, "epoch": 4, "indices": [1, 1, 2], "sizes": [(50, 60)] * 3}
    assert_same(make_plan(FULL, **given_), make_plan(FULL, **given_, occurrences=[0, 0, 0]))


def test_occurrence_of_one_sample_does_not_touch_another():
    sizes = [(400, 500)] * 2
    one = make_plan(FULL, seed=0, epoch=0, indices=[3, 4], occurrences=[0, 0], sizes=sizes)
    other = make_plan(FULL, seed=0, epoch=0, indices=[3, 4], occurrences=[7, 0], sizes=sizes)
    assert_same(one.take(slice(1, 2)), other.take(slice(1, 2)))


@pytest.mark.parametrize("change", [{"seed": 1}, {"epoch": 1}, {"seed": 2**63 - 1}, {"epoch": 2**63 - 1}])
def test_other_seed_or_epoch_gives_other_rows(change):
    given_ = {"seed": 0, "epoch": 0, "indices": np.arange(50), "sizes": [(400, 500)] * 50}
    one, other = make_plan(FULL, **given_), make_plan(FULL, **given_ | change)
    assert (one.box != other.box).any(axis=1).all()
    assert (one.colour[0].factors != other.colour[0].factors).any(axis=1).all()
    assert (one.flip != other.flip).any()


def test_seed_and_epoch_are_not_added_up():
    given_ = {"indices": np.arange(50), "sizes": [(400, 500)] * 50}
    one, other = make_plan(FULL, seed=0, epoch=5, **given_), make_plan(FULL, seed=5, epoch=0, **given_)
    assert (one.box != other.box).any(axis=1).all()


def test_step_of_another_kind_leaves_the_numbers_of_the_rest_alone():
    sizes = [(400, 500)] * 20
    crop = RandomResizedCrop(64)
    bare = plan_of(crop, sizes=sizes)
    more = plan_of(crop, RandomHorizontalFlip(), ColorJitter(0.4), RandomGrayscale(), sizes=sizes)
    np.testing.assert_array_equal(bare.box, more.box)
    turned = plan_of(crop, RandomGrayscale(), ColorJitter(0.4), RandomHorizontalFlip(), sizes=sizes)
    np.testing.assert_array_equal(more.flip, turned.flip)
    np.testing.assert_array_equal(more.colour[0].factors, turned.colour[1].factors)
    np.testing.assert_array_equal(more.colour[1].apply, turned.colour[0].apply)


def test_equal_steps_in_one_recipe_draw_numbers_of_their_own():
    jitter = ColorJitter(0.4, 0.4, 0.4, 0.1)
    plan = plan_of(CenterCrop(8), jitter, jitter, RandomGrayscale(0.5), RandomGrayscale(0.5), sizes=[(9, 9)] * 200)
    assert (plan.colour[0].factors != plan.colour[1].factors).all()
    assert 0.3 < (plan.colour[2].apply != plan.colour[3].apply).mean() < 0.7
    # Two coin flips in a row: heads and heads cancel out.
    twice = plan_of(CenterCrop(8), RandomHorizontalFlip(1), RandomHorizontalFlip(0.5), sizes=[(9, 9)] * 200)
    assert 0.3 < twice.flip[:, 0].mean() < 0.7


# Boxes lie inside their images


@given(
    size=st.tuples(st.integers(1, 3000), st.integers(1, 3000)) | st.tuples(st.integers(1, 4), st.integers(1, 65_535)),
    scale=st.tuples(st.floats(0, 1), st.floats(1e-6, 3)).map(lambda pair: (min(pair), max(pair))),
    ratio=st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)).map(lambda pair: (min(pair), max(pair))),
    seed=INDEX,
)
def test_random_box_lies_inside_its_image(size, scale, ratio, seed):
    for sides in (size, size[::-1]):
        box = plan_of(RandomResizedCrop(7, scale=scale, ratio=ratio), sizes=[sides] * 20, seed=seed).box
        top, left, height, width = box.T
        assert (box[:, :2] >= 0).all()
        assert (box[:, 2:] >= 1).all()
        assert (top + height <= sides[0]).all()
        assert (left + width <= sides[1]).all()


@given(recipe=recipes, sizes=st.lists(st.tuples(st.integers(1, 900), st.integers(1, 900)), min_size=1, max_size=8))
def test_plan_any_recipe_keeps_its_geometry(recipe, sizes):
    plan = make_plan(recipe, seed=0, epoch=0, indices=np.arange(len(sizes)), sizes=sizes)
    sides = np.array(sizes)
    assert (plan.box[:, :2] >= 0).all()
    assert (plan.box[:, :2] + plan.box[:, 2:] <= sides).all()
    assert (plan.box[:, 2:] >= 1).all()
    assert (plan.resized >= 1).all()
    assert plan.size == recipe.output_size
    # The window holds as much of the image as fits.
    shown = np.minimum(plan.resized, plan.window + plan.size) - np.maximum(plan.window, 0)
    if not any(isinstance(step, RandomCrop) for step in recipe.steps):
        np.testing.assert_array_equal(shown, np.minimum(plan.resized, plan.size))


# The same distributions as torchvision


@pytest.fixture
def torch_seed():
    """torch's global generator with a seed of its own for one test."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        yield


# Each of some 60 comparisons must hold; chance alone would break one at this level in one run of thousands, and the
# seeds are fixed: it either always passes or never.
LEAST_P = 1e-4


def box_statistics(box: np.ndarray, size: tuple[int, int]) -> dict[str, np.ndarray]:
    """Area share, ratio, and where the box lies in the room it has (0 to 1; only where it has room)."""
    top, left, height, width = box.T
    room_y, room_x = size[0] - height, size[1] - width
    return {
        "share": height * width / (size[0] * size[1]),
        "ratio": width / height,
        "top": (top[room_y > 0] + 0.5) / (room_y[room_y > 0] + 1),
        "left": (left[room_x > 0] + 0.5) / (room_x[room_x > 0] + 1),
    }


@pytest.mark.parametrize(
    ("size", "scale", "ratio", "n"),
    [
        ((375, 500), (0.08, 1.0), (3 / 4, 4 / 3), 100_000),
        ((500, 333), (0.35, 1.0), (3 / 4, 4 / 3), 20_000),
        ((100, 1000), (0.08, 1.0), (3 / 4, 4 / 3), 12_000),
        ((1000, 60), (0.08, 1.0), (3 / 4, 4 / 3), 12_000),
        ((64, 64), (0.2, 1.0), (0.5, 2.0), 20_000),
        ((31, 40), (0.25, 0.25), (0.9, 1.1), 20_000),
        ((7, 900), (0.05, 0.2), (1.0, 1.0), 12_000),
        ((33, 37), (0.9, 1.5), (3 / 4, 4 / 3), 12_000),
    ],
)
@pytest.mark.usefixtures("torch_seed")
def test_random_crop_has_torchvisions_distribution(size, scale, ratio, n):
    theirs = v2.RandomResizedCrop(8, scale=scale, ratio=ratio)
    image = torch.empty(3, *size)
    boxes = np.array([list(theirs.make_params([image]).values()) for _ in range(n)])
    ours = plan_of(RandomResizedCrop(8, scale=scale, ratio=ratio), sizes=[size] * n, seed=99).box
    one, other = box_statistics(ours, size), box_statistics(boxes, size)
    for name in one:
        if len(one[name]) or len(other[name]):
            assert stats.ks_2samp(one[name], other[name]).pvalue > LEAST_P, name
    # Place and size hang together (a large box has little room): compare the edges too.
    for column in range(2):
        far = [(box[:, column] + box[:, column + 2]) for box in (ours, boxes)]
        assert stats.ks_2samp(*far).pvalue > LEAST_P
    # How often the fallback is taken, which is a single box: the most frequent one.
    fallback = theirs_fallback(size, ratio)
    counts = [int((box == fallback).all(axis=1).sum()) for box in (ours, boxes)]
    assert counts[0] + counts[1] == 0 or stats.fisher_exact(_against(counts, n)).pvalue > LEAST_P


def _against(counts: list[int], n: int) -> list[list[int]]:
    return [[count, n - count] for count in counts]


def theirs_fallback(size: tuple[int, int], ratio: tuple[float, float]) -> list[int]:
    """torchvision's box where no try fits: no box of 9 times the area does."""
    params = v2.RandomResizedCrop(8, scale=(9, 9), ratio=ratio).make_params([torch.empty(1, *size)])
    return [params[name] for name in ("top", "left", "height", "width")]


@pytest.mark.usefixtures("torch_seed")
def test_jitter_factors_and_order_have_torchvisions_distribution():
    n = 100_000
    arguments = (0.4, (0.2, 1.9), 0.8, 0.1)
    theirs = v2.ColorJitter(*arguments)
    params = [theirs.make_params([]) for _ in range(n)]
    rows = plan_of(CenterCrop(8), ColorJitter(*arguments), sizes=[(9, 9)] * n, seed=99).colour[0]
    for column, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        factors = np.array([p[f"{name}_factor"] for p in params])
        assert stats.ks_2samp(rows.factors[:, column], factors).pvalue > LEAST_P, name
        low, high = getattr(theirs, name)
        assert low <= rows.factors[:, column].min() <= rows.factors[:, column].max() < high
    digits = 4 ** np.arange(4)
    codes = [rows.order @ digits, np.array([p["fn_idx"].tolist() for p in params]) @ digits]
    counts = np.stack([np.unique(code, return_counts=True)[1] for code in codes])
    assert counts.shape == (2, 24)
    assert stats.chi2_contingency(counts).pvalue > LEAST_P
    assert stats.chisquare(counts[0]).pvalue > LEAST_P
    # The four factors and the order say nothing of one another.
    together = np.corrcoef(np.column_stack([rows.factors, rows.order[:, :3]]).T)
    np.fill_diagonal(together[4:, 4:], 0)
    together[4:, 4:] = 0  # places in one permutation do hang together
    assert np.abs(together - np.diag(np.diag(together))).max() < 5 / np.sqrt(n)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("kind", [RandomHorizontalFlip, RandomVerticalFlip, RandomGrayscale])
def test_coin_has_probability_p(kind, p):
    n = 100_000
    plan = plan_of(CenterCrop(8), kind(p), sizes=[(9, 9)] * n, seed=99)
    if kind is RandomGrayscale:
        thrown = plan.colour[0].apply
    else:
        axis = 0 if kind is RandomHorizontalFlip else 1
        thrown = plan.flip[:, axis]
        assert not plan.flip[:, 1 - axis].any()
    heads = int(thrown.sum())
    assert heads in {0.0: {0}, 1.0: {n}}.get(p, {heads})
    assert stats.binomtest(heads, n, p).pvalue > LEAST_P


@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
@pytest.mark.usefixtures("torch_seed")
def test_coin_is_thrown_as_often_as_torchvisions(p):
    n = 10_000
    image = torch.tensor([[[0, 1]]])
    flip = v2.RandomHorizontalFlip(p)
    theirs = sum(int(flip(image)[0, 0, 0]) for _ in range(n))
    ours = int(plan_of(CenterCrop(8), RandomHorizontalFlip(p), sizes=[(9, 9)] * n).flip[:, 0].sum())
    assert stats.fisher_exact(_against([theirs, ours], n)).pvalue > LEAST_P


# Where nothing is random: exactly torchvision's boxes

SMALL_SIZES = [(height, width) for height in range(1, 41) for width in range(1, 41)]
THIN_SIZES = [(1, n) for n in (50, 224, 1000, 65_535)] + [(n, 1) for n in (50, 224, 1000, 65_535)]


@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        ((9.0, 9.0), (3 / 4, 4 / 3)),
        ((9.0, 9.0), (1.0, 1.0)),
        ((9.0, 9.0), (0.3, 0.5)),
        ((9.0, 9.0), (2.0, 3.0)),
    ],
)
def test_random_crop_that_must_fall_back_equals_torchvisions_box(scale, ratio):
    sizes = SMALL_SIZES + THIN_SIZES
    theirs = v2.RandomResizedCrop(224, scale=scale, ratio=ratio)
    expected = np.array([list(theirs.make_params([torch.empty(0, *size)]).values()) for size in sizes])
    ours = plan_of(RandomResizedCrop(224, scale=scale, ratio=ratio), sizes=sizes).box
    croppable = (expected[:, 2:] > 0).all(axis=1)  # torchvision fails where a side rounds to 0; a plan keeps 1 pixel
    assert croppable.sum() > 1500
    np.testing.assert_array_equal(ours[croppable], expected[croppable])
    np.testing.assert_array_equal(ours[~croppable, 2:], np.maximum(expected[~croppable, 2:], 1))


@pytest.mark.parametrize("scale", [0.08, 0.3, 1.0])
@pytest.mark.parametrize("ratio", [0.75, 1.0, 1.5])
def test_random_crop_of_one_area_and_ratio_has_torchvisions_sides(scale, ratio):
    theirs = v2.RandomResizedCrop(224, scale=(scale, scale), ratio=(ratio, ratio))
    expected = np.array([list(theirs.make_params([torch.empty(0, *size)]).values()) for size in SMALL_SIZES])
    ours = plan_of(RandomResizedCrop(224, scale=(scale,) * 2, ratio=(ratio,) * 2), sizes=SMALL_SIZES).box
    area = np.prod(SMALL_SIZES, axis=1) * scale
    sides = np.stack([np.sqrt(area / ratio), np.sqrt(area * ratio)], axis=1)
    # torchvision takes the ratio through float32 logarithms, so where a side is n + 1/2 it may round the other way.
    clear = (np.abs(sides % 1 - 0.5) > 1e-4).all(axis=1)
    assert clear.mean() > 0.95
    np.testing.assert_array_equal(ours[clear, 2:], expected[clear, 2:])


def test_random_crop_of_a_whole_square_is_the_image():
    sizes = [(side, side) for side in range(1, 300)]
    box = plan_of(RandomResizedCrop(224, scale=(1, 1), ratio=(1, 1)), sizes=sizes).box
    np.testing.assert_array_equal(box, [(0, 0, *size) for size in sizes])


EVAL_STEPS = [
    (Resize(8), CenterCrop(7)),
    (Resize(8), CenterCrop(8)),
    (Resize(9), CenterCrop((6, 3))),
    (Resize(7), CenterCrop(10)),  # padded: even and odd differences on both axes
    (Resize(7), CenterCrop((11, 4))),
    (Resize(6), CenterCrop((5, 13))),
    (Resize(8, max_size=9), CenterCrop(7)),
    (Resize(8, max_size=20), CenterCrop((9, 8))),
    (Resize((5, 9)), CenterCrop(6)),
    (Resize((5, 9)),),
    (CenterCrop(30),),
    (CenterCrop((31, 18)),),
    (CenterCrop(61),),
]


def theirs_eval(steps: tuple, size: tuple[int, int]) -> tuple[list[int], np.ndarray, np.ndarray]:
    """What torchvision makes of an image that holds its own row and column numbers (from 1; 0 is padding)."""
    for step in steps:
        if isinstance(step, Resize):
            sides = [step.size] if isinstance(step.size, int) else list(step.size)
            size = [max(1, side) for side in _compute_resized_output_size(size, size=sides, max_size=step.max_size)]
    resized = list(size)
    rows = torch.arange(1, size[0] + 1).view(1, -1, 1).expand(1, *size)
    cols = torch.arange(1, size[1] + 1).view(1, 1, -1).expand(1, *size)
    if isinstance(steps[-1], CenterCrop):
        rows, cols = (F.center_crop(image, list(steps[-1].size)) for image in (rows, cols))
    return resized, rows[0].amax(dim=1).numpy(), cols[0].amax(dim=0).numpy()


def shown(window: int, side: int, resized: int) -> np.ndarray:
    """The row or column numbers that a plan's window shows, as `theirs_eval` counts them."""
    numbers = np.arange(window + 1, window + side + 1)
    return np.where((numbers >= 1) & (numbers <= resized), numbers, 0)


def assert_eval_equals_torchvision(steps: tuple, sizes: list[tuple[int, int]]) -> None:
    plan = plan_of(*steps, sizes=sizes)
    np.testing.assert_array_equal(plan.box, [(0, 0, *size) for size in sizes])
    assert not plan.flip.any()
    for row, size in enumerate(sizes):
        resized, rows, cols = theirs_eval(steps, size)
        assert plan.resized[row].tolist() == resized, size
        for axis, expected in enumerate((rows, cols)):
            found = shown(plan.window[row, axis], plan.size[axis], resized[axis])
            np.testing.assert_array_equal(found, expected, err_msg=f"{size}, axis {axis}")


@pytest.mark.parametrize("steps", EVAL_STEPS, ids=str)
def test_eval_geometry_of_every_small_image_equals_torchvision(steps):
    assert_eval_equals_torchvision(steps, [(height, width) for height in range(1, 61) for width in range(1, 61)])


@pytest.mark.parametrize("steps", [(Resize(256), CenterCrop(224)), (Resize(232, max_size=300), CenterCrop((224, 193)))])
def test_eval_geometry_of_random_images_equals_torchvision(steps):
    rng = np.random.default_rng(5)
    sizes = rng.integers(200, 5001, (200, 2)).tolist() + rng.integers(1, 300, (100, 2)).tolist()
    assert_eval_equals_torchvision(steps, [tuple(size) for size in sizes])


def test_resized_sides_equal_what_torchvisions_resize_makes():
    rng = np.random.default_rng(6)
    sizes = rng.integers(20, 90, (200, 2)).tolist()
    for step in (Resize(13), Resize(13, max_size=17), Resize((4, 6))):
        plan = plan_of(step, CenterCrop(8), sizes=sizes)
        for row, size in enumerate(sizes):
            sides = [step.size] if isinstance(step.size, int) else list(step.size)
            made = F.resize(torch.zeros(1, *size), sides, max_size=step.max_size, antialias=True)
            assert plan.resized[row].tolist() == list(made.shape[1:])


def test_resize_of_a_sliver_keeps_one_pixel_where_torchvision_would_keep_none():
    plan = plan_of(Resize(8, max_size=9), CenterCrop(8), sizes=[(1, 60), (60, 1)])
    assert plan.resized.tolist() == [[1, 9], [9, 1]]
    assert _compute_resized_output_size((1, 60), size=[8], max_size=9) == [0, 9]


# Flips before and behind a crop


def flipped(image: torch.Tensor, horizontally: bool, vertically: bool) -> torch.Tensor:
    if horizontally:
        image = F.horizontal_flip(image)
    return F.vertical_flip(image) if vertically else image


def apply_without_resampling(plan: Plan, image: torch.Tensor) -> torch.Tensor:
    """Row 0 of a plan that resizes nothing."""
    top, left, height, width = plan.box[0].tolist()
    assert plan.resized[0].tolist() == [height, width]
    box = F.crop(image, top, left, height, width)
    return flipped(F.crop(box, *plan.window[0].tolist(), *plan.size), *plan.flip[0].tolist())


SIDE = st.integers(1, 12)
COIN = st.sampled_from([RandomHorizontalFlip(0), RandomHorizontalFlip(1), RandomVerticalFlip(0), RandomVerticalFlip(1)])
COINS = st.lists(COIN, max_size=3)


@given(size=st.tuples(SIDE, SIDE), want=st.tuples(SIDE, SIDE), before=COINS, between=COINS, behind=COINS)
def test_flips_around_resize_and_center_crop_equal_torchvision_in_that_order(size, want, before, between, behind):
    image = torch.arange(1, size[0] * size[1] + 1).view(1, *size)
    steps = (*before, Resize(size), *between, CenterCrop(want), *behind)  # to its own size: nothing is resampled
    expected = image
    for step in steps:
        if isinstance(step, CenterCrop):
            expected = F.center_crop(expected, list(want))
        elif not isinstance(step, Resize):
            expected = flipped(
                expected,
                isinstance(step, RandomHorizontalFlip) and step.p == 1,
                isinstance(step, RandomVerticalFlip) and step.p == 1,
            )
    found = apply_without_resampling(plan_of(*steps, sizes=[size]), image)
    assert torch.equal(found, expected)


@given(size=st.tuples(SIDE, SIDE), index=INDEX, before=COINS, behind=COINS)
def test_flips_around_a_random_crop_equal_torchvision_in_that_order(size, index, before, behind):
    image = torch.arange(1, size[0] * size[1] + 1).view(1, *size)
    crop = RandomResizedCrop(8)
    drawn = plan_of(crop, sizes=[size], indices=[index]).box[0].tolist()  # in the picture that the crop sees
    expected = image
    for step in (*before, crop, *behind):
        if step is crop:
            expected = F.crop(expected, *drawn)
        else:
            expected = flipped(
                expected,
                isinstance(step, RandomHorizontalFlip) and step.p == 1,
                isinstance(step, RandomVerticalFlip) and step.p == 1,
            )
    plan = plan_of(*before, crop, *behind, sizes=[size], indices=[index])
    assert plan.resized.tolist() == [[8, 8]]
    assert plan.window.tolist() == [[0, 0]]
    found = flipped(F.crop(image, *plan.box[0].tolist()), *plan.flip[0].tolist())
    assert torch.equal(found, expected)


# Arguments that cannot work

GIVEN = {"seed": 0, "epoch": 0, "indices": [1, 2], "occurrences": [0, 0], "sizes": [(5, 6), (7, 8)]}
WRONG = [
    *[("seed", seed) for seed in (-1, 2**63, 0.5, None, "0", True)],
    *[("epoch", epoch) for epoch in (-1, 2**63, 0.5, None, "0", True, [1], 2**70)],
    *[
        ("indices", indices)
        for indices in (
            [-1, 2],
            [0.5, 1.0],
            ["a", "b"],
            [True, False],
            5,
            None,
            [[1, 2]],
            [[1], [2, 3]],
            [2**63, 1],
            [2**64, 1],
            np.array([1, 2], np.float32),
        )
    ],
    *[("occurrences", found) for found in ([0], [0, 0, 0], [-1, 0], [0.0, 0.0], 0, [[0, 0]], [None, None])],
    *[
        ("sizes", sizes)
        for sizes in (
            [(5, 6)],
            [(5, 6)] * 3,
            [5, 6, 7, 8],
            [(5, 6, 3), (7, 8, 3)],
            [(0, 6), (7, 8)],
            [(5, -6), (7, 8)],
            [(5.5, 6.0), (7.0, 8.0)],
            [(5, 6), (7,)],
            [("5", "6"), ("7", "8")],
            None,
            [(2**31, 1), (7, 8)],
            [],
        )
    ],
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_argument_that_cannot_work_is_refused_by_name(name, value):
    with pytest.raises(ConfigError) as caught:
        make_plan(FULL, **GIVEN | {name: value})
    assert caught.value.field == name
    assert name in caught.value.message
    assert caught.value.allowed is not None


def test_arguments_of_any_integer_type_and_container_are_accepted():
    plain = make_plan(FULL, **GIVEN)
    for kind in (np.int32, np.uint64, np.uint8):
        arrays = {name: np.array(GIVEN[name], kind) for name in ("indices", "occurrences", "sizes")}
        assert_same(make_plan(FULL, **GIVEN | arrays | {"epoch": kind(0), "seed": kind(0)}), plain)
    assert_same(make_plan(FULL, **GIVEN | {"indices": torch.tensor([1, 2]), "sizes": ((5, 6), (7, 8))}), plain)


def test_arguments_are_not_changed():
    indices, sizes = np.array([3, 4]), np.array([[50, 60], [70, 80]])
    plan = make_plan(FULL, seed=0, epoch=0, indices=indices, sizes=sizes)
    assert indices.tolist() == [3, 4]
    assert sizes.tolist() == [[50, 60], [70, 80]]
    assert not np.shares_memory(plan.box, sizes)


def test_draws_of_another_recipe_are_refused():
    draws = draw(Recipe.train(), seed=0, epoch=0, indices=[1])
    with pytest.raises(ConfigError, match="made for another recipe; draw anew") as caught:
        resolve(Recipe.train(jitter=(0.4,)), draws, [(5, 6)])
    assert caught.value.field == "draws"


def test_resized_side_beyond_int32_is_refused_with_the_sample():
    recipe = Recipe(steps=(Resize(65_535), CenterCrop(8)))
    with pytest.raises(ConfigError, match="sample 7 of 1 x 65535 pixels would be resized to 65535 x 4294836225"):
        make_plan(recipe, seed=0, epoch=0, indices=[3, 7], sizes=[(20, 20), (1, 65_535)])


def test_colour_rows_of_a_plan_come_in_the_order_of_the_steps():
    plan = make_plan(FULL, **GIVEN)
    assert [type(rows) for rows in plan.colour] == [JitterRows, GreyRows, GreyRows, JitterRows]
