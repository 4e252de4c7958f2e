"""Files as memory, without a file descriptor for each."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref


def map_file(path: str | os.PathLike[str]) -> tuple[memoryview, os.stat_result]:
    """Map a file into memory, to be read.

    No descriptor stays open, so that ten thousand files can be mapped where 1024 can be open: `mmap.mmap` keeps one
    for each (until Python 3.13). The map lives as long as any view into it, and needs no closing. It serves in forked
    children, too.

    A file that is made shorter afterwards ends the process (SIGBUS) when what is missing is read, and so does a disk
    that fails.

    Args:
        path: A regular file.

    Returns:
        All its bytes, (bytes,), read-only; and what `os.fstat` says of the file that is mapped.

    Raises:
        OSError: It cannot be opened or mapped.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    try:
        status = os.fstat(descriptor)
        if not status.st_size:
            return memoryview(b""), status
        if os.name != "posix":
            return memoryview(mmap.mmap(descriptor, status.st_size, access=mmap.ACCESS_READ)), status
        return _map(descriptor, status.st_size), status
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int) -> memoryview:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, f"mmap: {os.strerror(number)}")
    block = (ctypes.c_ubyte * size).from_address(address)
    # Not when the interpreter ends: a thread may still be reading then, and the system unmaps by itself.
    weakref.finalize(block, libc.munmap, address, size).atexit = False
    # Each view into it holds the block. Writing would end the process.
    return memoryview(block).cast("B").toreadonly()
