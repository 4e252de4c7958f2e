"""What the orders share that decide which samples make a batch: they depend on the batch size and the world size."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from gpupipe.sampling.orders import I64, ArrayOrder, Definition, EpochOrder, check_same, mismatch
from gpupipe.sampling.rank import Ranks
from gpupipe.sampling.samplers import SeededOrdering, agree_on


class BatchedOrdering(SeededOrdering):
    """An `Ordering` whose epochs are permutations made of a definition with batch_size and world_size.

    A state from the middle of an epoch brings the old ones along, until that epoch is over.

    Args:
        made_from: Its definition.
        samples: In the data set.
        what: It was given that must be the same on every rank, for messages.
    """

    def __init__(self, made_from: Definition, *, samples: int, what: str) -> None:
        super().__init__(made_from)
        self._samples, self._what = samples, what

    @abstractmethod
    def order(self, epoch: int, made_from: Definition) -> I64:
        """The global order of an epoch, int64 (samples,), as this definition has it."""

    def length(self, epoch: int) -> int:
        """See `Ordering.length`."""
        del epoch
        return self._samples

    def draw(self, epoch: int) -> ArrayOrder:
        """See `Ordering.draw`."""
        return self._drawn(epoch, self._made_from)

    def agree(self, held: Callable[[], EpochOrder], ranks: Ranks) -> EpochOrder:
        """See `Ordering.agree`."""
        return agree_on(f"the {self._what} and the order made from them", held, ranks)

    def restore(self, saved: Definition, epoch: int, *, begun: bool) -> EpochOrder | None:
        """See `Ordering.restore`: batch_size and world_size stay the saved ones until the epoch is over."""
        check_same(saved, self._made_from, ignore=frozenset(("batch_size", "world_size")))
        if not begun or saved == self._made_from:
            return None
        for name in ("batch_size", "world_size"):
            if not isinstance(saved.get(name), int) or saved[name] < 1:
                raise mismatch({name: (saved.get(name), self._made_from[name])})
        return self._drawn(epoch, saved)

    def _drawn(self, epoch: int, made_from: Definition) -> ArrayOrder:
        return ArrayOrder(self.order(epoch, made_from), length=self._samples, made_from=made_from)
