"""What runs on the device, shown on the CPU; and the memory in which tensors travel together."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.utils.rnn import pad_sequence

from gpupipe.collating import flat


@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    item=st.sampled_from([(), (4,), (2, 3)]),
    left=st.booleans(),
    more=st.integers(0, 3),
)
def test_pad_of_flat_values_is_pad_sequence(lengths, item, left, more):
    rows = [torch.randn(length, *item) for length in lengths]
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    width = max(lengths) + more
    padded, mask = flat.pad(torch.cat(rows), offsets, width, value=0.5, left=left)
    wide = [*rows, torch.zeros(width, *item)]
    expected = pad_sequence(wide, batch_first=True, padding_value=0.5, padding_side="left" if left else "right")[:-1]
    assert torch.equal(padded, expected)
    marks = [*(torch.ones(length, dtype=torch.bool) for length in lengths), torch.ones(width, dtype=torch.bool)]
    expected = pad_sequence(marks, batch_first=True, padding_side="left" if left else "right")[:-1]
    assert torch.equal(mask, expected)


@given(
    tensors=st.lists(
        st.tuples(
            st.sampled_from([torch.bool, torch.uint8, torch.float16, torch.bfloat16, torch.int64, torch.float64]),
            st.lists(st.integers(0, 4), max_size=3),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_unpack_gives_back_what_was_packed(tensors):
    before = [(torch.randn(shape) * 9).to(dtype) for dtype, shape in tensors]
    packed = flat.pack(before, pinned=False)
    after = flat.unpack(packed, before)
    for one, other in zip(before, after, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
        assert other.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr()


@pytest.mark.gpu
def test_tensors_reach_the_gpu_in_one_copy():
    before = [torch.arange(100_000.0), torch.arange(5), torch.tensor([True])]
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        after = flat.moved(before, device)
        torch.cuda.synchronize()
    copies = [event for event in profile.events() if "Memcpy HtoD" in event.name]
    assert len(copies) == 1
    for one, other in zip(before, after, strict=True):
        assert other.device == device
        assert torch.equal(one, other.cpu())


@pytest.mark.gpu
def test_padding_on_the_gpu_equals_that_on_the_cpu_and_waits_for_nothing():
    lengths = [3, 0, 7, 1]
    values, offsets = torch.randn(sum(lengths), 4), torch.tensor([0, *lengths]).cumsum(0)
    device = torch.device("cuda", torch.cuda.current_device())
    for left in (False, True):
        expected = flat.pad(values, offsets, 8, value=-1.0, left=left)
        on_device = flat.moved([values, offsets], device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = flat.pad(*on_device, 8, value=-1.0, left=left)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one.cpu(), other)
