"""What works on this machine, and what to do about what does not: for new machines, images and bug reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from gpupipe import backends
from gpupipe.backends.base import DECODE, Decode, Options
from gpupipe.errors import BackendUnavailable, GpupipeError
from gpupipe.parity import check_parity
from gpupipe.parity.environment import environment
from gpupipe.recipe import Recipe

Verdict = Literal["ok", "missing", "failed"]
Say = Callable[[str], None]

# A decoder may take the process down with it; this one is a child's.
_REGION_CHECK = "from gpupipe.backends.numba_cpu.decode import regions_are_exact; print(regions_are_exact())"
_EXACT_CHECK = "from gpupipe.backends.numba_cpu.exact import uint8_is_exact; print(uint8_is_exact())"
_CHILD_TIMEOUT_S = 120
_INSTALL_FAST = "pip install 'gpupipe[fast]'"
_INSTALL_DALI = "pip install nvidia-dali-cuda120 (Linux only)"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: What.
        verdict: "missing" is no failure: gpupipe works without it, slower or elsewhere.
        found: What was seen.
        remedy: What to do about it; empty where all is well.
    """

    name: str
    verdict: Verdict
    found: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class SelfCheck:
    """What `selfcheck` found.

    Attributes:
        checks: In the order in which they were made.
        environment: Name -> version.
    """

    checks: list[Check]
    environment: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether nothing failed."""
        return all(check.verdict != "failed" for check in self.checks)

    def to_json(self) -> str:
        """Everything, as JSON."""
        return json.dumps({"ok": self.ok, **asdict(self)}, indent=2)

    def table(self) -> str:
        """For a terminal."""
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.verdict:8}{check.name:{width}}  {check.found}")
            if check.remedy:
                lines.append(f"{'':8}{'':{width}}  -> {check.remedy}")
        versions = ", ".join(f"{name} {version}" for name, version in self.environment.items())
        verdict = "all is well" if self.ok else "something failed: see above"
        return "\n".join([*lines, "", versions, "", verdict])


def selfcheck(*, gpu: bool = False, say: Say | None = None) -> SelfCheck:
    """Look at everything that gpupipe needs here, and compare every backend's pixels on generated images.

    Takes about 20 s, and longer when kernels have to be compiled. Whatever might crash runs in a child process.

    Args:
        gpu: Whether a GPU that cannot be used is a failure, and not just something missing.
        say: Is told what is going on.
    """
    tell: Say = say or (lambda _: None)
    checks: list[Check] = []
    for check in _checks(required=gpu):
        checks.append(check)
        tell(f"{check.name}: {check.verdict}")
    return SelfCheck(checks, environment())


def _checks(*, required: bool) -> Iterator[Check]:
    yield _gpu(required=required)
    for library, install in (("nvidia.dali", _INSTALL_DALI), ("numba", _INSTALL_FAST)):
        problem = backends.import_problem(library)
        yield Check(library, "missing", problem, install) if problem else Check(library, "ok", "can be imported")
    yield _jpeg_decoder()
    if backends.import_problem("numba") is None:
        yield _regions()
        yield _exact()
    with tempfile.TemporaryDirectory() as folder:
        write_images(Path(folder))
        for name in backends._BACKENDS:
            if name != "torchvision":
                yield _parity(folder, name, "cpu", required=False)
        if backends.cuda_problem() is None:
            for decode in DECODE:
                yield _parity(folder, "dali", "cuda", decode=decode, required=required)
    yield _loader()


def _gpu(*, required: bool) -> Check:
    import torch

    problem = backends.cuda_problem()
    if problem is None:
        names = ", ".join(torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count()))
        return Check("GPU", "ok", f"{names}; torch's CUDA {torch.version.cuda}")
    remedy = "everything runs on the CPU; for a GPU: an NVIDIA driver, and a CUDA build of torch"
    if os.path.exists("/dev/nvidiactl") or os.path.exists("/dev/nvidia0"):
        remedy = "there is an NVIDIA device that torch cannot use: install a CUDA build of torch for this driver"
    return Check("GPU", "failed" if required else "missing", problem, remedy)


def _jpeg_decoder() -> Check:
    from gpupipe.decode import torchvision_decoder

    if torchvision_decoder() is None:
        found = "this torchvision has no decode_jpeg: Pillow decodes, in about 1.2 times the time"
        return Check("torchvision's JPEG decoder", "missing", found, "nothing needs to be done; numba is not affected")
    return Check("torchvision's JPEG decoder", "ok", "is there")


def _regions() -> Check:
    name, answer = "region decode on the CPU", _in_child(_REGION_CHECK)
    if answer == "True":
        return Check(name, "ok", "exact: the numba backend decodes no more than it needs")
    if answer == "False":
        found = "nvImageCodec is missing, or not exact here: images are decoded whole, in 1.3 times the time"
        return Check(name, "missing", found, _INSTALL_DALI)
    remedy = "uninstall nvidia-nvimgcodec-cu12, and report this with the output of `gpupipe selfcheck --json`"
    return Check(name, "failed", f"the check itself broke: {answer}", remedy)


def _exact() -> Check:
    name, answer = 'numba kernels, precision="uint8"', _in_child(_EXACT_CHECK)
    if answer == "True":
        return Check(name, "ok", "torchvision's pixels, bit for bit")
    if answer == "False":
        return Check(name, "missing", "not torchvision's pixels on this CPU: torch's own operators are used, slower")
    return Check(name, "failed", f"the check itself broke: {answer}", "report this with `gpupipe selfcheck --json`")


def _in_child(code: str) -> str:
    """The last line that Python code prints in a process of its own, or how that ended."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_CHILD_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_CHILD_TIMEOUT_S} s"
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()
        return f"exit status {done.returncode}" + (f", {last[-1]}" if last else "")
    return (done.stdout.strip().splitlines() or ["no output"])[-1]


def _parity(folder: str, backend: str, device: str, *, required: bool, decode: Decode = "gpu") -> Check:
    name = f"pixels of {backend} on {device}" + (f', decode="{decode}"' if device == "cuda" else "")
    recipes = (
        Recipe.train(size=64, jitter=(0.4, 0.4, 0.4, 0.1)),
        Recipe.eval(size=64, resize=72),
        Recipe.eval(size=64, resize=72, precision="uint8"),
    )
    worst = 0.0
    try:
        for recipe in recipes:
            report = check_parity(folder, recipe, backend=f"{backend}:{device}", options=Options(decode=decode))
            if not report.ok:
                return Check(name, "failed", "outside the tolerance:\n" + report.table(), "use another backend=")
            if recipe.precision == "float32":
                worst = max(
                    worst, *(row.max_lsb for row in report.rows if (row.stage, row.variant) == ("whole chain", ""))
                )
    except BackendUnavailable as error:
        return Check(name, "failed" if required else "missing", str(error))
    except GpupipeError as error:
        return Check(name, "failed", str(error), "use another backend=, and report this")
    return Check(name, "ok", f"at most {worst:.4f} LSB from torchvision's")


def _loader() -> Check:
    choice = backends.choose("auto", None)
    return Check('backend="auto"', "ok", choice.reason)


def write_images(folder: Path) -> None:
    """A few images of every kind that decoders treat differently, by formulas, in one class folder."""
    from PIL import Image

    (folder / "a").mkdir()
    y, x = np.mgrid[0:240, 0:330].astype(np.float64)
    rng = np.random.default_rng(0)
    for number, (ending, mode, options) in enumerate(_KINDS):
        waves = [128 + 90 * np.sin(x / (5 + number + channel) + y / (9 + channel)) for channel in range(3)]
        pixels = np.stack(waves, axis=-1) + rng.normal(0, 12, (240, 330, 3))
        image = Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)
        image.save(folder / "a" / f"{number}.{ending}", **options)


_KINDS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("jpg", "RGB", {"subsampling": 0}),
    ("jpg", "RGB", {"subsampling": 1}),
    ("jpg", "RGB", {"subsampling": 2}),
    ("jpg", "RGB", {"progressive": True}),
    ("jpg", "L", {}),
    ("jpg", "CMYK", {}),
    ("png", "RGBA", {}),
    ("webp", "RGB", {"lossless": True}),
)
