"""How long a source of ImageNet's size takes to open from its index, and what it keeps in memory.

    python benchmarks/bench_open.py              # about 5 minutes, 3 GB and 1.3 million files in the temporary folder

1,281,167 records in 1,000 classes, made for this: a folder of (empty) files, 147 tar shards with a tiny image and a
.cls file for each record, and an LMDB environment. Each is indexed once, and then opened from its index in fresh
processes: seconds until the length, the labels and one record are there, and resident memory above the imports.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from harness import write_result
from PIL import Image

RECORDS, CLASSES, SHARDS, ROUNDS = 1_281_167, 1000, 147, 5
# What was set out to be reached.
TARGET = {"seconds": 2.0, "memory_mb": 200.0}


def tiny_jpeg() -> bytes:
    out = io.BytesIO()
    Image.new("L", (8, 8)).save(out, "JPEG")
    return out.getvalue()


def label_of(number: int, records: int) -> int:
    return number * CLASSES // records


def make_folder(root: Path, records: int) -> Path:
    from gpupipe.sources.folder_index import write_folder_index

    for number in range(records):
        label = label_of(number, records)
        if number == 0 or label != label_of(number - 1, records):
            (root / f"n{label:08}").mkdir(parents=True)
        os.close(os.open(root / f"n{label:08}" / f"n{label:08}_{number:07}.JPEG", os.O_CREAT | os.O_WRONLY))
    write_folder_index(root)
    return root


def make_tar(root: Path, records: int) -> str:
    import gpupipe as gp

    root.mkdir()
    image = tiny_jpeg()
    for shard in range(SHARDS):
        with (root / f"shard-{shard:06}.tar").open("wb") as file:
            for number in range(records * shard // SHARDS, records * (shard + 1) // SHARDS):
                label = str(label_of(number, records)).encode()
                for ending, data in (("jpg", image), ("cls", label)):
                    member = tarfile.TarInfo(f"n{label.decode():0>8}_{number:07}.{ending}")
                    member.size = len(data)
                    file.write(member.tobuf(tarfile.USTAR_FORMAT) + data + bytes(-len(data) % 512))
            file.write(bytes(1024))
    target = str(root / f"shard-{{000000..{SHARDS - 1:06}}}.tar")
    gp.open_source(target).close()  # indexes it
    return target


def make_lmdb(root: Path, records: int) -> Path:
    import lmdb

    from gpupipe.sources.lmdb import write_index
    from gpupipe.sources.table import Strings, Table

    image = tiny_jpeg()
    keys = [f"n{label_of(number, records):08}/{number:07}.jpg" for number in range(records)]
    environment = lmdb.open(str(root), map_size=1 << 32, sync=False)
    with environment.begin(write=True) as transaction:
        for key in keys:
            transaction.put(key.encode(), image, append=True)
    environment.sync(True)  # noqa: FBT003 - py-lmdb has no name for it
    environment.close()
    sizes = np.full(records, len(image), np.int64)
    labels = np.array([label_of(number, records) for number in range(records)])
    shapes = np.full((records, 2), 8, np.int32)
    table = Table(keys=Strings.of(keys), labels=labels, sizes_bytes=sizes, shapes_px=shapes)
    write_index(root, table, classes=[f"n{label:08}" for label in range(CLASSES)])
    return root


MAKERS = {"folder": make_folder, "tar": make_tar, "lmdb": make_lmdb}


def resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def opened(target: str) -> dict[str, Any]:
    import numpy as _  # noqa: F401 - what every user has imported before
    import torch as _torch  # noqa: F401

    from gpupipe.sources import open_source

    before, begin = resident_mb(), time.perf_counter()
    source = open_source(target)
    records, first = len(source), source[len(source) // 2]
    labels = source.labels
    seconds = time.perf_counter() - begin
    assert labels is not None
    assert first.label == labels[records // 2]
    return {"records": records, "seconds": seconds, "memory_mb": resident_mb() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=RECORDS)
    parser.add_argument("--open", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.open:
        print(json.dumps(opened(options.open)))
        return
    measured: dict[str, Any] = {"target": TARGET}
    for name, make in MAKERS.items():
        with tempfile.TemporaryDirectory() as scratch:
            print(f"{name}: making {options.records} records", file=sys.stderr)
            begin = time.perf_counter()
            target = make(Path(scratch) / "data", options.records)
            made_s = time.perf_counter() - begin
            runs = []
            for _ in range(ROUNDS):
                done = subprocess.run(
                    [sys.executable, __file__, "--open", str(target)], capture_output=True, text=True, check=True
                )
                runs.append(json.loads(done.stdout))
        measured[name] = {
            "records": runs[0]["records"],
            "seconds": round(median(run["seconds"] for run in runs), 3),
            "slowest_s": round(max(run["seconds"] for run in runs), 3),
            "memory_mb": round(median(run["memory_mb"] for run in runs), 1),
            "made_and_indexed_s": round(made_s, 1),
        }
        print(f"{name}: {measured[name]}", file=sys.stderr)
    write_result("open", measured)


if __name__ == "__main__":
    main()
