"""Batch tensors: theirs who hold them, and used again when nobody does."""

import gc

import numpy as np
import pytest
import torch

from gpupipe import CenterCrop, Output, Recipe
from gpupipe.backends.batch_memory import KEPT, BatchMemory

CPU = torch.device("cpu")


def memory(batch_size=4, **output):
    return BatchMemory(Recipe(steps=(CenterCrop((5, 7)),), output=Output(**output)), batch_size, CPU)


@pytest.mark.parametrize("memory_format", ["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_take_has_shape_type_and_format_of_the_recipe(dtype, memory_format):
    found = memory(dtype=dtype, memory_format=memory_format).take(3)
    assert found.shape == (3, 3, 5, 7)
    assert found.dtype == getattr(torch, dtype)
    strides = (105, 1, 21, 3) if memory_format == "channels_last" else (105, 35, 7, 1)
    assert found.stride() == strides
    assert not found.is_inference()
    found.fill_(2)


def test_take_memory_that_is_free_is_used_again():
    source = memory()
    address = source.take(4).data_ptr()
    assert source.take(4).data_ptr() == address
    assert source.take(1).data_ptr() == address


@pytest.mark.parametrize(
    "keep",
    [
        lambda images: images,
        lambda images: images[1, 2],
        lambda images: images.detach().permute(0, 2, 3, 1),
        lambda images: images[:1].numpy(),
        lambda images: np.asarray(images[0])[1:],
        lambda images: images.untyped_storage(),
        lambda images: (images * torch.ones(1, requires_grad=True)).sum().grad_fn,
        lambda images: torch.from_dlpack(images),
    ],
    ids=["itself", "row", "view", "array", "array view", "storage", "graph", "dlpack"],
)
def test_take_memory_that_anything_still_shares_is_left_alone(keep):
    source = memory()
    images = source.take(4)
    images.fill_(7)
    address = images.data_ptr()
    kept = keep(images)
    del images
    gc.collect()
    others = [source.take(4) for _ in range(5)]
    assert address not in [other.data_ptr() for other in others]
    assert len(source._free) == 0
    del kept
    gc.collect()
    assert source.take(4).data_ptr() == address


def test_take_keeps_few_buffers_for_later():
    source = memory()
    held = [source.take(4) for _ in range(20)]
    del held
    assert len(source._free) == KEPT


def test_close_frees_buffers_and_those_given_back_later():
    source = memory()
    held = source.take(4)
    source.take(4)
    source.close()
    assert len(source._free) == 0
    del held
    assert len(source._free) == 0


def test_take_tensor_outlives_its_memory():
    source = memory()
    images = source.take(4)
    images.fill_(3)
    del source
    gc.collect()
    assert (images == 3).all()
    del images


def test_hand_over_on_the_cpu_is_the_tensor_itself():
    source = memory()
    images = source.take(2)
    assert source.hand_over(images) is images
