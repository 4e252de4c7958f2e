"""Shared fixtures, and what the `gpu` marker does."""

from __future__ import annotations

import importlib.util
import os
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import images

REPO = Path(__file__).resolve().parent.parent
DATA = REPO.parent / "shared" / "data"

# The same examples in every run, and no deadline on shared machines. `--hypothesis-profile=explore` draws new ones.
settings.register_profile("ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.load_profile("ci")


@cache
def missing_for_gpu() -> str | None:
    """What a GPU test lacks here; None where it can run."""
    if importlib.util.find_spec("nvidia") is None or importlib.util.find_spec("nvidia.dali") is None:
        return "NVIDIA DALI is not installed"
    import torch

    return None if torch.cuda.is_available() else "torch sees no CUDA device"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is None:
        return
    missing = missing_for_gpu()
    if missing is None:
        return
    if os.environ.get("GPUPIPE_REQUIRE_GPU") == "1":
        pytest.fail(f"GPUPIPE_REQUIRE_GPU=1, but {missing}", pytrace=False)
    pytest.skip(f"needs a GPU: {missing}")


def _data(name: str) -> Path:
    path = DATA / name
    if not path.is_dir():
        pytest.skip(f"needs the test data in {path}, which is not part of the repository")
    return path


@pytest.fixture(scope="session")
def photos_dir() -> Path:
    """Real photos in class folders, beside the repository."""
    return _data("photos")


@pytest.fixture(scope="session")
def tricky_dir() -> Path:
    """Odd and broken image files, beside the repository."""
    return _data("tricky")


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated data set of class folders, mixed sizes and subsamplings; read only."""
    return images.folder(tmp_path_factory.mktemp("image_folder"))
