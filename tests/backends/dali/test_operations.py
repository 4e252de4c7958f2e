"""Operations and erasing behind the graph, against the reference."""

import dataclasses

import numpy as np
import pytest
import torch

import gpupipe as gp
from gpupipe import Output, Recipe
from gpupipe.backends.torchvision_cpu import decode_and_apply
from tests import images
from tests.backends.dali.common import assert_within, backend, lsb, planned, records_of, run

GEOMETRY = (gp.RandomResizedCrop(48), gp.RandomHorizontalFlip())
RECIPES = {
    "TrivialAugment": (*GEOMETRY, gp.TrivialAugmentWide(), gp.Normalize(), gp.RandomErasing(p=0.8)),
    "RandAugment": (*GEOMETRY, gp.RandAugment(interpolation="bilinear"), gp.Normalize()),
    "AutoAugment": (*GEOMETRY, gp.AutoAugment(), gp.Normalize(), gp.RandomErasing(p=0.8, value="pixels")),
    "jitter, grey, blur": (
        *GEOMETRY,
        gp.RandomApply([gp.ColorJitter(0.8, 0.8, 0.8, 0.2)], p=0.8),
        gp.RandomGrayscale(0.2),
        gp.GaussianBlur(5),
        gp.ColorJitter(0.4, 0.4, 0.4, 0.1),
        gp.RandomVerticalFlip(),
        gp.RandomSolarize(0.5),
        gp.Normalize(),
    ),
    "border": (gp.Resize((44, 44)), gp.RandomCrop(48, padding=6, padding_mode="reflect"), gp.RandomEqualize()),
    "erasing alone": (*GEOMETRY, gp.Normalize(), gp.RandomErasing(p=0.8, value="channels")),
}
NAMES = pytest.mark.parametrize("name", RECIPES)


def files(count=24):
    return records_of([images.jpeg(images.photo(70 + 3 * n, 110 - 2 * n, n)) for n in range(count)])


def references(records, plan, recipe):
    """What the torchvision backend makes of each record."""
    headers = planned(recipe, records)[0]
    found = torch.empty(len(records), 3, *recipe.output_size, dtype=getattr(torch, recipe.output.dtype))
    for row, record in enumerate(records):
        decode_and_apply(recipe, record, headers[row], plan, row, found[row])
    return found


@NAMES
def test_float_chain_equals_the_reference(name):
    """0.05 LSB, but for 0.1 % of the values: where a threshold or a nearest pixel decides."""
    recipe, records = Recipe(steps=RECIPES[name]), files()
    _, plan = planned(recipe, records)
    difference = lsb(run(recipe, records, plan), references(records, plan, recipe), recipe)
    assert (difference > 0.05).double().mean() <= 1e-3
    assert np.quantile(difference.numpy(), 0.998) < 0.05


@NAMES
def test_uint8_chain_without_a_resize_equals_the_reference(name):
    """The resize rounds otherwise than torchvision's. Without it nothing is left but the blur's last bits."""
    steps = (gp.CenterCrop(48), *(step for step in RECIPES[name] if step.STAGE not in ("crop", "center")))
    steps = tuple(step for step in steps if not isinstance(step, gp.RandomApply))  # its jitter is the graph's
    recipe, records = Recipe(steps=steps, precision="uint8"), files()
    _, plan = planned(recipe, records)
    difference = lsb(run(recipe, records, plan), references(records, plan, recipe), recipe)
    assert (difference > 1e-3).double().mean() <= (1e-3 if "blur" in name else 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@NAMES
def test_output_types(name, dtype, memory_format):
    recipe, records = Recipe(steps=RECIPES[name]), files(5)
    plan = planned(recipe, records)[1]
    narrow = dataclasses.replace(recipe, output=Output(dtype=dtype, memory_format=memory_format))
    found = run(narrow, records, plan)
    assert torch.equal(found, run(recipe, records, plan).to(found.dtype))
    layout = torch.channels_last if memory_format == "channels_last" else torch.contiguous_format
    assert found.is_contiguous(memory_format=layout)
    assert found.dtype == getattr(torch, dtype)


@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("name", ["AutoAugment", "jitter, grey, blur"])
def test_rows_do_not_depend_on_the_batch(name, precision):
    recipe, records = Recipe(steps=RECIPES[name], precision=precision), files(14)
    plan = planned(recipe, records)[1]
    whole = run(recipe, records, plan)
    for batch_size in (1, 5):
        assert torch.equal(run(recipe, records, plan, batch_size=batch_size), whole)


@NAMES
def test_undecodable_rows_are_zero_and_the_others_untouched(name):
    recipe, records = Recipe(steps=RECIPES[name]), files(6)
    headers, plan = planned(recipe, records)
    expected = run(recipe, records, plan)
    whole = records[3].data
    records[3] = dataclasses.replace(records[3], data=whole[: len(whole) // 2])
    with backend(recipe) as dali:
        applied = dali.submit(records, headers, plan).result()
    assert list(applied.errors) == [3]
    expected[3] = 0
    assert torch.equal(applied.images, expected)


def test_batches_stay_as_they_were_handed_out():
    recipe, records = Recipe(steps=RECIPES["TrivialAugment"]), files(6)
    headers, plan = planned(recipe, records)
    with backend(recipe) as dali:
        first = dali.submit(records, headers, plan).result().images
        before = first.clone()
        for _ in range(5):
            dali.submit(records, headers, plan).result()
        assert torch.equal(first, before)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "uint8"])
@NAMES
def test_gpu_equals_dalis_own_cpu_operators(name, precision):
    recipe, records = Recipe(steps=RECIPES[name], precision=precision), files()
    plan = planned(recipe, records)[1]
    found = run(recipe, records, plan, device=torch.device("cuda", 0), decode="cpu").cpu()
    difference = lsb(found, run(recipe, records, plan), recipe)
    assert (difference > (0.1 if precision == "float32" else 1.001)).double().mean() <= (
        2e-3 if precision == "float32" else 0.02
    )


@pytest.mark.gpu
def test_gpu_batches_stay_as_they_were_while_the_stream_is_busy():
    """Operations run on the hand-over's stream; a batch that is handed out is finished, whatever else is queued."""
    recipe, records = Recipe(steps=RECIPES["AutoAugment"]), files()
    headers, plan = planned(recipe, records)
    device = torch.device("cuda", 0)
    with backend(recipe, device=device, decode="cpu", prefetch=4) as dali:
        expected = dali.submit(records, headers, plan).result().images.cpu()
        futures = [dali.submit(records, headers, plan) for _ in range(20)]
        busy = torch.randn(4096, 4096, device=device)
        for future in futures:
            found = future.result().images
            busy = busy @ busy.T / 4096
            assert_within(found.cpu(), expected, recipe, 0)
