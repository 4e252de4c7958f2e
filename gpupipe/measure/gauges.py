"""What this process and its children hold at a moment: memory, files, threads, CPU time, and the GPU's state."""

from __future__ import annotations

import gc
import glob
import shutil
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHARED_MEMORY = "/dev/shm"  # where Linux keeps what processes share; workers of a DataLoader hand batches over there


@dataclass(frozen=True, slots=True, kw_only=True)
class Gauges:
    """One look. None where it cannot be known here.

    Attributes:
        cpu_s: CPU seconds used so far by the processes that are alive.
        machine_use: In [0, 1]: the share of all the machine's cores in use since the last look, by anybody.
        host_bytes: What only one of the processes holds, and the largest shared part of one of them.
        shared_memory_bytes, shared_memory_limit_bytes: Of the whole machine or container.
        files: Open file descriptors.
        threads, processes: Of this process and its children.
        running: Threads of all of them that compute, or wait for a core to do so; Linux only.
        read_bytes, reads: So far, by calls that read, from the page cache too.
        gpu_use: In [0, 1]: the share of the last sampling period in which a kernel ran.
        gpu_memory_bytes: In use on this process's GPU, by all.
    """

    cpu_s: float | None = None
    machine_use: float | None = None
    host_bytes: int | None = None
    shared_memory_bytes: int | None = None
    shared_memory_limit_bytes: int | None = None
    files: int | None = None
    threads: int | None = None
    running: int | None = None
    processes: int | None = None
    read_bytes: int | None = None
    reads: int | None = None
    gpu_use: float | None = None
    gpu_memory_bytes: int | None = None


class Meter:
    """Looks. Keeps what it learned about processes from one look to the next, so that a look costs a millisecond.

    Args:
        gpu: Number of the CUDA device whose state is read; None: none.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self._psutil: Any = None
        self._nvml: tuple[Any, Any] | None = None
        with suppress(ImportError):
            import psutil

            self._psutil = psutil
        if gpu is not None:
            with suppress(Exception):  # whatever a missing or old driver raises
                import pynvml

                pynvml.nvmlInit()
                self._nvml = pynvml, pynvml.nvmlDeviceGetHandleByUUID(_uuid(gpu))

    def look(self) -> Gauges:
        """The state now."""
        return Gauges(**self._tree(), **_shared_memory(), **self._gpu())

    def _tree(self) -> dict[str, Any]:
        if self._psutil is None:
            return {}
        own = self._psutil.Process()
        cpu_s, private, shared, files, threads, reads, read_bytes, processes = 0.0, 0, 0, 0, 0, 0, 0, 0
        running = 0
        for process in (own, *own.children(recursive=True)):
            try:
                with process.oneshot():
                    memory, times = process.memory_info(), process.cpu_times()
                    files += process.num_fds() if hasattr(process, "num_fds") else process.num_handles()
                    threads += process.num_threads()
                    if hasattr(process, "io_counters"):
                        counters = process.io_counters()
                        reads += counters.read_count
                        read_bytes += getattr(counters, "read_chars", counters.read_bytes)
            except self._psutil.Error:  # it ended in between, or is another user's
                continue
            processes += 1
            running += _running(process.pid)
            cpu_s += times.user + times.system
            of_others = getattr(memory, "shared", 0)
            private += memory.rss - of_others
            shared = max(shared, of_others)
        return {
            "cpu_s": cpu_s,
            "machine_use": self._psutil.cpu_percent() / 100,
            "host_bytes": private + shared,
            "files": files,
            "threads": threads,
            "running": running if sys.platform == "linux" else None,
            "processes": processes,
            "reads": reads,
            "read_bytes": read_bytes,
        }

    def _gpu(self) -> dict[str, Any]:
        if self._nvml is None:
            return {}
        nvml, handle = self._nvml
        with suppress(nvml.NVMLError):
            use, memory = nvml.nvmlDeviceGetUtilizationRates(handle), nvml.nvmlDeviceGetMemoryInfo(handle)
            return {"gpu_use": use.gpu / 100, "gpu_memory_bytes": memory.used}
        return {}


def _running(pid: int) -> int:
    """Threads of a process in the state R, by /proc (see proc_pid_stat(5)); 0 where there is no such thing."""
    found = 0
    for stat in glob.iglob(f"/proc/{pid}/task/*/stat"):
        with suppress(OSError), open(stat, "rb") as file:
            found += file.read().rpartition(b")")[2].lstrip()[:1] == b"R"
    return found


def _uuid(gpu: int) -> str:
    """NVML numbers all GPUs of the machine, torch those that this process may see."""
    import torch

    return f"GPU-{torch.cuda.get_device_properties(gpu).uuid}"


def _shared_memory() -> dict[str, int]:
    try:
        usage = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        return {}
    return {"shared_memory_bytes": usage.used, "shared_memory_limit_bytes": usage.total}


def memory_limit_bytes() -> int | None:
    """What all processes here may hold together: the container's limit, or the machine's memory."""
    limits = []
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(Path(path).read_text()))
    with suppress(ImportError):
        import psutil

        limits.append(int(psutil.virtual_memory().total))
    return min(limits, default=None)


def held_by_type(most: int = 50) -> dict[str, int]:
    """The bytes that this process's objects of each type hold, the largest first.

    Tensors and arrays count with their memory, containers and others with their own size, and only those count that
    Python's garbage collector knows: not numbers and strings by themselves, nor memory of foreign libraries.
    """
    import torch

    held: Counter[str] = Counter()
    seen: set[int] = set()
    for each in gc.get_objects():
        kind = type(each)
        if issubclass(kind, torch.Tensor):
            with suppress(Exception):  # tensors without storage
                storage = each.untyped_storage()
                if storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    held[f"{kind.__module__}.{kind.__qualname__}"] += storage.nbytes()
            continue
        if issubclass(kind, torch.storage.TypedStorage):  # warns when it is looked at; its tensor counts
            continue
        with suppress(Exception):  # a `__sizeof__` of somebody's own
            held[f"{kind.__module__}.{kind.__qualname__}"] += sys.getsizeof(each)
    return dict(held.most_common(most))
