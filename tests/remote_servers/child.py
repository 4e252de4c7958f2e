"""Reads a data set in a process of its own, which may be killed, or lack room or rights.

    python -m tests.remote_servers.child SPECIFICATION

prints one JSON object: what it read, the counters, or the error. It imports nothing heavy.
"""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import asdict
from typing import Any

import numpy as np

import gpupipe as gp


def digest(source: Any, order: Any) -> str:
    """Of all contents, whatever the order in which they are read."""
    found = {}
    for index in order:
        record = source[int(index)]
        found[int(index)] = f"{record.key} {record.label} {hashlib.sha256(record.data).hexdigest()}"
    return hashlib.sha256(json.dumps(sorted(found.items())).encode()).hexdigest()


def run(specification: dict[str, Any]) -> dict[str, Any]:
    """Open and read as the specification says.

    Args:
        specification: "url" and "options" of open_source; "seed" of the order; "epochs"; "stage": whether to stage
            first; "in_turn": read in the order in which the data set has its records, and say so ahead, as a loader
            does.
    """
    options = specification["options"]
    options["retries"] = gp.Retries(**options["retries"])
    found: dict[str, Any] = {}
    try:
        source = gp.open_source(specification["url"], **options)
        if specification.get("stage"):
            source.stage(progress=False)
        random = np.random.default_rng(specification["seed"])
        found["digests"] = []
        for _ in range(specification.get("epochs", 1)):
            order = random.permutation(len(source))
            if specification.get("in_turn"):
                order.sort()
                ahead = source.read_ahead()
                ahead.add(order)
            found["digests"].append(digest(source, order))
        found["stats"] = asdict(source.cache_stats)
    except gp.GpupipeError as error:
        cause: BaseException | None = error
        while cause is not None and getattr(cause, "errno", None) is None:
            cause = cause.__cause__
        found["error"] = {
            "type": type(error).__name__,
            "message": str(error),
            "errno": getattr(cause, "errno", None),
        }
    return found


if __name__ == "__main__":
    print(json.dumps(run(json.loads(sys.argv[1]))))  # noqa: T201
