"""Telling a source that is far away which records come next."""

from __future__ import annotations

from gpupipe.passes import Pass

# The order is looked up for so many rows at a time.
_ROWS = 512


class Ahead:
    """What is told to a source during one pass: the rows of this rank, well before they are read.

    Args:
        what: The pass. Sources without `read_ahead` are told nothing.
    """

    def __init__(self, what: Pass) -> None:
        begin = getattr(what.source, "read_ahead", None)
        self._reading = None if begin is None else begin()
        self._pass = what
        self._total = min(what.rows.count, what.batches * what.batch_size)
        self._told = 0

    def move_to(self, row: int) -> None:
        """Row `row` of the pass is the next to be read."""
        if self._reading is None:
            return
        until = min(row + self._reading.rows, self._total)
        # Not for each row anew: what is told at once can be asked for together.
        if self._told >= self._total or (self._told > row and until - self._told < min(_ROWS, self._reading.rows // 4)):
            return
        while self._told < until:
            last = min(self._told + _ROWS, until)
            indices, _ = self._pass.order.at(self._pass.rows.positions(self._told, last))
            self._reading.add(indices)
            self._told = last

    def close(self) -> None:
        """The pass is over. Idempotent."""
        if self._reading is not None:
            self._reading.close()
