"""Functions for each image: draws keyed by sample, on every backend, with nobody else's numbers touched."""

import logging
import random
import threading
import time

import numpy as np
import pytest
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from gpupipe.backends import create
from gpupipe.backends.base import Options
from gpupipe.backends.sample_functions import KeyedDraws
from gpupipe.convert import from_torchvision
from gpupipe.errors import BackendError
from gpupipe.headers import scan
from gpupipe.plan import make_plan
from gpupipe.recipe import Output, Recipe
from gpupipe.records import Record
from tests import images

COUNT = 6
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BACKENDS = ["torchvision", "numba", "dali"]


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [
        Record(images.encode(images.photo(50, 70, number), "JPEG"), label=0, index=number, key=str(number))
        for number in range(COUNT)
    ]


def run(recipe: Recipe, records: list[Record], backend: str, *, batch: int = COUNT, threads: int = 2) -> torch.Tensor:
    pytest.importorskip({"dali": "nvidia.dali"}.get(backend, backend))
    made = create(backend, recipe, device="cpu", batch_size=batch, options=Options(threads=threads))
    try:
        futures = []
        for first in range(0, COUNT, batch):
            part = records[first : first + batch]
            indices = [record.index for record in part]
            plan = make_plan(recipe, seed=3, epoch=1, indices=indices, sizes=[(50, 70)] * len(part))
            futures.append(made.submit(part, [scan(record.data) for record in part], plan))
        return torch.cat([future.result().images for future in futures])
    finally:
        made.close()


def noisy(image: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Draws from both generators, in every way that torch has."""
    some = torch.rand(3, 1, 1, generator=generator) + torch.randn(3, 1, 1) + torch.empty(3, 1, 1).uniform_(-1, 1)
    some += torch.randint(3, (3, 1, 1)) + torch.normal(0.0, 1.0, (3, 1, 1)) + torch.rand_like(some)
    some += torch.bernoulli(torch.full((3, 1, 1), 0.5)) + torch.multinomial(torch.ones(4), 1)
    return image + some + torch.distributions.Beta(0.5, 0.5).sample()


NOISY = Recipe.train(size=32).then(noisy, per="sample")
TAIL = v2.Compose(
    [
        v2.RandomResizedCrop(32),
        v2.RandomPerspective(p=0.7),
        v2.RandomPhotometricDistort(),
        v2.ElasticTransform(),
        v2.ToImage(),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize(MEAN, STD),
    ]
)


def tail(*before) -> Recipe:
    return from_torchvision(v2.Compose([*before, *TAIL.transforms]), unsupported="tail")


@pytest.mark.parametrize("backend", BACKENDS)
def test_function_gives_the_same_numbers_at_any_batch_size_and_thread_count(records, backend):
    whole = run(NOISY, records, backend)
    assert torch.equal(run(NOISY, records, backend, batch=2, threads=1), whole)
    plain = run(Recipe.train(size=32), records, backend)
    shifts = (whole - plain).mean(dim=(2, 3))
    assert len(shifts.flatten().mul(1e3).round().unique()) > 2 * COUNT, "other numbers for each image and channel"


def test_function_of_another_epoch_or_seed_draws_other_numbers():
    keys = {
        int(make_plan(NOISY, seed=seed, epoch=epoch, indices=[5], sizes=[(9, 9)]).function_key[0])
        for seed in (0, 1)
        for epoch in (0, 1)
    }
    assert len(keys) == 4
    assert make_plan(Recipe.train(), seed=0, epoch=0, indices=[5], sizes=[(9, 9)]).function_key is None


def test_function_changes_no_number_of_the_steps():
    with_it = make_plan(NOISY, seed=0, epoch=0, indices=[1, 2], sizes=[(90, 80)] * 2)
    without = make_plan(Recipe.train(size=32), seed=0, epoch=0, indices=[1, 2], sizes=[(90, 80)] * 2)
    np.testing.assert_array_equal(with_it.box, without.box)
    np.testing.assert_array_equal(with_it.take(slice(1, 2)).function_key, with_it.function_key[1:])


@pytest.mark.parametrize("before", [[v2.ToImage()], [v2.PILToTensor()], []], ids=["tv_image", "tensor", "pil"])
def test_tail_is_the_same_on_both_cpu_backends_and_leaves_the_global_generators_alone(records, before):
    recipe = tail(*before)
    assert recipe.precision == "uint8"
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    expected = run(recipe, records, "torchvision")
    assert torch.equal(run(recipe, records, "torchvision", batch=3), expected)
    assert torch.equal(run(recipe, records, "numba"), expected)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


def test_tail_equals_the_transform_with_the_numbers_of_its_generator(records):
    recipe = tail(v2.ToImage())
    found = run(recipe, records, "torchvision")
    first = from_torchvision(v2.Compose([v2.ToImage(), *TAIL.transforms[:1], v2.ToDtype(torch.uint8, scale=True),
                                         v2.ToDtype(torch.float32, scale=True)]))  # fmt: skip
    pixels = run(first, records, "torchvision").mul(255).round().byte()
    plan = make_plan(recipe, seed=3, epoch=1, indices=range(COUNT), sizes=[(50, 70)] * COUNT)
    state = torch.get_rng_state()
    for row in range(COUNT):
        torch.manual_seed(int(plan.function_key[row]))  # the global generator is of the same kind
        expected = pixels[row]
        for transform in TAIL.transforms[1:]:
            expected = transform(expected)
        assert torch.equal(found[row], expected)
    torch.set_rng_state(state)


@pytest.mark.parametrize("backend", BACKENDS)
def test_output_of_a_recipe_with_functions_is_what_it_says(records, backend):
    recipe = Recipe.train(size=32, output=Output(dtype="bfloat16", memory_format="channels_last"))
    recipe = recipe.then(noisy, per="sample")
    found = run(recipe, records, backend)
    assert found.dtype == torch.bfloat16
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = run(NOISY, records, backend).to(torch.bfloat16)
    assert torch.equal(found, expected)


def test_draws_of_other_threads_stay_their_own():
    def draw_elsewhere() -> None:
        state = torch.get_rng_state()
        found.append(torch.rand(3))
        torch.set_rng_state(state)

    found: list[torch.Tensor] = []
    with KeyedDraws(5):
        thread = threading.Thread(target=draw_elsewhere)
        thread.start()
        thread.join()
        ours = torch.rand(3)
    with KeyedDraws(5):
        assert torch.equal(torch.rand(3), ours)
    assert not torch.equal(found[0], ours)


def by_python(image: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return image * random.random()


def by_numpy(image: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return image * np.random.random()


def by_dropout(image: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return torch.nn.functional.dropout(image)


@pytest.mark.parametrize("fn", [by_python, by_numpy, by_dropout])
def test_draws_that_cannot_be_keyed_are_found_and_warned_of_once(records, fn, caplog):
    state = random.getstate()
    with caplog.at_level(logging.WARNING):
        run(Recipe.train(size=32).then(fn, per="sample"), records, "torchvision")
    random.setstate(state)
    assert [record.message.split(":")[0] for record in caplog.records] == [f"{__name__}.{fn.__name__}"]
    assert "neither reproducible nor kept apart" in caplog.text


def test_draws_that_are_keyed_are_not_warned_of(records, caplog):
    with caplog.at_level(logging.WARNING):
        run(NOISY, records, "torchvision")
    assert not caplog.records


def slow(image: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    time.sleep(0.001)
    return image


def test_cost_is_told_once(caplog):
    recipe = Recipe.eval(size=8, resize=8).then(slow, per="sample")
    record = Record(images.photo(8, 8), label=0, index=0, key="0")
    plan = make_plan(recipe, seed=0, epoch=0, indices=range(100), sizes=[(8, 8)] * 100)
    made = create("torchvision", recipe, device="cpu", batch_size=100, options=Options(threads=1))
    with caplog.at_level(logging.WARNING):
        made.submit([record] * 100, [scan(record.data)] * 100, plan).result()
    made.close()
    (told,) = caplog.records
    assert "ms of a thread for each image (mean of the first 64)" in told.message
    assert 1.0 <= told.args[1] < 50.0


def smaller(image: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return image[:, 1:]


def whole_numbers(image: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    return image.long()


def broken(_image: torch.Tensor, _: torch.Generator) -> torch.Tensor:
    raise KeyError("mine")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("fn", "said"),
    [(smaller, r"returned torch.float32 \(3, 31, 32\)"), (whole_numbers, "int64"), (broken, "failed: KeyError")],
)
def test_function_that_fails_or_returns_something_else_is_named(records, backend, fn, said):
    with pytest.raises(BackendError, match=f"(?s)the function .{{1,9}}{__name__}.{fn.__name__}.*{said}"):
        run(Recipe.train(size=32).then(fn, per="sample"), records, backend)


def test_tail_that_does_not_end_with_floats_is_refused(records):
    transform = v2.Compose([v2.CenterCrop(32), v2.RandomPerspective(), v1.PILToTensor()])
    with pytest.raises(BackendError, match=r"end with torch.uint8, and a batch is of floats: end with ToTensor"):
        run(from_torchvision(transform, unsupported="tail"), records, "torchvision")


def test_bad_record_is_no_work_for_the_function(records):
    bad = Record(b"\xff\xd8 no image", label=0, index=0, key="0")
    recipe = Recipe.eval(size=8).then(broken, per="sample")
    for backend in BACKENDS:
        pytest.importorskip({"dali": "nvidia.dali"}.get(backend, backend))
        made = create(backend, recipe, device="cpu", batch_size=1)
        plan = make_plan(recipe, seed=0, epoch=0, indices=[0], sizes=[(50, 70)])
        applied = made.submit([bad], [scan(records[0].data)], plan).result()
        made.close()
        assert set(applied.errors) == {0}
        assert not applied.images.any()
