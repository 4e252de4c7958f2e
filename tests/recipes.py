"""Hypothesis strategies for recipes: every step, every order that is allowed, every field."""

from hypothesis import strategies as st

from gpupipe.recipe import Output, Recipe, fixed_size
from gpupipe.steps import (
    AutoAugment,
    CenterCrop,
    ColorJitter,
    GaussianBlur,
    Grayscale,
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
    Step,
    TrivialAugmentWide,
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
samplings = st.sampled_from(["nearest", "bilinear"])
levels = st.integers(0, 255).map(lambda level: level / 255)  # what uint8 images can have
fills = st.none() | levels | st.tuples(levels, levels, levels)
points = st.none() | st.tuples(st.floats(0, 50), st.floats(0, 50))
angles = st.floats(0, 180) | ranges(-360, 360)
moved = {"interpolation": samplings, "fill": fills}
# Any image: what is missing is added.
padded_crops = st.builds(
    RandomCrop,
    sizes,
    padding=st.none() | st.integers(0, 9) | st.tuples(*[st.integers(0, 9)] * 2) | st.tuples(*[st.integers(0, 9)] * 4),
    pad_if_needed=st.just(value=True),
    fill=levels | st.tuples(levels, levels, levels),
)
operations = st.one_of(
    st.builds(RandomInvert, probabilities),
    st.builds(RandomAutocontrast, probabilities),
    st.builds(RandomEqualize, probabilities),
    st.builds(RandomSolarize, levels, probabilities),
    st.builds(RandomPosterize, st.integers(0, 8), probabilities),
    st.builds(RandomAdjustSharpness, st.floats(0, 3), probabilities),
    st.builds(RandomRotation, angles, center=points, **moved),
    st.builds(
        RandomAffine,
        angles,
        translate=st.none() | st.tuples(st.floats(0, 1), st.floats(0, 1)),
        scale=st.none() | ranges(0.5, 2),
        shear=st.none() | st.floats(0, 40) | ranges(-40, 40) | st.tuples(*[st.just(-1), st.just(1)] * 2),
        center=points,
        **moved,
    ),
    st.builds(TrivialAugmentWide, st.integers(2, 40), **moved),
    st.builds(RandAugment, st.integers(0, 3), st.integers(0, 9), st.integers(10, 31), **moved),
    st.builds(AutoAugment, st.sampled_from(["imagenet", "cifar10", "svhn"]), **moved),
)
erasings = st.builds(
    RandomErasing,
    probabilities,
    scale=ranges(0, 1),
    ratio=ranges(0.1, 5),
    value=st.floats(-2, 2) | st.tuples(*[st.floats(-2, 2)] * 3) | st.sampled_from(["pixels", "channels"]),
)


def choices(steps: st.SearchStrategy[Step]) -> st.SearchStrategy[Step]:
    """RandomApply and RandomChoice of some steps."""
    weights = st.integers(1, 5).map(float)
    some = st.lists(steps, min_size=1, max_size=3).map(tuple)
    weighted = st.lists(st.tuples(steps, weights), min_size=1, max_size=3)
    return (
        st.builds(RandomApply, some, probabilities)
        | st.builds(RandomChoice, some)
        | weighted.map(lambda pairs: RandomChoice(*zip(*pairs, strict=True)))
    )


@st.composite
def blurs(draw: st.DrawFn, size: tuple[int, int]) -> GaussianBlur:
    """A kernel for which the image is large enough."""
    kernel = [2 * draw(st.integers(0, min(side - 1, 12))) + 1 for side in size]
    return GaussianBlur(kernel, draw(st.floats(0.1, 3) | ranges(0.1, 3)))


@st.composite
def bordered_crops(draw: st.DrawFn) -> tuple[Step, Step]:
    """A resize, and a crop out of that with a border of any kind."""
    borders = draw(st.tuples(*[st.integers(0, 5)] * 4))
    size = draw(st.tuples(st.integers(11, 40), st.integers(11, 40)))
    resized = tuple(side + draw(st.integers(0, 9)) for side in size)
    mode = draw(st.sampled_from(["constant", "edge", "reflect", "symmetric"]))
    return Resize(resized), RandomCrop(size, padding=borders, padding_mode=mode, fill=draw(levels))


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
        | st.tuples(center_crops | padded_crops)
        | st.tuples(random_crops | exact_resizes | short_resizes, center_crops | padded_crops)
        | bordered_crops()
    )
    plain = colours | operations | flips | blurs(fixed_size(geometry))
    one = plain | choices(plain) | choices(choices(plain))
    found = [*geometry, *draw(st.lists(colours, max_size=2) | st.lists(one, max_size=3))]
    for flip in draw(st.lists(flips, max_size=2)):
        found.insert(draw(st.integers(0, len(found))), flip)
    return (*found, *draw(st.just(()) | st.tuples(normalizes)), *draw(st.lists(erasings, max_size=2)))


recipes = st.builds(
    Recipe,
    steps=steps(),
    precision=st.sampled_from(["float32", "uint8"]),
    exif=st.sampled_from(["ignore", "apply"]),
    output=outputs,
    notes=st.lists(st.text(max_size=5), max_size=2).map(tuple),
)
