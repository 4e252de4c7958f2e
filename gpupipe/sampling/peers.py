"""What ranks tell each other about their orders, through torch.distributed where it runs.

Collective calls: every rank makes them, in the same sequence, or all wait until the process group's timeout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from gpupipe.sampling.orders import I64
from gpupipe.sampling.rank import Ranks

if TYPE_CHECKING:
    import torch


def connected(ranks: Ranks) -> bool:
    """Whether torch.distributed connects these very ranks: it is initialised, and has their numbers."""
    distributed = sys.modules.get("torch.distributed")
    return (
        ranks.world_size > 1
        and distributed is not None
        and distributed.is_available()
        and distributed.is_initialized()
        and (distributed.get_rank(), distributed.get_world_size()) == (ranks.rank, ranks.world_size)
    )


def from_all(own: Sequence[int] | I64, ranks: Ranks) -> I64:
    """One row of each rank, int64 (world_size, n).

    Args:
        own: This rank's n numbers; n is the same on every rank.
        ranks: Connected ones.
    """
    import torch
    import torch.distributed as dist

    mine = torch.from_numpy(np.ascontiguousarray(own, np.int64)).to(_device(ranks))
    rows = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(rows, mine)
    return np.stack([row.cpu().numpy() for row in rows])


def words(digest: str) -> list[int]:
    """The 16 bytes of an `orders.digest` as two int64, to be sent."""
    return np.frombuffer(bytes.fromhex(digest.rpartition(":")[2]), np.int64).tolist()  # type: ignore[no-any-return]


def _device(ranks: Ranks) -> torch.device:
    """Where the process group takes tensors: the CPU if it can; else this rank's own CUDA device, never another's."""
    import torch
    import torch.distributed as dist

    if "cpu:" in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank)
