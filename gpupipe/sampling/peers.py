"""What ranks tell each other about their orders, through torch.distributed where it runs.

Collective calls: every rank makes them, in the same sequence, or all wait until the process group's timeout.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from gpupipe.errors import ConfigError
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


def compare(own: Sequence[int] | None, ranks: Ranks) -> I64:
    """Two numbers of each rank, int64 (world_size, 2).

    Args:
        own: This rank's; None says that it has none to give, because of an error that it will raise.
        ranks: Connected ones.

    Raises:
        ConfigError: Another rank has none to give.
    """
    found = all_rows([0, 0, 0] if own is None else [1, *own], ranks)
    failed = np.flatnonzero(found[:, 0] == 0).tolist()
    if failed and own is not None:
        raise ConfigError(
            f"rank {', '.join(map(str, failed))} of {ranks.world_size} could not draw the order of this epoch, so this "
            "rank does not begin it either: see the error there",
            field="sampler",
            value=failed,
            allowed="an order on every rank",
        )
    return found[:, 1:]


@contextmanager
def telling_of_errors(ranks: Ranks) -> Iterator[None]:
    """What is done within comes before a `compare`: if it raises, the other ranks are told, and wait for nothing."""
    try:
        yield
    except Exception:
        compare(None, ranks)
        raise


def all_rows(own: Sequence[int] | I64, ranks: Ranks) -> I64:
    """One row of each rank, int64 (world_size, n).

    Args:
        own: This rank's n numbers; n is the same on every rank.
        ranks: Connected ones.
    """
    import torch
    import torch.distributed as dist

    mine = torch.from_numpy(np.ascontiguousarray(own, np.int64)).to(device_of(ranks))
    rows = [torch.empty_like(mine) for _ in range(ranks.world_size)]
    dist.all_gather(rows, mine)
    return np.stack([row.cpu().numpy() for row in rows])


def words(digest: str) -> list[int]:
    """The 16 bytes of an `orders.digest` as two int64, to be sent."""
    return np.frombuffer(bytes.fromhex(digest.rpartition(":")[2]), np.int64).tolist()  # type: ignore[no-any-return]


def device_of(ranks: Ranks) -> torch.device:
    """Where the process group takes tensors: the CPU if it can; else this rank's own CUDA device, never another's."""
    import torch
    import torch.distributed as dist

    if "cpu:" in str(dist.get_backend_config()):
        return torch.device("cpu")
    return torch.device("cuda", ranks.local_rank)
