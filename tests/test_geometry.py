"""Boxes follow their pixels: against torchvision's own box transforms, and against what is seen in the images."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import gpupipe as gp
from gpupipe.errors import ConfigError, RecordError
from gpupipe.geometry import affines, transform_boxes
from gpupipe.records import Operation, OperationRows
from tests import available

RECIPES = {
    "train": gp.Recipe.train(size=48, scale=(0.3, 1.0)),
    "eval": gp.Recipe.eval(size=40, resize=48),
    "larger window": gp.Recipe.from_torchvision(
        v2.Compose(
            [
                v2.Resize(30),
                v2.CenterCrop((64, 36)),
                v2.RandomVerticalFlip(),
                v2.ToImage(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize([0.5] * 3, [0.25] * 3),
            ]
        )
    ),
}
each_recipe = pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)


@each_recipe
@given(
    size=st.tuples(st.integers(20, 300), st.integers(20, 300)),
    corners=st.lists(st.floats(0, 1), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_transform_boxes_is_what_torchvision_does_to_boxes(recipe, size, corners, seed):
    height, width = size
    plan = gp.make_plan(recipe, seed=seed, epoch=0, indices=[1], sizes=[size])
    x1, x2 = sorted((corners[0] * width, corners[1] * width))
    y1, y2 = sorted((corners[2] * height, corners[3] * height))
    box = torch.tensor([[x1, y1, x2, y2]])
    top, left, box_height, box_width = plan.box[0].tolist()
    # Cut by hand, because torchvision clamps boxes at every step, where pixels are only cut at the end.
    moved = box - torch.tensor([left, top, left, top])
    moved = tv_tensors.BoundingBoxes(moved, format="XYXY", canvas_size=(box_height, box_width), clamping_mode=None)
    moved = F.resize(moved, plan.resized[0].tolist())
    moved = torch.as_tensor(moved) - torch.tensor(np.tile(plan.window[0, ::-1], 2).copy())
    moved = tv_tensors.BoundingBoxes(moved, format="XYXY", canvas_size=plan.size, clamping_mode=None)
    if plan.flip[0, 0]:
        moved = F.horizontal_flip(moved)
    if plan.flip[0, 1]:
        moved = F.vertical_flip(moved)
    affine = torch.from_numpy(affines(plan))
    found = gp.transform_boxes(box[None], affine)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found[0], torch.as_tensor(moved).float(), rtol=1e-5, atol=1e-3)
    clamped = gp.transform_boxes(box[None], affine, size=plan.size)
    torch.testing.assert_close(
        clamped[0],
        torch.stack([found[0, :, n].clamp(0, plan.size[1 - n % 2]) for n in range(4)], dim=1),
    )


class Rectangles:
    """A white rectangle on black in each image, and its box as a column; the first record may be unreadable."""

    columns = ("boxes",)
    labels = None
    uri = fingerprint = "rectangles"

    def __init__(self, broken=()):
        self.broken = broken

    def __len__(self):
        return 12

    def __getitem__(self, index):
        if index in self.broken:
            raise RecordError("gone", index=index)
        generator = np.random.default_rng(index)
        height, width = generator.integers(100, 200, 2)
        y1, x1 = generator.integers(20, 50, 2)
        y2, x2 = y1 + generator.integers(20, 50), x1 + generator.integers(20, 50)
        pixels = np.zeros((height, width, 3), np.uint8)
        pixels[y1:y2, x1:x2] = 255
        return gp.Record(pixels, index, index, str(index), columns={"boxes": [[int(n) for n in (x1, y1, x2, y2)]]})

    def close(self):
        pass


def seen_box(image):
    """The box of what is nearer to white than to black; edges are blurred by the resize."""
    levels = image.mean(dim=0).numpy()
    ys, xs = np.nonzero(levels >= (levels.min() + levels.max()) / 2)
    return [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1]


@available.each_backend
@each_recipe
@pytest.mark.parametrize("broken", [(), (2, 7)])
def test_boxes_are_where_the_pixels_are(backend, recipe, broken):
    spec = gp.Collate(columns={"boxes": gp.Ragged(item=(4,), dtype="float32")})
    fields = ("image", "boxes", "boxes_offsets", "affine")
    seen = 0
    with available.loader(
        Rectangles(broken), recipe, backend, batch_size=5, collate=spec, fields=fields, on_error="substitute"
    ) as loader:
        for images, boxes, offsets, affine in loader:
            moved = gp.transform_boxes(boxes, affine, offsets=offsets, size=recipe.output_size)
            for image, box in zip(images, moved, strict=True):
                if (box[2:] - box[:2]).min() >= 3:  # else it is cut away, or nearly
                    seen += 1
                    assert np.abs(np.array(seen_box(image)) - box.numpy()).max() <= 1.0
    assert seen >= 8


def test_boxes_with_offsets_equal_padded_ones():
    affine = torch.randn(3, 2, 3) * torch.tensor([[1.0, 0, 1], [0, 1, 1]])
    rows = [torch.rand(2, 4), torch.rand(0, 4), torch.rand(3, 4)]
    offsets = torch.tensor([0, 2, 2, 5])
    flat = gp.transform_boxes(torch.cat(rows), affine, offsets=offsets)
    padded = gp.transform_boxes(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), affine)
    assert torch.equal(flat, torch.cat([padded[0, :2], padded[2]]))
    assert gp.transform_boxes(torch.rand(3, 1, 4).half(), affine).dtype == torch.float16


@pytest.mark.parametrize(
    ("boxes", "affine", "offsets"),
    [((2, 3, 4), (3, 2, 3), None), ((2, 4), (2, 2, 3), None), ((5, 4), (2, 2, 3), (2,)), ((2, 1, 5), (2, 2, 3), None)],
)
def test_boxes_that_do_not_fit_raise(boxes, affine, offsets):
    offsets = None if offsets is None else torch.zeros(offsets, dtype=torch.int64)
    with pytest.raises(ConfigError, match="do not fit"):
        gp.transform_boxes(torch.zeros(boxes), torch.zeros(affine), offsets=offsets)


@pytest.mark.parametrize(
    "step",
    [
        gp.RandomRotation(40),
        gp.RandomAffine(30, translate=(0.2, 0.1), scale=(0.7, 1.3), shear=(-20, 20, -10, 10)),
        gp.TrivialAugmentWide(),
        gp.RandomApply((gp.GaussianBlur(3), gp.RandomHorizontalFlip(1.0), gp.RandomVerticalFlip(1.0)), p=0.7),
    ],
    ids=lambda step: type(step).__name__,
)
def test_affines_follow_operations_as_torchvisions_boxes_do(step):
    size = (90, 120)
    recipe = gp.Recipe(steps=(gp.CenterCrop(size), step))
    plan = gp.make_plan(recipe, seed=1, epoch=0, indices=range(60), sizes=[size] * 60)
    moves = torch.from_numpy(affines(plan))
    box = torch.tensor([[50.0, 40.0, 70.0, 55.0]])
    found = transform_boxes(box.expand(60, 1, 4), moves)
    for row in range(60):
        expected = tv_tensors.BoundingBoxes(box, format="XYXY", canvas_size=size, clamping_mode=None)
        for rows in plan.operations:
            expected = moved_by_torchvision(expected, rows, row)
        torch.testing.assert_close(found[row], torch.as_tensor(expected), atol=1e-3, rtol=0)


def moved_by_torchvision(boxes, rows, row):
    if not isinstance(rows, OperationRows):
        return boxes
    values = rows.parameters[row].tolist()
    match Operation(rows.operation[row]):
        case Operation.ROTATE:
            return F.rotate(boxes, values[0], center=values[1:3])
        case Operation.AFFINE:
            angle, right, down, scale, shear_x, shear_y, x, y = values
            return F.affine(boxes, angle, [right, down], scale, [shear_x, shear_y], center=[x, y])
        case Operation.HORIZONTAL_FLIP:
            return F.horizontal_flip(boxes)
        case Operation.VERTICAL_FLIP:
            return F.vertical_flip(boxes)
    return boxes
