"""The further values of records (`Record.columns`) as bytes, for stores that keep nothing else, and back.

Nothing is pickled. A column has one kind, which its store names beside it; a value of None is not stored at all.
"""

from __future__ import annotations

import io
import json
import tokenize
import zipfile
import zlib
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import SourceError

KINDS = ("str", "bytes", "array", "json")

# What NumPy raises on a damaged .npy file, whose header is a line of Python (that it never executes).
NPY_DAMAGE = (ValueError, TypeError, EOFError, SyntaxError, OverflowError, MemoryError, tokenize.TokenError)
# The same for .npz files. RuntimeError is what `zipfile` raises for bits that ask for a password, or for a compression
# that it does not know.
NPZ_DAMAGE = (*NPY_DAMAGE, OSError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error)


def kind_of(value: object) -> str:
    """How a value is stored: "str", "bytes", "array" (a NumPy array), or "json" for all else.

    >>> kind_of("a"), kind_of(b"a"), kind_of(1.5), kind_of([1, 2])
    ('str', 'bytes', 'json', 'json')
    """
    if isinstance(value, str):
        return "str"
    if isinstance(value, bytes | bytearray | memoryview):
        return "bytes"
    return "array" if isinstance(value, np.ndarray) else "json"


def to_bytes(value: Any, kind: str) -> bytes:
    """A value as it is stored: text as UTF-8, bytes as they are, arrays as a ``.npy`` file, all else as JSON.

    Args:
        value: Not None.
        kind: That of its column, one of `KINDS`. "json" takes strings, too.

    Raises:
        SourceError: The value is of another kind, or nothing that JSON has.
    """
    if kind != "json" and kind_of(value) != kind:
        raise SourceError(
            f"{value!r} ({type(value).__name__}) is in a column of kind {kind!r}: all values of a column must be of "
            "one type, or None"
        )
    if kind == "bytes":
        return bytes(value)
    try:
        if kind == "str":
            return str(value).encode("utf-8", "surrogateescape")
        if kind == "array":
            out = io.BytesIO()
            np.lib.format.write_array(out, value, allow_pickle=False)
            return out.getvalue()
        return json.dumps(value.item() if isinstance(value, np.generic) else value, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise SourceError(
            f"{value!r} ({type(value).__name__}) cannot be stored: {error}. Numbers, text, bytes, arrays of numbers, "
            "and lists and dictionaries of numbers and text can"
        ) from error


def from_bytes(data: bytes, kind: str) -> Any:
    """The value that `to_bytes` stored.

    Raises:
        ValueError: These bytes are none of that kind.

    >>> from_bytes(to_bytes([1, 2.5, "ü"], "json"), "json")
    [1, 2.5, 'ü']
    """
    if kind == "str":
        return data.decode("utf-8", "surrogateescape")
    if kind == "bytes":
        return bytes(data)
    if kind == "array":
        return read_npy(io.BytesIO(data))
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("JSON nested too deeply") from error


def read_npy(file: IO[bytes]) -> npt.NDArray[Any]:
    """The array in a ``.npy`` file. Nothing is unpickled.

    Raises:
        ValueError: It is none, or damaged, or holds Python objects.
    """
    try:
        return np.lib.format.read_array(file, allow_pickle=False)
    except NPY_DAMAGE as error:
        raise ValueError(str(error) or type(error).__name__) from error
