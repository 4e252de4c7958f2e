"""Hypothesis strategies for recipes: every step, every order that is allowed, every field."""

from hypothesis import strategies as st

from gpupipe.recipe import Output, Recipe
from gpupipe.steps import (
    CenterCrop,
    ColorJitter,
    Grayscale,
    Normalize,
    RandomGrayscale,
    RandomHorizontalFlip,
    RandomResizedCrop,
    RandomVerticalFlip,
    Resize,
)

sides = st.integers(1, 400)
pairs = st.tuples(sides, sides)
sizes = sides | pairs
interpolations = st.sampled_from(["bilinear", "bicubic"])
probabilities = st.floats(0, 1)


def ranges(low: float, high: float) -> st.SearchStrategy[tuple[float, float]]:
    return st.tuples(st.floats(low, high), st.floats(low, high)).map(lambda pair: (min(pair), max(pair)))


random_crops = st.builds(
    RandomResizedCrop,
    sizes,
    scale=ranges(1e-3, 2.0),
    ratio=ranges(0.1, 10.0),
    interpolation=interpolations,
)
exact_resizes = st.builds(Resize, pairs, interpolation=interpolations)
short_resizes = st.builds(
    lambda size, more, interpolation: Resize(size, max_size=more and size + more, interpolation=interpolation),
    sides,
    st.none() | st.integers(1, 300),
    interpolations,
)
center_crops = st.builds(CenterCrop, sizes)
flips = st.builds(RandomHorizontalFlip, probabilities) | st.builds(RandomVerticalFlip, probabilities)
factors = st.none() | st.floats(0, 3) | ranges(0, 3)
jitters = st.builds(ColorJitter, factors, factors, factors, st.none() | st.floats(0, 0.5) | ranges(-0.5, 0.5))
colours = jitters | st.just(Grayscale()) | st.builds(RandomGrayscale, probabilities)
means = st.floats(-2, 2) | st.tuples(*[st.floats(-2, 2)] * 3)
stds = st.floats(1e-3, 4) | st.tuples(*[st.floats(1e-3, 4)] * 3)
normalizes = st.builds(Normalize, means, stds)
outputs = st.builds(
    Output,
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    memory_format=st.sampled_from(["contiguous", "channels_last"]),
)


@st.composite
def steps(draw: st.DrawFn) -> tuple:
    """Any order that a recipe allows."""
    geometry = draw(
        st.tuples(random_crops | exact_resizes)
        | st.tuples(center_crops)
        | st.tuples(random_crops | exact_resizes | short_resizes, center_crops)
    )
    found = [*geometry, *draw(st.lists(colours, max_size=3))]
    for flip in draw(st.lists(flips, max_size=2)):
        found.insert(draw(st.integers(0, len(found))), flip)
    return (*found, *draw(st.just(()) | st.tuples(normalizes)))


recipes = st.builds(
    Recipe,
    steps=steps(),
    precision=st.sampled_from(["float32", "uint8"]),
    exif=st.sampled_from(["ignore", "apply"]),
    output=outputs,
    notes=st.lists(st.text(max_size=5), max_size=2).map(tuple),
)
