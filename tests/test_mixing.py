"""MixUp and CutMix against torchvision's, their draws, and what the Loader makes of them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision.transforms import v2

import gpupipe as gp
from gpupipe.errors import ConfigError, StateError
from gpupipe.mixing import Mixture, beta, draw_mixture, mix_images, soft_labels
from tests.available import each_backend
from tests.fakes import MemorySource
from tests.test_on_error import BAD, Mixed

RECIPE = gp.Recipe.train(size=24)
MIXED = replace(RECIPE, mix=(gp.MixUp(0.2), gp.CutMix(1.0)))
ALL = np.ones(6, np.bool_)
MIXTURES = (Mixture(0.3), Mixture(0.75, (2, 3, 8, 5)), Mixture(1.0, (4, 4, 0, 0)))


def reference(mixture, images, labels, num_classes):
    """What torchvision's transforms make of a batch with these parameters."""
    transform = (v2.MixUp if mixture.box is None else v2.CutMix)(num_classes=num_classes)
    parameters = {"labels": labels, "batch_size": len(labels), "lam": mixture.own, "lam_adjusted": mixture.own}
    if mixture.box is not None:
        top, left, height, width = mixture.box
        parameters["box"] = (left, top, left + width, top + height)
    return transform.transform(images, parameters), transform.transform(labels, parameters)


def batch(dtype=torch.float32, memory_format=torch.contiguous_format, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(6, 3, 16, 12, generator=generator).to(device, dtype).contiguous(memory_format=memory_format)
    return images, torch.tensor([4, 0, 0, 9, 2, 4], device=device)


def uniforms(seed=0):
    generator = np.random.default_rng(seed)
    while True:
        yield generator.random()


# Images and labels


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_mixed_batch_is_torchvisions_bit_for_bit(mixture, memory_format, dtype):
    images, labels = batch(dtype, memory_format)
    wanted, wanted_labels = reference(mixture, images, labels, 10)
    mix_images(images, mixture, ALL)
    assert torch.equal(images, wanted)
    assert images.is_contiguous(memory_format=memory_format)
    assert images.dtype == dtype
    assert torch.equal(soft_labels(labels, mixture, ALL, 10), wanted_labels)


@pytest.mark.gpu
@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_mixed_batch_on_the_gpu_is_torchvisions_bit_for_bit(mixture):
    images, labels = batch(device="cuda")
    wanted, wanted_labels = reference(mixture, images, labels, 10)
    mix_images(images, mixture, ALL)
    assert torch.equal(images, wanted)
    assert torch.equal(soft_labels(labels, mixture, ALL, 10), wanted_labels)


@pytest.mark.parametrize("mixture", MIXTURES, ids=str)
def test_rows_that_are_not_usable_are_neither_mixed_nor_partners(mixture):
    images, labels = batch()
    usable = np.array([True, False, True, True, False, True])
    labels[[1, 4]] = -100
    wanted, wanted_labels = reference(mixture, images[usable], labels[usable], 10)
    before = images.clone()
    mix_images(images, mixture, usable)
    soft = soft_labels(labels, mixture, usable, 10)
    assert torch.equal(images[usable], wanted)
    assert torch.equal(images[~usable], before[~usable])
    assert torch.equal(soft[usable], wanted_labels)
    assert not soft[~usable].any()


def test_batch_of_one_row_or_without_usable_ones_stays_as_it_is():
    for mixture in MIXTURES:
        images, labels = batch()
        before = images.clone()
        mix_images(images, mixture, ~ALL)
        assert torch.equal(images, before)
        assert not soft_labels(labels, mixture, ~ALL, 10).any()
        mix_images(images[:1], mixture, ALL[:1])
        torch.testing.assert_close(images, before)


# What is drawn


# Not below 0.1: Beta(0.05, 0.05) has 8 % of its mass so close to 1 that a float64 is 1.
@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.8, 1.0, 1.2, 4.0, 300.0])
def test_beta_is_distributed_as_it_should_be(alpha):
    numbers = uniforms()
    found = [beta(alpha, numbers) for _ in range(4000)]
    assert min(found) >= 0
    assert max(found) <= 1
    assert stats.kstest(found, stats.beta(alpha, alpha).cdf).pvalue > 0.01


def test_beta_of_a_tiny_alpha_is_0_or_1():
    numbers = uniforms()
    found = np.array([beta(1e-6, numbers) for _ in range(400)])
    assert set(found.round(9)) == {0.0, 1.0}
    assert 150 < found.sum() < 250


def test_cutmix_is_drawn_as_torchvision_draws_it():
    torch.manual_seed(0)
    transform = v2.CutMix(alpha=0.7, num_classes=2)
    image = torch.zeros(1, 3, 48, 36)
    theirs = [transform.make_params([image]) for _ in range(3000)]
    mix = gp.Mix(choices=(gp.CutMix(0.7),))
    mine = [draw_mixture(mix, seed=0, epoch=0, position=n, size=(48, 36)) for n in range(3000)]
    boxes = np.array([mixture.box for mixture in mine])
    assert (boxes >= 0).all()
    assert (boxes[:, 0] + boxes[:, 2]).max() == 48
    assert (boxes[:, 1] + boxes[:, 3]).max() == 36
    own = [mixture.own for mixture in mine]
    np.testing.assert_allclose(own, 1 - boxes[:, 2] * boxes[:, 3] / (48 * 36))
    their_boxes = np.array([p["box"] for p in theirs])  # left, top, right, bottom
    for mine_, theirs_ in (
        (own, [p["lam_adjusted"] for p in theirs]),
        (boxes[:, 1], their_boxes[:, 0]),
        (boxes[:, 0], their_boxes[:, 1]),
        (boxes[:, 3], their_boxes[:, 2] - their_boxes[:, 0]),
        (boxes[:, 2], their_boxes[:, 3] - their_boxes[:, 1]),
    ):
        assert stats.ks_2samp(mine_, theirs_).pvalue > 0.01


def test_draws_keep_to_probability_and_weights():
    mix = gp.Mix(choices=(gp.MixUp(), gp.CutMix(), gp.MixUp()), weights=(1, 3, 0), p=0.5)
    found = [draw_mixture(mix, seed=3, epoch=1, position=n, size=(8, 8)) for n in range(2000)]
    cut = sum(mixture is not None and mixture.box is not None for mixture in found)
    unmixed = sum(mixture is None for mixture in found)
    assert 900 < unmixed < 1100
    assert 680 < cut < 820


def test_draws_are_part_of_the_pixels():
    """Values of this version: they must never change."""
    mix = gp.Mix(choices=(gp.MixUp(0.2), gp.CutMix(1.0), gp.MixUp(4.0)))
    found = [draw_mixture(mix, seed=1, epoch=2, position=n, size=(224, 224)) for n in (0, 5, 6, 1 << 40)]
    assert [mixture.box for mixture in found] == [None, None, (0, 91, 59, 78), (79, 35, 20, 20)]
    own = [0.48356955069794905, 0.9968063065102951, 0.9082828443877551, 0.9920280612244898]
    np.testing.assert_allclose([mixture.own for mixture in found], own, rtol=1e-12)
    above_1 = draw_mixture(gp.Mix(choices=gp.MixUp(4.0)), seed=1, epoch=2, position=7, size=(8, 8))
    assert above_1.own == pytest.approx(0.7078942372272569, rel=1e-12)


# In a Loader


@pytest.fixture
def make(image_folder):
    made = []

    def loader(recipe=MIXED, source=image_folder, **arguments):
        arguments = {"batch_size": 4, "backend": "torchvision", "device": "cpu", "shuffle": True} | arguments
        made.append(gp.Loader(source, recipe, **arguments))
        return made[-1]

    yield loader
    for each in made:
        each.close()


@each_backend
def test_loader_mixes_what_it_makes_without(make, backend):
    plain, mixed = list(make(RECIPE, backend=backend)), list(make(backend=backend))
    position, kinds = 0, set()
    for (images, labels), (found, soft) in zip(plain, mixed, strict=True):
        mixture = draw_mixture(MIXED.mix, seed=0, epoch=0, position=position, size=(24, 24))
        wanted, wanted_soft = reference(mixture, images, labels, 3)
        assert torch.equal(found, wanted)
        assert torch.equal(soft, wanted_soft)
        position += len(labels)
        kinds.add(mixture.box is None)
    assert len(kinds) == 2


def test_loader_gives_soft_labels_to_batches_that_are_not_mixed(make):
    mix = gp.Mix(choices=gp.MixUp(), p=0, num_classes=5)
    for (images, labels), (found, soft) in zip(make(RECIPE), make(replace(RECIPE, mix=mix)), strict=True):
        assert torch.equal(found, images)
        assert torch.equal(soft, torch.nn.functional.one_hot(labels, 5).float())


def test_loader_resumed_mixes_as_if_nothing_had_happened(make):
    whole = list(make())
    loader = make()
    batches = iter(loader)
    next(batches)
    next(batches)
    state = loader.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    for (images, labels), (found, soft) in zip(whole[2:], resumed, strict=True):
        assert torch.equal(found, images)
        assert torch.equal(soft, labels)
    with pytest.raises(StateError, match=r"mix.* was .*0\.2.* and is"):
        make(replace(RECIPE, mix=gp.MixUp(0.4))).load_state_dict(state)


def test_loader_of_other_ranks_epochs_and_seeds_mixes_otherwise(make):
    def shares(rank=0, epoch=0, seed=0):
        loader = make(replace(RECIPE, mix=gp.MixUp()), sharding=gp.Sharding(rank=rank, world_size=2), seed=seed)
        loader.set_epoch(epoch)
        return [tuple(soft.sort(descending=True).values[0].tolist()) for _, soft in loader]

    found = [shares(), shares(rank=1), shares(epoch=1), shares(seed=1)]
    assert shares() == found[0]
    assert len(set(map(tuple, found))) == 4


def test_padding_takes_part_but_for_pad_mask(make):
    fields = ("image", "label", "valid")
    for pad, world_size, batch_size in (("repeat", 2, 8), ("mask", 1, 8)):
        sharding = gp.Sharding(rank=world_size - 1, world_size=world_size, pad=pad)
        arguments = {"sharding": sharding, "batch_size": batch_size, "fields": fields}
        mix = replace(RECIPE, mix=gp.MixUp(1.0))
        (plain, labels, _), (images, soft, valid) = (list(make(one, **arguments))[-1] for one in (RECIPE, mix))
        assert not valid.all()
        if pad == "repeat":
            torch.testing.assert_close(soft.sum(dim=1), torch.ones(len(soft)))
            assert (images != plain).any(dim=(1, 2, 3)).all()
        else:
            torch.testing.assert_close(soft.sum(dim=1), valid.float())
            assert torch.equal(images[~valid], plain[~valid])
            mixture = draw_mixture(mix.mix, seed=0, epoch=0, position=8, size=(24, 24))
            wanted, wanted_soft = reference(mixture, plain[valid], labels[valid], 3)
            assert torch.equal(images[valid], wanted)
            assert torch.equal(soft[valid], wanted_soft)


@each_backend
def test_ignored_rows_stay_zeros_and_leak_into_no_other(make, backend):
    fields = ("image", "label", "valid", "index")
    arguments = {"source": Mixed(), "backend": backend, "on_error": "ignore", "fields": fields, "batch_size": 8}
    mixed = replace(RECIPE, mix=gp.Mix(choices=gp.MixUp(1.0), num_classes=5))
    position = met = 0
    for plain, found in zip(make(RECIPE, **arguments), make(mixed, **arguments), strict=True):
        images, labels, valid, index = plain
        assert torch.equal(found[3], index)
        assert not found[0][~valid].any()
        assert not found[1][~valid].any()
        mixture = draw_mixture(mixed.mix, seed=0, epoch=0, position=position, size=(24, 24))
        wanted, soft = reference(mixture, images[valid], labels[valid], 5)
        assert torch.equal(found[0][valid], wanted)
        assert torch.equal(found[1][valid], soft)
        position, met = position + len(index), met + int((~valid).sum())
    assert met == len(BAD)


def test_substitutes_are_mixed_as_the_samples_they_are(make):
    arguments = {"source": Mixed(), "on_error": "substitute", "batch_size": 8}
    mixed = replace(RECIPE, mix=gp.Mix(choices=gp.CutMix(1.0), num_classes=5))
    position = 0
    for (images, labels), (found, soft) in zip(make(RECIPE, **arguments), make(mixed, **arguments), strict=True):
        mixture = draw_mixture(mixed.mix, seed=0, epoch=0, position=position, size=(24, 24))
        wanted, wanted_soft = reference(mixture, images, labels, 5)
        assert torch.equal(found, wanted)
        assert torch.equal(soft, wanted_soft)
        position += len(labels)


def test_without_labels_images_are_mixed_all_the_same(make):
    with_labels = [images for images, _ in make()]
    assert all(torch.equal(one, other) for one, (other,) in zip(with_labels, make(fields=("image",)), strict=True))


def test_collate_function_gets_soft_labels_row_by_row(make):
    for (images, soft), made in zip(make(), make(collate=lambda rows: rows), strict=True):
        assert torch.equal(torch.stack([image for image, _ in made]), images)
        assert torch.equal(torch.stack([label for _, label in made]), soft)


def test_plain_labels_can_be_had_beside_the_soft_ones(make):
    collate = gp.Collate(columns={"target": gp.Stack(column="label")})
    unmixed = replace(RECIPE, mix=gp.Mix(choices=gp.MixUp(), p=0))
    for _, soft, target in make(unmixed, collate=collate, fields=("image", "label", "target")):
        assert torch.equal(soft.argmax(dim=1), target)
    with pytest.raises(ConfigError, match="give the plain labels another name"):
        make(unmixed, collate=gp.Collate(columns={"label": gp.Keep()}))


@pytest.mark.parametrize("output", [("float16", "channels_last"), ("bfloat16", "contiguous")])
def test_type_and_memory_format_of_the_batch_stay(make, output):
    recipe = replace(MIXED, output=gp.Output(dtype=output[0], memory_format=output[1]))
    for images, soft in make(recipe):
        assert images.dtype == getattr(torch, output[0])
        assert images.is_contiguous(memory_format=getattr(torch, f"{output[1]}_format", torch.channels_last))
        assert soft.dtype == torch.float32


def test_classes_that_are_not_known_must_be_given(make):
    with pytest.raises(ConfigError, match=r"does not say how many classes there are.*Mix\(num_classes=\.\.\.\)"):
        make(source=MemorySource(8))
    few = replace(RECIPE, mix=gp.Mix(choices=gp.MixUp(), num_classes=2))
    with pytest.raises(ConfigError, match=r"the label 2 cannot be mixed.*from 0 to num_classes - 1, which is 1"):
        list(make(few))


def test_labels_that_are_no_integers_are_refused(make):
    mixed = replace(RECIPE, mix=gp.Mix(choices=gp.MixUp(), num_classes=5))
    with pytest.raises(ConfigError, match=r"makes soft labels from one number for each sample.*float64"):
        make(mixed, source=Mixed(label=float))

    class Unknown(Mixed):
        labels = None

    with pytest.raises(ConfigError, match=r"labels of torch.float\d+ .* cannot be mixed"):
        list(make(mixed, source=Unknown(label=float), on_error="substitute"))


# In a recipe


def test_mix_round_trips_and_is_part_of_the_identity():
    mix = gp.Mix(choices=(gp.MixUp(0.2), gp.CutMix(1.0)), weights=(1, 2), p=0.9, num_classes=7)
    for value in (gp.MixUp(0.3), [gp.CutMix(), gp.MixUp(0.3)], mix):
        recipe = replace(RECIPE, mix=value)
        assert gp.Recipe.from_json(recipe.to_json()) == recipe
        assert recipe.fingerprint != RECIPE.fingerprint
    assert "mix" not in RECIPE.to_dict()


@pytest.mark.parametrize(
    ("make_it", "said"),
    [
        (lambda: gp.MixUp(0), "alpha=0 is not valid"),
        (lambda: gp.CutMix(float("nan")), "alpha=nan is not valid"),
        (lambda: gp.Mix(choices=()), "mix.choices"),
        (lambda: gp.Mix(choices=(gp.MixUp(),), weights=(1, 2)), "None or 1 weights"),
        (lambda: gp.Mix(choices=(gp.MixUp(),), weights=(0,)), "one of them positive"),
        (lambda: gp.Mix(choices=(gp.MixUp(), gp.CutMix()), weights=(1e308, 1e308)), "mix.weights"),
        (lambda: gp.Mix(choices=(gp.MixUp(),), p=2), "mix.p"),
        (lambda: gp.Mix(choices=(gp.MixUp(),), num_classes=0), "mix.num_classes"),
        (lambda: replace(RECIPE, mix="MixUp"), "mix='MixUp'"),
        (lambda: gp.Recipe.from_json(RECIPE.to_json().replace('"notes"', '"mix": {"choices": [1]}, "notes"')), "mix="),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(make_it, said):
    with pytest.raises(ConfigError, match=said):
        make_it()
