import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpupipe.errors import ConfigError
from gpupipe.sampling.rank import find_ranks


def test_find_ranks_without_anything_is_one_process():
    found = find_ranks(environment={})
    assert (found.rank, found.world_size, found.local_rank) == (0, 1, 0)


def test_find_ranks_with_arguments_ignores_environment():
    found = find_ranks(1, 3, {"RANK": "5", "WORLD_SIZE": "8"})
    assert (found.rank, found.world_size, found.found) == (1, 3, "arguments")


def test_find_ranks_with_torchrun_variables_takes_them():
    found = find_ranks(environment={"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert (found.rank, found.world_size, found.local_rank) == (5, 8, 1)


def test_find_ranks_with_torch_distributed_takes_it(tmp_path):
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = find_ranks(environment={"RANK": "5", "WORLD_SIZE": "8"})
    finally:
        dist.destroy_process_group()
    assert (found.rank, found.world_size, found.found) == (0, 1, "torch.distributed")


@pytest.mark.parametrize(
    ("arguments", "environment", "shown"),
    [
        ((3, 3), {}, "rank=3 with world_size=3 (arguments)"),
        ((-1, 2), {}, "rank=-1"),
        ((0, 0), {}, "world_size=0"),
        ((True, 2), {}, "rank=True"),
        ((1.5, 2), {}, "rank=1.5"),
        ((0, None), {}, "both or neither"),
        ((None, 2), {}, "both or neither"),
        ((None, None), {"RANK": "0"}, "WORLD_SIZE"),
        ((None, None), {"WORLD_SIZE": "2"}, "RANK"),
        ((None, None), {"RANK": "2", "WORLD_SIZE": "2"}, "environment variables"),
        ((None, None), {"RANK": "one", "WORLD_SIZE": "2"}, "'one'"),
        ((None, None), {"RANK": "-1", "WORLD_SIZE": "2"}, "'-1'"),
        ((None, None), {"LOCAL_RANK": "x"}, "LOCAL_RANK"),
    ],
)
def test_find_ranks_with_impossible_numbers_says_what_was_found(arguments, environment, shown):
    with pytest.raises(ConfigError) as raised:
        find_ranks(*arguments, environment)
    assert shown in str(raised.value)


@given(rank=st.integers(-3, 20), world_size=st.integers(-3, 20), as_variables=st.booleans())
def test_find_ranks_takes_exactly_the_numbers_that_can_be(rank, world_size, as_variables):
    variables = {"RANK": str(rank), "WORLD_SIZE": str(world_size)} if as_variables else {}
    arguments = (None, None) if as_variables else (rank, world_size)
    if 0 <= rank < world_size:
        found = find_ranks(*arguments, variables)
        assert (found.rank, found.world_size) == (rank, world_size)
    else:
        with pytest.raises(ConfigError, match="environment variables" if as_variables else "argument"):
            find_ranks(*arguments, variables)
