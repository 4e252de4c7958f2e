"""What a result was made with: versions and machine, for people who compare reports."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path

_PACKAGES = (
    "gpupipe",
    "torch",
    "torchvision",
    "pillow",
    "numpy",
    "numba",
    "nvidia-dali-cuda120",
    "nvidia-dali-cuda130",
    "nvidia-nvimgcodec-cu12",
)


def environment() -> dict[str, str]:
    """Name -> version or description; packages that are not installed are left out."""
    import torch
    from PIL import features

    found = {"python": platform.python_version(), "platform": platform.platform()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    jpeg = features.version_feature("libjpeg_turbo")
    if jpeg:
        found["libjpeg-turbo of Pillow"] = str(jpeg)
    found["cpu"] = _cpu()
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name()
    return found


def _cpu() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
