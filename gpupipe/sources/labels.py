"""Labels: given beside the images or read from text, checked once, handed out one by one."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gpupipe.errors import ConfigError, SourceError
from gpupipe.sources.values import read_npy

GivenLabels = str | os.PathLike[str] | npt.ArrayLike


def given_labels(labels: GivenLabels, count: int, uri: str) -> npt.NDArray[Any]:
    """The labels of `count` records as an array.

    Args:
        labels: Numbers, (count, ...): an array, a tensor, a sequence, or the path of an ``.npy`` file.
        count: How many records there are.
        uri: Of the data set, for messages.

    Returns:
        (count, ...), integers, floats or booleans. A copy, unless it was read from a file.

    Raises:
        ConfigError: They are no numbers, or not `count` of them.
        SourceError: The file cannot be read. Nothing is unpickled.
    """
    if isinstance(labels, str | os.PathLike):
        path = os.path.abspath(os.path.expanduser(os.fspath(labels)))
        try:
            with open(path, "rb") as file:
                array = read_npy(file)
        except (OSError, ValueError) as error:
            raise SourceError(
                f"the labels in {path!r} cannot be read: {error}. It must be an .npy file of numbers, as np.save "
                "writes it",
                uri=uri,
            ) from error
        named = f"labels of {path!r}"
    else:
        try:
            array = as_array(labels)
        except ValueError as error:  # ragged
            raise _bad_labels(labels, f"make no array: {error}", count, uri) from error
        named = "labels"
    if array.dtype.kind not in "iufb":
        raise _bad_labels(labels, f"are of {array.dtype}", count, uri, named)
    if array.shape[:1] != (count,):
        raise _bad_labels(labels, f"have the shape {array.shape}", count, uri, named)
    return array


def as_array(values: Any) -> npt.NDArray[Any]:
    """An array of its own of a sequence, an array, or a tensor of any device.

    Raises:
        ValueError: They are ragged.
    """
    # NumPy warns of torch's tensors, which have no `copy` in their `__array__`.
    return np.array(values.detach().cpu().numpy() if hasattr(values, "detach") else values)


def _bad_labels(labels: object, what: str, count: int, uri: str, named: str = "labels") -> ConfigError:
    allowed = f"numbers, one (or one row) for each of the {count} records of {uri}"
    return ConfigError(f"{named} {what}: they must be {allowed}", field="labels", value=labels, allowed=allowed)


def record_label(labels: npt.NDArray[Any] | None, index: int) -> Any:
    """The label of one record: a Python number, a row that is the caller's to keep, or None if there are none."""
    if labels is None:
        return None
    return labels[index].item() if labels.ndim == 1 else labels[index].copy()


def parse_label(text: bytes, path: tuple[str, ...]) -> int | float | list[Any]:
    """A label as it is stored.

    Args:
        text: A number, or a JSON list of numbers; JSON that has one somewhere in it.
        path: The names that lead there.

    Raises:
        ValueError, KeyError, TypeError, IndexError, RecursionError: There is none.

    >>> parse_label(b"7", ()), parse_label(b'{"a": {"b": [0, 1]}}', ("a", "b"))
    (7, [0, 1])
    """
    if not path and text.isdigit():
        return int(text)
    stripped = text.strip()
    if not path and stripped.isdigit():  # with zeros in front, which JSON does not have
        return int(stripped)
    value = json.loads(stripped)
    for name in path:
        value = value[name] if isinstance(value, dict) else value[int(name)]
    if isinstance(value, list) and value and all(isinstance(each, int | float) for each in value):
        return value
    if not isinstance(value, int | float) or (isinstance(value, bool) and not path):
        raise TypeError(f"it is {str(value)[:60]!r}")
    return value


def stacked(labels: Sequence[Any]) -> npt.NDArray[Any]:
    """One array of labels that were read one by one.

    Args:
        labels: All integers; or all numbers; or all lists of numbers, of the same length, where truth
            values are 0 and 1.

    Returns:
        int64 (n, ...); where there are floats, float64 (n,) for numbers, and float32 (n, length) for lists, as losses
        on several labels want them.

    Raises:
        ValueError: They are something else, or an integer does not fit; it says what.

    >>> stacked([3, 1]).dtype, stacked([3, 0.5]).dtype, stacked([[0, 1], [1, 0]]).shape
    (dtype('int64'), dtype('float64'), (2, 2))
    """
    try:
        array = np.array(labels)
    except ValueError as error:
        raise ValueError("numbers and lists, or lists of several lengths") from error
    if array.dtype.kind not in ("if" if array.ndim == 1 else "bif"):
        raise ValueError(f"values of {array.dtype} where numbers are expected")
    if array.dtype.kind in "bi":
        return array.astype(np.int64)
    if not np.isfinite(array).all():
        raise ValueError("values that are not finite")
    return array.astype(np.float64 if array.ndim == 1 else np.float32)
