"""Print what pyproject.toml asks for, one requirement a line: the core's, and those of the extras named.

python docker/requirements.py pyproject.toml fast lmdb measure

An image installs these in a layer of their own, which stays cached while only the code changes.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def of_extra(project: dict[str, Any], extra: str) -> Iterator[str]:
    """The requirements of one extra, those of the extras that it names in turn included."""
    own = f"{project['name']}["
    for requirement in project["optional-dependencies"][extra]:
        if requirement.startswith(own):
            for name in requirement[len(own) :].rstrip("]").split(","):
                yield from of_extra(project, name)
        else:
            yield requirement


def main() -> None:
    path, *extras = sys.argv[1:]
    project = tomllib.loads(Path(path).read_text(encoding="utf-8"))["project"]
    found = list(project["dependencies"])
    for extra in extras:
        found += of_extra(project, extra)
    print("\n".join(dict.fromkeys(found)))


if __name__ == "__main__":
    main()
