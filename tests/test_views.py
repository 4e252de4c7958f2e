"""Several views of one image: each equal to its recipe alone, and one decode for all of them."""

from dataclasses import replace

import pytest
import torch

import gpupipe as gp
from gpupipe import backends, decode
from gpupipe.backends.base import Options
from gpupipe.errors import BackendError, ConfigError, StateError
from gpupipe.headers import scan, upright_size
from gpupipe.records import Record
from tests import images
from tests.available import each_backend, loader, need
from tests.test_on_error import BAD, Mixed

LARGE = gp.Recipe.train(size=32, jitter=(0.4, 0.4, 0.4, 0.1))
SMALL = replace(
    gp.Recipe.train(size=(12, 20), scale=(0.05, 0.3)), output=gp.Output(dtype="float16", memory_format="channels_last")
)
ROUNDED = replace(LARGE, precision="uint8")
VIEWS = gp.Views(LARGE, LARGE, SMALL, ROUNDED)


def halved(images):
    return images / 2


# In a backend


@each_backend
@pytest.mark.parametrize("exif", ["ignore", "apply"])
def test_each_view_is_what_its_recipe_gives_alone(backend, exif):
    need(backend)
    recipes = [replace(recipe, exif=exif) for recipe in VIEWS.recipes]
    jpegs = images.jpegs()
    files = [*list((jpegs | images.others()).values())[::3], jpegs["orientation 6"]]
    records = [Record(data, 0, index, str(index)) for index, data in enumerate(files)]
    headers = [scan(data) for data in files]
    sizes = [upright_size(header, exif) for header in headers]
    plans = tuple(
        gp.make_plan(recipe, seed=2, epoch=1, indices=range(len(files)), sizes=sizes, view=view)
        for view, recipe in enumerate(recipes)
    )

    def made(recipe, plan):
        arguments = {"device": "cpu", "batch_size": len(files), "options": Options(threads=2)}
        each = backends.create(backend, recipe, **arguments)
        try:
            return each.submit(records, headers, plan).result(60)
        finally:
            each.close()

    together = made(gp.Views(*recipes), plans)
    assert not together.errors
    for recipe, plan, view in zip(recipes, plans, together.views, strict=True):
        alone = made(recipe, plan).images
        assert view.dtype == alone.dtype
        assert view.stride() == alone.stride()
        if backend == "dali" and exif == "apply":
            # Alone, DALI resizes what the file holds and turns that: the same sums in another order.
            apart = (view.float() - alone.float()).abs() * 255 * 0.23
            assert apart.max() <= (1.01 if recipe.precision == "uint8" else 0.25 if view is together.views[2] else 0.01)
        else:
            assert torch.equal(view, alone)


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["gpu", "cpu"])
def test_each_view_on_the_gpu_is_what_its_recipe_gives_alone(image_folder, where):
    arguments = {"batch_size": 4, "backend": "dali", "device": "cuda", "options": Options(decode=where)}
    with gp.Loader(image_folder, VIEWS, **arguments) as together, gp.Loader(image_folder, LARGE, **arguments) as alone:
        for (views, _), (wanted, _) in zip(together, alone, strict=True):
            assert all(view.is_cuda for view in views)
            assert torch.equal(views[0], wanted)


@each_backend
def test_an_image_is_decoded_once_for_all_views(backend, monkeypatch, image_folder):
    decoded = []
    real = decode.rgb

    def counting(data, header):
        if header.format != "PIXELS":
            decoded.append(1)
        return real(data, header)

    monkeypatch.setattr(decode, "rgb", counting)
    with loader(image_folder, VIEWS, backend, batch_size=4) as each:
        batches = list(each)
    assert len(batches) == 4
    assert len(decoded) == len(each.dataset) == 15


@each_backend
def test_a_backend_of_views_takes_a_plan_for_each_and_refuses_work_when_closed(backend):
    need(backend)
    data = images.jpeg(images.photo(40, 50))
    record, header = Record(data, 0, 0, "0"), scan(data)
    plan = gp.make_plan(LARGE, seed=0, epoch=0, indices=[0], sizes=[(40, 50)])
    each = backends.create(backend, gp.Views(LARGE, LARGE), device="cpu", batch_size=2)
    try:
        with pytest.raises(ConfigError, match="1 plans were given where this backend makes 2 views"):
            each.submit([record], [header], plan)
        with pytest.raises(ConfigError, match="2 plan rows make no batch"):
            each.submit([record], [header], (plan, plan.take([0, 0])))
        each.submit([record], [header], (plan, plan)).result(60)
    finally:
        each.close()
    each.close()
    with pytest.raises(BackendError, match="closed"):
        each.submit([record], [header], (plan, plan))


# In a Loader


@each_backend
def test_loader_gives_a_tuple_of_batches_and_affines(backend, image_folder):
    arguments = {"batch_size": 4, "shuffle": True, "fields": ("image", "label", "affine"), "seed": 3}
    with (
        loader(image_folder, VIEWS, backend, **arguments) as each,
        loader(image_folder, LARGE, backend, **arguments) as alone,
    ):
        for (views, labels, moves), (wanted, wanted_labels, wanted_moves) in zip(each, alone, strict=True):
            assert [tuple(view.shape[1:]) for view in views] == [(3, 32, 32), (3, 32, 32), (3, 12, 20), (3, 32, 32)]
            assert torch.equal(views[0], wanted)
            assert torch.equal(labels, wanted_labels)
            assert torch.equal(moves[0], wanted_moves)
            assert len(moves) == 4
            assert not torch.equal(views[0], views[1])
            assert not torch.equal(moves[0], moves[1])


def test_views_are_the_same_at_any_batch_size_and_after_a_resume(image_folder):
    def rows(each):
        return [row for views, _ in each for row in zip(*views, strict=True)]

    with loader(image_folder, VIEWS, "torchvision", batch_size=4, shuffle=True) as each:
        whole = rows(each)
    with loader(image_folder, VIEWS, "torchvision", batch_size=7, shuffle=True) as each:
        next(iter(each))
        state = each.state_dict()
    with loader(image_folder, VIEWS, "torchvision", batch_size=3, shuffle=True) as each:
        each.load_state_dict(state)
        rest = rows(each)
    assert len(rest) == len(whole) - 7
    for row, wanted in zip(rest, whole[7:], strict=True):
        assert all(map(torch.equal, row, wanted))
    other = gp.Views(LARGE, LARGE, SMALL, replace(ROUNDED, precision="float32"))
    with loader(image_folder, other, "torchvision", batch_size=4, shuffle=True) as each:
        with pytest.raises(StateError, match=r"views\[3\]\.precision was 'uint8' and is 'float32' here"):
            each.load_state_dict(state)


@each_backend
@pytest.mark.parametrize("policy", ["substitute", "ignore"])
def test_bad_samples_are_dealt_with_in_every_view(backend, policy):
    fields = ("image", "index", "valid")
    views, alone = gp.Views(LARGE, SMALL), LARGE
    arguments = {"on_error": policy, "batch_size": 5, "fields": fields}
    with loader(Mixed(), views, backend, **arguments) as each, loader(Mixed(), alone, backend, **arguments) as single:
        for (found, index, valid), (wanted, wanted_index, wanted_valid) in zip(each, single, strict=True):
            assert torch.equal(index, wanted_index)
            assert torch.equal(valid, wanted_valid)
            assert torch.equal(found[0], wanted)
            empty = ~found[1].flatten(1).any(dim=1)
            assert torch.equal(empty, ~valid if policy == "ignore" else torch.zeros_like(valid))
        assert {bad.index for bad in each.errors} >= set(BAD)
    with loader(Mixed(), views, backend, batch_size=5) as each, pytest.raises(gp.DecodeError, match="k3"):
        list(each)


def test_functions_belong_to_their_view(image_folder):
    views = gp.Views(LARGE, LARGE.then(halved))
    with loader(image_folder, views, "torchvision", batch_size=4) as each:
        halves = [batch[1] for batch, _ in each]
    with loader(image_folder, gp.Views(LARGE, LARGE), "torchvision", batch_size=4) as each:
        for (batch, _), half in zip(each, halves, strict=True):
            assert torch.equal(batch[1] / 2, half)


def test_collate_function_gets_the_views_of_a_sample_as_a_tuple(image_folder):
    with loader(image_folder, VIEWS, "torchvision", batch_size=4, collate=lambda rows: rows) as each:
        for (first, label), *_ in each:
            assert [tuple(image.shape) for image in first] == [(3, 32, 32), (3, 32, 32), (3, 12, 20), (3, 32, 32)]
            assert isinstance(label, int)


# Views themselves


def test_views_round_trip_and_have_an_identity_of_their_own():
    assert gp.Views.from_json(VIEWS.to_json()) == VIEWS
    assert hash(gp.Views(*VIEWS.recipes)) == hash(VIEWS)
    fingerprints = {gp.Views(LARGE).fingerprint, gp.Views(LARGE, SMALL).fingerprint, gp.Views(SMALL, LARGE).fingerprint}
    assert len(fingerprints | {LARGE.fingerprint}) == 4
    with_function = gp.Views(LARGE.then(halved))
    with pytest.raises(ConfigError, match="halved"):
        gp.Views.from_json(with_function.to_json())
    name = with_function.recipes[0].functions[0].name
    assert gp.Views.from_json(with_function.to_json(), functions={name: halved}) == with_function


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (gp.Views, "views=.* 1 to 65536 recipes"),
        (lambda: gp.Views([LARGE, LARGE]), "views="),
        (lambda: gp.Views(LARGE, replace(LARGE, exif="apply")), "exif=.*the same in all views"),
        (lambda: gp.Views(LARGE, replace(LARGE, mix=gp.MixUp())), "mix=.*None in each view"),
        (lambda: gp.Views.from_json("{}"), "text="),
        (lambda: gp.Views.from_json("nothing"), "text="),
    ],
)
def test_views_that_cannot_work_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
