"""A process of its own that puts damaged files through the backends, and says where they differ.

python child.py <first number> <count> <batch size> <report> <backend> ...

Writes one JSON object to <report>: how many are good, and the files on which somebody disagrees. The batch in work is
noted in <report>.at, for the case that this process does not live to tell.

FUZZ_LIMIT_S is how long a batch may take; FUZZ_FAULT ("crash 5" or "hang 5") makes file 5 one that no decoder
survives, to test the test.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # for `tests`

import numpy as np
import torch
from PIL import Image

import gpupipe as gp
from gpupipe import decode
from gpupipe.errors import DecodeError
from gpupipe.headers import scan
from tests.fuzz.mutations import mutated

RECIPE = gp.Recipe.train(size=16, scale=(0.02, 1.0))
# So that a changed header does not cost seconds; the limit itself is tested elsewhere.
MAX_PIXELS = 1_000_000
POLICY = gp.OnError("ignore", max_bad=1.0, max_pixels=MAX_PIXELS)
# PARITY.md: whole chain, without jitter; as a share of the normalised range (the smallest std is 0.224).
TOLERANCE = 0.05 / 255 / 0.224


class Mutants:
    columns = ()

    def __init__(self, first: int, count: int, at: Path) -> None:
        self.first, self.count, self.at = first, count, at
        self.uri = self.fingerprint = f"mutants {first} to {first + count - 1}"
        self.files: dict[int, bytes] = {}
        self.fault = os.environ.get("FUZZ_FAULT", "").split()

    @property
    def labels(self):
        return np.zeros(self.count, np.int64)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.fault[1:] == [str(self.first + index)]:
            os.abort() if self.fault[0] == "crash" else time.sleep(1000)
        # Kept, because making one costs as much as decoding it.
        if index not in self.files:
            self.files[index] = mutated(self.first + index)[1]
        return gp.Record(self.files[index], 0, index, str(self.first + index))

    def close(self):
        pass

    def note(self, backend: str, index: int) -> None:
        """What is in work, and from now on."""
        # Another thread may end the process at any moment.
        part = Path(f"{self.at}.part")
        part.write_text(json.dumps({"backend": backend, "first": self.first + index}))
        part.replace(self.at)
        faulthandler.dump_traceback_later(int(os.environ.get("FUZZ_LIMIT_S", "60")), exit=True)


def by_backend(source: Mutants, backend: str, batch_size: int):
    """Verdict and image of each file, and the reasons."""
    options = gp.Options(threads=2, prefetch=1)
    with gp.Loader(
        source,
        RECIPE,
        batch_size=batch_size,
        backend=backend,
        device="cpu",
        on_error=POLICY,
        fields=("image", "valid"),
        options=options,
    ) as loader:
        valid, found = [], []
        batches = iter(loader)
        for number in range(len(loader)):
            source.note(backend, number * batch_size)
            image, good = next(batches)
            found.append(image)
            valid.append(good)
        return torch.cat(valid).numpy(), torch.cat(found), {bad.index: bad.reason for bad in loader.errors}


def by_pillow(data: bytes):
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(io.BytesIO(data)) as image:
            if image.width * image.height > MAX_PIXELS:
                return None
            return np.array(image.convert("RGB"))
    except Exception:
        return None


def whole(data: bytes):
    try:
        return decode.rgb(data, scan(data, MAX_PIXELS))
    except DecodeError:
        return None


def is_native(data: bytes) -> bool:
    try:
        return scan(data, MAX_PIXELS).native
    except DecodeError:
        return False


def main() -> None:
    first, count, batch_size, report, *backends = sys.argv[1:]
    report = Path(report)
    faulthandler.enable()
    source = Mutants(int(first), int(count), Path(f"{report}.at"))
    disagreements = []
    reference = None
    for backend in backends:
        valid, image, reasons = by_backend(source, backend, int(batch_size))
        if reference is None:
            reference = (valid, image)
            continue
        far = (image - reference[1]).abs().flatten(1).amax(dim=1).numpy()
        for index in np.flatnonzero((valid != reference[0]) | (far > TOLERANCE)).tolist():
            what = "verdict" if valid[index] != reference[0][index] else "pixels"
            disagreements.append(
                {
                    "number": source.first + index,
                    "between": [backends[0], backend],
                    "what": what,
                    "off": float(far[index]),
                    "good": [bool(reference[0][index]), bool(valid[index])],
                    "reason": reasons.get(index),
                }
            )
    native = 0
    for index in range(len(source)):
        data = source[index].data
        if index % 100 == 0:
            source.note("Pillow and decode.rgb", index)
        native += is_native(data)
        theirs, ours = by_pillow(data), whole(data)
        if (theirs is None) != (ours is None):
            what = "verdict"
        elif theirs is not None and not np.array_equal(theirs, ours):
            what = "pixels"
        else:
            what = None
        if (ours is not None) != bool(reference[0][index]):
            what = "verdict of the whole decode"
        if what is not None:
            good = [theirs is not None, ours is not None, bool(reference[0][index])]
            between = ["Pillow", "decode.rgb", backends[0]]
            disagreements.append({"number": source.first + index, "between": between, "what": what, "good": good})
    found = {"good": int(reference[0].sum()), "native": native, "count": len(source), "disagreements": disagreements}
    report.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
