"""The definition for a GPU, as far as DALI takes it without one: every operator is looked up and its arguments checked.

What is left for a machine with a GPU is instantiating the operators and running them.
"""

import itertools

import pytest

from gpupipe import (
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
    Normalize,
    Output,
    RandomCrop,
    RandomEqualize,
    RandomErasing,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Recipe,
    Resize,
    TrivialAugmentWide,
)
from gpupipe.backends.dali import graph
from gpupipe.backends.dali.feed import Feed
from tests import images
from tests.backends.dali.common import planned, records_of

GPU_DECODE = graph.Placement(decode="gpu", rest="gpu", device_id=None)
HARDWARE_DECODE = graph.Placement(decode="hardware", rest="gpu", device_id=None)
HOST_DECODE = graph.Placement(decode="cpu", rest="gpu", device_id=None)
ALL_ON_CPU = graph.Placement(decode="cpu", rest="cpu", device_id=None)
JITTER = ColorJitter(0.4, 0.4, 0.4, 0.1)

STEPS = {
    "train": (RandomResizedCrop(32), RandomHorizontalFlip(), Normalize()),
    "train jitter": (RandomResizedCrop(32), JITTER, Normalize()),
    "jitter without hue": (RandomResizedCrop(32), ColorJitter(0.4, 0.4), Normalize()),
    "hue": (RandomResizedCrop(32), ColorJitter(hue=0.1)),
    "colour zoo": (CenterCrop(32), RandomGrayscale(0.5), JITTER, Grayscale(), ColorJitter(hue=0.1, contrast=1)),
    "eval": (Resize(40), CenterCrop(32), Normalize()),
    "operations": (RandomResizedCrop(32), TrivialAugmentWide(), GaussianBlur(3), Normalize(), RandomErasing()),
    "jitter and operations": (RandomResizedCrop(32), JITTER, RandomEqualize(), JITTER, Normalize()),
    "border": (Resize(40), RandomCrop(32, padding=4, fill=0.5), Normalize()),
    "erasing": (RandomResizedCrop(32), Normalize(), RandomErasing(value="pixels")),
    "eval bicubic": (Resize((32, 32), interpolation="bicubic"), RandomVerticalFlip(), Normalize()),
}


def operators(recipe, placement):
    """The serialised graph's operators, in DALI's text form."""
    pipeline = graph.build(recipe, placement, batch_size=4, threads=1)
    assert pipeline.serialize()
    return pipeline._ops


def kind_of(operator):
    return type(operator._op).__name__


def device_of(operator):
    return operator.outputs[0].device


@pytest.mark.parametrize("placement", [GPU_DECODE, HARDWARE_DECODE, HOST_DECODE], ids=["gpu", "hardware", "cpu"])
@pytest.mark.parametrize("precision", ["float32", "uint8"])
@pytest.mark.parametrize("name", STEPS)
def test_graph_for_a_gpu_is_accepted_by_dali(name, precision, placement):
    for exif, memory_format in itertools.product(("ignore", "apply"), ("contiguous", "channels_last")):
        recipe = Recipe(steps=STEPS[name], precision=precision, exif=exif, output=Output(memory_format=memory_format))
        found = operators(recipe, placement)
        assert device_of(found[-1]) == "gpu"


@pytest.mark.parametrize("name", STEPS)
def test_graph_is_the_same_on_the_gpu_as_on_the_cpu_from_the_decoder_on(name):
    """The tests on CPU operators hold for the GPU's graph, because the two differ in nothing but the device."""

    def kinds(placement):
        found = [kind_of(operator) for operator in operators(Recipe(steps=STEPS[name]), placement)]
        return found[found.index("Merge") :]

    assert kinds(GPU_DECODE) == kinds(ALL_ON_CPU) == kinds(HOST_DECODE)


@pytest.mark.parametrize("name", STEPS)
def test_graph_for_a_gpu_computes_nothing_on_the_host_behind_the_decoder(name):
    for operator in operators(Recipe(steps=STEPS[name]), GPU_DECODE):
        kind = kind_of(operator)
        if device_of(operator) == "cpu":
            assert kind in ("ExternalSource", "Split"), kind


@pytest.mark.parametrize("exif", ["ignore", "apply"])
@pytest.mark.parametrize("name", STEPS)
def test_graph_inputs_are_exactly_what_is_fed(name, exif):
    recipe = Recipe(steps=STEPS[name], exif=exif)
    inputs = {operator.name for operator in operators(recipe, GPU_DECODE) if not operator.inputs}
    inputs = {given for given in inputs if not given.startswith("__Constant")}
    records = records_of([images.jpeg(images.photo(40, 50)), images.encode(images.photo(40, 50), "PNG")])
    headers, plan = planned(recipe, records)
    feed = Feed(recipe, records, headers, plan, in_part=True)
    assert set(feed.arrays({1: feed.region(1)}, {})) == inputs


def test_graph_has_nothing_in_it_that_the_recipe_does_not_need():
    found = operators(Recipe(steps=STEPS["train"]), ALL_ON_CPU)
    plain = [kind_of(operator) for operator in found]
    assert plain.count("BrightnessContrast") == 0
    assert plain.count("Transpose") == 0
    assert len(plain) < 40
