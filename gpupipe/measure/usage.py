"""CPU time and memory of this process and its children."""

from __future__ import annotations

from typing import Any

MISSING = "psutil is not installed, so CPU use and memory are not measured: pip install 'gpupipe[measure]'"


class Tree:
    """The process that asks, and all below it, by psutil."""

    def __init__(self) -> None:
        try:
            import psutil
        except ImportError:
            self._psutil: Any = None
        else:
            self._psutil = psutil

    @property
    def measured(self) -> bool:
        """Whether psutil is here."""
        return self._psutil is not None

    def _processes(self) -> list[Any]:
        if self._psutil is None:
            return []
        own = self._psutil.Process()
        return [own, *own.children(recursive=True)]

    def cpu_s(self) -> float | None:
        """CPU seconds used so far by the processes that are alive, in user and kernel mode."""
        return self._sum(lambda process: sum(process.cpu_times()[:2]))

    def memory_mb(self) -> float | None:
        """Memory in MB: proportional set size where the system has it (shared pages count once), else resident."""

        def of(process: Any) -> float:
            full = process.memory_full_info()
            return float(getattr(full, "pss", full.rss)) / 1e6

        return self._sum(of)

    def _sum(self, of: Any) -> float | None:
        if self._psutil is None:
            return None
        total = 0.0
        for process in self._processes():
            try:
                total += of(process)
            except self._psutil.Error:  # it ended in between, or is another user's
                continue
        return total
