"""What `recipe.notes` says: where a recipe's pixels are not bit for bit those of the transform it came from."""

# A level is 1/255 of the range. The figures are maxima and means over real photos (PARITY.md; 92 to 1000 of them).
NOTE_PIL_COLOUR = (
    "The colour steps ran on PIL images. They run here as torchvision runs them on uint8 tensors (precision='uint8'): "
    "both truncate after every step, which makes the image darker by 1.3 levels on average than float32 would, with "
    "single pixels up to 20 levels (PIL) and 8 levels (uint8) off; PIL and uint8 differ from each other by up to 14 "
    "levels, 0.4 on average. To be rid of the loss, convert to float32 before the colour steps."
)
NOTE_PIL_RESIZE = (
    "The resize ran on PIL images. It runs here as on uint8 tensors, which differs by up to 2 levels (bicubic crops: "
    "16), 0.02 on average."
)
NOTE_V1_UINT8 = (
    "torchvision.transforms (v1) and its v2, which runs here, round uint8 tensors at different points: up to 1 level "
    "of difference behind the resize, 0.15 on average, and up to 9 levels behind ColorJitter(0.4, 0.4, 0.4, 0.1). "
    "RandomAdjustSharpness, RandomAutocontrast and GaussianBlur differ by up to 1 level."
)
NOTE_UNROUNDED = (
    "The resize is not rounded to whole levels here, as it is on PIL images and uint8 tensors: up to 1 level of "
    "difference, 0.28 on average, without bias."
)
NOTE_UNROUNDED_COLOUR = (
    "The colour steps that follow on float32 can enlarge that difference: up to 5 levels were seen with "
    "ColorJitter(0.4, 0.4, 0.4, 0.1)."
)
NOTE_BICUBIC = (
    "Bicubic overshoots at sharp edges. PIL images and uint8 tensors cut that off after each of two passes, float32 "
    "once at the end: up to 18 levels of difference at such pixels, 0.28 on average as without."
)
NOTE_BICUBIC_CLAMP = (
    "Bicubic overshoots at sharp edges. torchvision leaves float tensors outside [0, 1] there; a recipe clamps them: "
    "up to 32 levels of difference at such pixels, 0.01 on average."
)
NOTE_ANTIALIAS = "antialias=False has no effect on PIL images, which torchvision always resizes with antialiasing."
NOTE_FLIP_MOVED = "A flip stood behind Normalize and was moved before it: the pixels are the same."
NOTE_FLIP_BEFORE_ERASING = (
    "A flip stood behind RandomErasing and was moved before it: the boxes are as likely in one place as in the "
    "mirrored one, so the distribution is the same."
)
NOTE_PIL_GEOMETRY = (
    "Rotations, shears and shifts ran on PIL images. They run here as torchvision runs them on uint8 tensors. With "
    "nearest neighbours, shears and shifts are equal, and rotations take another neighbour for 0.2 % of the pixels. "
    "With bilinear interpolation, pixels differ by up to 1 level inside the image (0.5 on average), and by far more "
    "along its slanted edges, where tensors blend with what comes in from outside and PIL does not: 0.8 % of them."
)
NOTE_PIL_TONES = (
    "Operations on tones ran on PIL images. They run here as torchvision runs them on uint8 tensors: contrast, "
    "saturation and autocontrast within 1 level of PIL (0.2 on average at most), all others equal to it."
)
NOTE_ERASING_MOVED = (
    "RandomErasing stood before Normalize. It runs behind it, with the value that Normalize makes of the one given: "
    "the pixels are the same."
)
NOTE_FULL_RANGE = (
    "The image was converted without scale=True, so mean and std were for pixels from 0 to 255. They were divided by "
    "255: the result is the same."
)
NOTE_HALF_NORMALIZE = (
    "Normalize ran on {dtype}. It runs here on float32 and is rounded to {dtype} once, at the end: nearer to the exact "
    "value, and different by the rounding of {dtype}."
)
