"""The global order of one epoch as an object, and what decides it.

An `Ordering` belongs to a loader and draws an `EpochOrder` for each epoch; `samplers.RankRows` deals that to ranks. A
new kind of order is one more `Ordering`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gpupipe.errors import StateError
from gpupipe.sampling.rank import Ranks

I64 = npt.NDArray[np.int64]

Definition = Mapping[str, Any]
"""What an order is made from, in builtin types: a part of `Loader.state_dict`. Equal definitions, equal orders."""


class EpochOrder(Protocol):
    """The global order of one epoch: the same on every rank."""

    @property
    def length(self) -> int:
        """Rows of the epoch, over all ranks, before padding."""

    def at(self, positions: I64) -> tuple[I64, I64]:
        """Indices and occurrences at positions of the order; behind its end come repeats, for padding.

        Most orders begin again there, as DistributedSampler's padding does.

        Args:
            positions: int64 (n,), not negative.

        Returns:
            Two int64 (n,): positions in the data set, and how often each came before in this order.
        """

    def candidates(self, index: int) -> Sequence[int] | I64:
        """Which samples may take the place of one that cannot be decoded, itself perhaps included.

        They depend on what the epoch holds, not on its order: so a substitute is the same at any batch size and world
        size, and no sample appears that the sampler would never have drawn.

        Args:
            index: The sample that is to be replaced.

        Returns:
            Indices in ascending order, each once.
        """

    def definition(self) -> dict[str, Any]:
        """What this order was made from."""


class Ordering(Protocol):
    """Decides the order of every epoch. Only `agree` talks to other processes."""

    def length(self, epoch: int) -> int | None:
        """Rows of that epoch, over all ranks; None: only drawing it would tell."""

    def draw(self, epoch: int) -> EpochOrder:
        """The order of that epoch.

        Raises:
            ConfigError: A sampler that was handed in yields what cannot be an order.
        """

    def agree(self, held: Callable[[], EpochOrder], ranks: Ranks) -> EpochOrder:
        """See with the other ranks that the order is the same everywhere; all ranks call this together.

        Args:
            held: Gives this rank's order. Where it raises, the other ranks are told, and raise as well.
            ranks: This process.

        Returns:
            The order to use.

        Raises:
            ConfigError: The ranks drew different orders, or some could not; every rank raises.
            StateError: Not the order that `restore` expected.
        """

    def definition(self) -> dict[str, Any]:
        """What the next order will be drawn from."""

    def restore(self, saved: Definition, epoch: int, *, begun: bool) -> EpochOrder | None:
        """Take on the definition of a saved state.

        Args:
            saved: From `EpochOrder.definition` or `definition`.
            epoch: The epoch it belongs to.
            begun: Whether a part of it was delivered, so that exactly that order must come again.

        Returns:
            The order of that epoch where it is not simply what `draw` would give.

        Raises:
            StateError: That order cannot be had here; the message says what differs.
        """


class ArrayOrder:
    """An order held as one array, or as none at all where it is 0, 1, 2, ...

    Args:
        indices: int64 (length,), or None.
        length: Of the order.
        made_from: Its definition.
        repeats: Whether an index may come more than once; then the occurrences are counted here.
    """

    def __init__(self, indices: I64 | None, *, length: int, made_from: Definition, repeats: bool = False) -> None:
        self.indices, self._length, self._made_from = indices, length, made_from
        self._occurrences: npt.NDArray[np.int32] | None = None
        self._counts: I64 | None = None
        self._hash: str | None = None
        self._candidates: range | I64 | None = None
        if repeats and indices is not None:
            self._occurrences = count_earlier(indices)

    @property
    def length(self) -> int:
        """See `EpochOrder.length`."""
        return self._length

    def at(self, positions: I64) -> tuple[I64, I64]:
        """See `EpochOrder.at`."""
        occurrences, places = np.divmod(positions, self._length)
        if self.indices is None:
            return places, occurrences
        indices = self.indices[places]
        if self._occurrences is not None:
            if occurrences.any():
                if self._counts is None:
                    self._counts = np.bincount(self.indices)
                occurrences *= self._counts[indices]
            occurrences += self._occurrences[places]
        return indices, occurrences

    def candidates(self, index: int) -> range | I64:
        """See `EpochOrder.candidates`: every sample of the epoch."""
        del index
        if self._candidates is None:
            every = range(self._length)
            permuted = self.indices is None or (self._occurrences is None and int(self.indices.max()) == every[-1])
            self._candidates = every if permuted or self.indices is None else np.unique(self.indices)
        return self._candidates

    def definition(self) -> dict[str, Any]:
        """See `EpochOrder.definition`."""
        return dict(self._made_from)

    @property
    def hash(self) -> str:
        """Of the indices in their order."""
        if self._hash is None:
            self._hash = digest(np.arange(self._length) if self.indices is None else self.indices)
        return self._hash


def count_earlier(values: I64) -> npt.NDArray[np.int32] | None:
    """How often each value came before it in the array, int32 (n,); None where none comes twice.

    >>> count_earlier(np.array([7, 3, 7, 7])).tolist()
    [0, 0, 1, 2]
    """
    if not values.size:
        return None
    seen = np.zeros(int(values.max()) + 1, np.bool_)
    seen[values] = True
    if np.count_nonzero(seen) == len(values):
        return None
    del seen
    by_value = values.argsort(kind="stable")
    in_order = values[by_value]
    begins = np.flatnonzero(np.concatenate(([True], in_order[1:] != in_order[:-1])))
    del in_order
    runs = np.diff(begins, append=len(values))
    earlier = np.arange(len(values), dtype=np.int32)
    earlier -= np.repeat(begins, runs).astype(np.int32)
    found = np.empty(len(values), np.int32)
    found[by_value] = earlier
    return found


def digest(values: npt.NDArray[Any]) -> str:
    """A hash of an array's values, the same on every machine."""
    little_endian = np.ascontiguousarray(values, values.dtype.newbyteorder("<"))
    return "blake2b:" + hashlib.blake2b(little_endian.data, digest_size=16).hexdigest()


def check_same(saved: Definition, mine: Definition, *, ignore: frozenset[str] = frozenset()) -> None:
    """Raise StateError that names each entry in which two definitions differ.

    Args:
        saved: From a state.
        mine: What this Loader has.
        ignore: Entries that may differ.
    """
    different = [
        name for name in (*saved, *(set(mine) - set(saved))) if name not in ignore and saved.get(name) != mine.get(name)
    ]
    if "kind" in different:
        different = ["kind"]  # the other entries are not comparable
    if different:
        raise mismatch({name: (saved.get(name), mine.get(name)) for name in different})


def mismatch(different: Mapping[str, tuple[object, object]]) -> StateError:
    """The StateError for entries (saved, here) that differ and must not."""
    listed = "; ".join(f"{name} was {saved!r} and is {here!r} here" for name, (saved, here) in different.items())
    return StateError(
        f"the state does not fit this Loader: {listed}. Make the Loader with the arguments of the saved run",
        expected={name: here for name, (_, here) in different.items()},
        actual={name: saved for name, (saved, _) in different.items()},
    )
