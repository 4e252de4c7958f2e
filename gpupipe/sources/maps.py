"""Files as memory, without a file descriptor for each."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import sys
import weakref
from functools import cache
from typing import Any

_MADV_POPULATE_READ = 22  # Linux 5.14 and later
_EHWPOISON = 133  # Linux alone has it, and `errno` has not


class FileMap:
    """A file mapped into memory, to be read.

    No descriptor stays open, so that ten thousand files can be mapped where 1024 can be open: `mmap.mmap` keeps one
    for each (until Python 3.13). The map lives as long as any view into it, and needs no closing. It serves in forked
    children, too.

    Reading from the map what a file no longer has, as it was made shorter, or what its disk cannot give, ends the
    process (SIGBUS). `view` asks Linux for the bytes first, and raises then; what happens to them between that and
    their use is not covered, and neither are other systems. (What is missing of the last page of a file that became
    shorter are zeros.)

    Args:
        path: A regular file.

    Attributes:
        data: All its bytes, (bytes,), read-only.
        path: As given.
        status: What `os.fstat` says of the file that is mapped.

    Raises:
        OSError: It cannot be opened or mapped.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._address: int | None = None
        self.path = path
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            self.status = os.fstat(descriptor)
            size = self.status.st_size
            if not size:
                self.data = memoryview(b"")
            elif os.name != "posix":
                self.data = memoryview(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ))
            else:
                self._address, self.data = _map(descriptor, size)
        finally:
            os.close(descriptor)

    def written(self) -> os.stat_result | None:
        """What `os.stat` says of the file, if it was written to since `status` was taken; else None.

        A file that was removed, or has another one in its place, stays in the map as it was: that is None, too. Takes
        about 1.5 us on a local disk.
        """
        try:
            found = os.stat(self.path)
        except OSError:
            return None
        known = self.status
        if (found.st_ino, found.st_dev) != (known.st_ino, known.st_dev):
            return None
        same = (found.st_mtime_ns, found.st_size) == (known.st_mtime_ns, known.st_size)
        return None if same else found

    def view(self, offset: int, size: int) -> memoryview:
        """Some of the bytes, which are read from the disk now, while other threads go on.

        That costs about 5 us where they are in memory.

        Args:
            offset: Of the first one.
            size: How many; the range lies in the file as it was when it was mapped.

        Raises:
            OSError: The file does not have them any more, or they cannot be read.
        """
        if self._address is not None and size:
            _populate(self._address + offset, size)
        return self.data[offset : offset + size]


@cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return libc


def _map(descriptor: int, size: int) -> tuple[int, memoryview]:
    """Where it is mapped, and its bytes."""
    libc = _libc()
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"it cannot be mapped: {os.strerror(number)}")
    block = (ctypes.c_ubyte * size).from_address(address)
    # Not when the interpreter ends: a thread may still be reading then, and the system unmaps by itself.
    weakref.finalize(block, libc.munmap, address, size).atexit = False
    # Each view into it holds the block. Writing would end the process.
    return address, memoryview(block).cast("B").toreadonly()


def _populate(address: int, size: int) -> None:
    if sys.platform != "linux":
        return
    start = address - address % mmap.PAGESIZE
    if not _libc().madvise(start, address + size - start, _MADV_POPULATE_READ):
        return
    # EINVAL is an older Linux; the others are what reading would have ended the process by.
    if ctypes.get_errno() in (errno.EFAULT, _EHWPOISON):
        raise OSError(errno.EIO, "the file has become shorter, or its disk fails")
