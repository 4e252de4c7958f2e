"""Where encoded images come from. A new source is a module beside this one, and a line in `_FORMATS`."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from gpupipe.errors import ConfigError, SourceError
from gpupipe.sources.base import Source, is_source


@dataclass(frozen=True, slots=True)
class _Format:
    """One kind of data set.

    Attributes:
        what: As it is named in messages.
        accepts: Whether a path or URL is of this kind.
        module, opener: What opens it; imported when it is needed.
    """

    what: str
    accepts: Callable[[str], bool]
    module: str
    opener: str


# The first that accepts a target opens it.
_FORMATS = (_Format("a folder of class folders with images", os.path.isdir, "gpupipe.sources.folder", "ImageFolder"),)


def open_source(target: str | os.PathLike[str] | Source) -> Source:
    """Open a data set.

    Args:
        target: The path of a folder of class folders; or an object that already is a `gpupipe.sources.base.Source`,
            which is returned as it is.

    Raises:
        ConfigError: Nothing that can be opened; the message lists what can.
        SourceError: There is no such path, or what is there is damaged.
    """
    supported = "; ".join(
        [*(each.what for each in _FORMATS), "an object with the methods of gpupipe.sources.base.Source"]
    )
    if isinstance(target, str | os.PathLike):
        path = os.path.expanduser(os.fsdecode(target))
        for each in _FORMATS:
            if each.accepts(path):
                return cast("Source", getattr(importlib.import_module(each.module), each.opener)(path))
        if "://" not in path and not os.path.lexists(path):
            raise SourceError(
                f"there is no {path!r} (looked from {os.getcwd()!r}). Supported are: {supported}", uri=path
            )
    elif is_source(target):
        return target
    root = getattr(target, "root", None)
    # A dataset of torchvision, most likely, out of the DataLoader that is being replaced.
    hint = f". Give its folder: {os.fspath(root)!r}" if isinstance(root, str | os.PathLike) else ""
    raise ConfigError(
        f"source={target!r} cannot be opened{hint}. Supported are: {supported}",
        field="source",
        value=target,
        allowed=supported,
    )
