import pytest
import torch
import torch.distributed as dist

from gpupipe.sampling import peers
from gpupipe.sampling.orders import digest
from gpupipe.sampling.rank import Ranks


@pytest.fixture
def alone(tmp_path):
    """torch.distributed with one process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_connected_without_torch_distributed_is_false():
    assert not peers.connected(Ranks(0, 2, 0, "test"))


@pytest.mark.usefixtures("alone")
def test_connected_with_other_numbers_than_torch_distributed_has_is_false():
    """Ranks that were passed as arguments may be of another group; and one process has nobody to talk to."""
    assert not peers.connected(Ranks(0, 2, 0, "test"))
    assert not peers.connected(Ranks(0, 1, 0, "test"))


@pytest.mark.usefixtures("alone")
def test_compare_gives_one_row_for_each_rank():
    ranks = Ranks(0, 1, 0, "test")
    assert peers.compare([5, -7], ranks).tolist() == [[5, -7]]
    assert peers.compare(peers.words(digest(torch.arange(3).numpy())), ranks).shape == (1, 2)
    assert peers.compare(None, ranks).tolist() == [[0, 0]]  # the one that failed raises its own error


@pytest.mark.parametrize(
    ("config", "device"),
    [
        ("cpu:gloo", "cpu"),
        ("cpu:gloo,cuda:nccl", "cpu"),
        ("cpu:gloo,cuda:gloo", "cpu"),
        ("cuda:nccl", "cuda:3"),
    ],
)
def test_device_is_a_cpu_or_the_ranks_own_gpu(monkeypatch, config, device):
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert peers.device_of(Ranks(11, 16, 3, "test")) == torch.device(device)
