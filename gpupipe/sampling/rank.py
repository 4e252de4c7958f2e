"""Which of how many processes this is. The only place that looks."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from gpupipe.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


@dataclass(frozen=True, slots=True)
class Ranks:
    """One process among all.

    Attributes:
        rank: 0 to world_size - 1.
        world_size: Number of processes.
        local_rank: Number of this process on its machine; which CUDA device is its own.
        found: Where the numbers came from, for messages.
    """

    rank: int
    world_size: int
    local_rank: int
    found: str


def _whole(name: str, value: object, where: str) -> int:
    try:
        if isinstance(value, bool):
            raise ValueError
        number = int(value) if isinstance(value, str) else value
        if not isinstance(number, int) or number < 0:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"{name}={value!r} ({where}) is not valid: it must be an integer of at least 0",
            field=name,
            value=value,
            allowed="an integer >= 0",
        ) from None
    return number


def _checked(rank: int, world_size: int, local_rank: int, where: str) -> Ranks:
    if world_size < 1 or rank >= world_size:
        raise ConfigError(
            f"rank={rank} with world_size={world_size} ({where}) is not valid: rank must be from 0 to world_size - 1",
            field="rank",
            value=(rank, world_size),
            allowed="0 <= rank < world_size",
        )
    return Ranks(rank, world_size, local_rank, where)


def find_ranks(
    rank: int | None = None, world_size: int | None = None, environment: Mapping[str, str] | None = None
) -> Ranks:
    """The rank of this process: the arguments, else torch.distributed, else the torchrun variables, else one process.

    Args:
        rank, world_size: Both or neither.
        environment: Instead of `os.environ`, for tests.

    Raises:
        ConfigError: Half of the numbers given, or numbers that cannot be; the message says where they were found.
    """
    variables = os.environ if environment is None else environment
    local = _whole("LOCAL_RANK", variables.get("LOCAL_RANK", "0"), "environment variable")
    if rank is not None or world_size is not None:
        if rank is None or world_size is None:
            raise ConfigError(
                f"rank={rank!r} and world_size={world_size!r}: give both or neither",
                field="rank" if rank is None else "world_size",
                value=None,
                allowed="both or neither",
            )
        return _checked(
            _whole("rank", rank, "argument"), _whole("world_size", world_size, "argument"), local, "arguments"
        )
    # A process that has initialised torch.distributed has imported it: look, but do not import torch for that.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return _checked(distributed.get_rank(), distributed.get_world_size(), local, "torch.distributed")
    given = {name: variables[name] for name in _VARIABLES if name in variables}
    if "RANK" in given or "WORLD_SIZE" in given:
        if "RANK" not in given or "WORLD_SIZE" not in given:
            missing = "RANK" if "RANK" not in given else "WORLD_SIZE"
            raise ConfigError(
                f"the environment has {given} but not {missing}: set both (torchrun does), or neither, or pass "
                "Sharding(rank=..., world_size=...)",
                field=missing,
                value=None,
                allowed="RANK and WORLD_SIZE, both or neither",
            )
        where = "environment variables"
        return _checked(
            _whole("RANK", given["RANK"], where), _whole("WORLD_SIZE", given["WORLD_SIZE"], where), local, where
        )
    return Ranks(0, 1, local, "a single process")
