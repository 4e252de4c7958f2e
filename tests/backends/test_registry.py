"""Which backend is chosen, what is said about it, and what works without DALI."""

import dataclasses
import importlib
import inspect
import subprocess
import sys
import textwrap

import pytest
import torch

from gpupipe import ConfigError, Recipe, backends
from gpupipe.backends.base import Options
from gpupipe.errors import BackendUnavailable
from tests.conftest import REPO


@pytest.fixture
def machine(monkeypatch):
    """Make torch and the libraries look as they would on some machine."""

    def pretend(*, cuda_build="13.0", devices=0, current=0, missing=(), numba=False):
        missing = {*missing, *(() if numba else ("numba",))}
        entry = backends._BACKENDS["torchvision"]
        monkeypatch.setitem(backends._BACKENDS, "numba", dataclasses.replace(entry, needs="numba"))
        monkeypatch.setattr(torch.version, "cuda", cuda_build)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
        monkeypatch.setattr(backends, "import_problem", lambda library: f"no {library}" if library in missing else None)

    return pretend


@pytest.mark.parametrize(
    ("asked", "has", "name", "device", "reason"),
    [
        (
            ("auto", None),
            {"cuda_build": None},
            "torchvision",
            "cpu",
            "torchvision on the CPU: no CUDA device was found (torch was built without CUDA)",
        ),
        (("auto", None), {}, "torchvision", "cpu", "torchvision on the CPU: no CUDA device was found"),
        (
            ("auto", None),
            {"devices": 8, "current": 5},
            "dali",
            "cuda:5",
            "dali on CUDA device 5: a CUDA device was found",
        ),
        (("auto", None), {"numba": True}, "numba", "cpu", "numba on the CPU: no CUDA device was found"),
        (("auto", None), {"numba": True, "missing": ["torchvision"]}, "numba", "cpu", "numba on the CPU: "),
        (("auto", "cpu"), {"numba": True, "devices": 1}, "numba", "cpu", 'numba on the CPU: device="cpu" was asked'),
        (("auto", "cuda"), {"devices": 8, "current": 5}, "dali", "cuda:5", "dali on CUDA device 5: "),
        (("auto", "cuda:2"), {"devices": 8, "current": 5}, "dali", "cuda:2", "dali on CUDA device 2: "),
        (("auto", torch.device("cuda", 2)), {"devices": 8}, "dali", "cuda:2", "dali on CUDA device 2: "),
        (("auto", "cpu"), {"devices": 8}, "torchvision", "cpu", 'torchvision on the CPU: device="cpu" was asked for'),
        (
            ("auto", None),
            {"devices": 1, "missing": ["nvidia.dali"]},
            "torchvision",
            "cpu",
            "torchvision on the CPU: no nvidia.dali; pip install nvidia-dali-cuda120",
        ),
        (
            ("auto", "cuda"),
            {"devices": 1, "missing": ["nvidia.dali"]},
            "torchvision",
            "cuda:0",
            "torchvision on the CPU, with batches copied to CUDA device 0: no nvidia.dali",
        ),
        (("dali", None), {"devices": 2, "current": 1}, "dali", "cuda:1", 'dali on CUDA device 1: backend="dali" was'),
        (("dali", "cpu"), {}, "dali", "cpu", 'dali on the CPU: backend="dali" was asked for'),
        (("torchvision", None), {"devices": 2}, "torchvision", "cpu", "torchvision on the CPU: "),
        (
            ("torchvision", "cuda"),
            {"devices": 2, "current": 1},
            "torchvision",
            "cuda:1",
            "torchvision on the CPU, with batches copied to CUDA device 1: ",
        ),
    ],
)
def test_choose_takes_what_the_machine_has_and_says_why(machine, asked, has, name, device, reason):
    machine(**has)
    choice = backends.choose(*asked)
    assert (choice.name, choice.device) == (name, torch.device(device))
    assert choice.reason.startswith(reason)
    assert str(choice) == f"{name} on {device}"


@pytest.mark.parametrize(
    ("asked", "has", "says"),
    [
        (("dali", None), {}, ["no CUDA device was found", 'device="cpu"', "for tests", 'backend="auto"']),
        (("dali", "cuda"), {"cuda_build": None}, ["torch was built without CUDA"]),
        (("torchvision", "cuda"), {}, ["no CUDA device was found", "everything on the CPU"]),
        (("auto", "cuda:1"), {}, ["no CUDA device was found"]),
        (("auto", "cuda:2"), {"devices": 2}, ['device="cuda:2"', "numbered from 0 to 1"]),
        (("dali", "cpu"), {"missing": ["nvidia.dali"]}, ["no nvidia.dali", "pip install nvidia-dali-cuda120"]),
        (("auto", None), {"missing": ["torchvision", "nvidia.dali"]}, ["no torchvision", "pip install torchvision"]),
    ],
)
def test_choose_what_is_not_here_is_unavailable_with_remedies(machine, asked, has, says):
    machine(**has)
    with pytest.raises(BackendUnavailable) as caught:
        backends.choose(*asked)
    for words in says:
        assert words in str(caught.value)
    assert caught.value.missing
    assert caught.value.install


def test_choose_unknown_name_lists_the_names():
    with pytest.raises(ConfigError, match="backend='tensorflow' is not valid: it must be one of 'auto'") as caught:
        backends.choose("tensorflow")
    assert caught.value.allowed == ("auto", *backends._BACKENDS)


@pytest.mark.parametrize("device", ["mps", "gpu", "", 1.5, "cuda:x"])
def test_choose_device_of_another_kind_is_a_config_error(device):
    with pytest.raises(ConfigError, match="'cpu', 'cuda', 'cuda:<number>' or None"):
        backends.choose("torchvision", device)


def test_create_makes_the_backend_on_its_device():
    backend = backends.create(
        "torchvision", Recipe.train(size=8), device="cpu", batch_size=2, options=Options(threads=1)
    )
    assert backend.name == "torchvision"
    backend.close()


def test_create_unknown_name_is_a_config_error():
    with pytest.raises(ConfigError, match="one of"):
        backends.create("other", Recipe.train(size=8), device="cpu", batch_size=2)


@pytest.mark.parametrize("name", backends._BACKENDS)
def test_registry_names_classes_that_exist_and_take_the_same_arguments(name):
    entry = backends._BACKENDS[name]
    pytest.importorskip(entry.needs)
    made_by = getattr(importlib.import_module(entry.module), entry.cls)
    assert list(inspect.signature(made_by).parameters) == ["recipe", "device", "batch_size", "options"]


def run_python(code):
    found = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=REPO,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_import_of_the_registry_imports_no_library():
    heavy = run_python("""
        import sys
        import gpupipe.backends
        print([name for name in ("torch", "torchvision", "nvidia.dali", "numba") if name in sys.modules])
    """)
    assert heavy == "[]\n"


def test_without_dali_everything_but_dali_works():
    # As on macOS and Windows: not "nvidia.dali" alone, the whole namespace is missing. torch looks for CUDA libraries
    # in it on Linux, so that comes first.
    said = run_python("""
        import sys, torch
        sys.modules["nvidia"] = sys.modules["nvidia.dali"] = None
        import gpupipe as gp
        from gpupipe import backends
        from gpupipe.headers import scan
        from gpupipe.records import Record
        from tests import images
        recipe = gp.Recipe.train(size=16)
        record = Record(images.jpeg(images.photo(30, 40)), 0, 0, "a")
        choice = backends.choose("auto")
        assert choice.name != "dali" and choice.device.type == "cpu", choice
        backend = backends.create(choice.name, recipe, device=choice.device, batch_size=1)
        plan = gp.make_plan(recipe, seed=0, epoch=0, indices=[0], sizes=[(30, 40)])
        print(tuple(backend.submit([record], [scan(record.data)], plan).result().images.shape))
        backend.close()
        try:
            backends.choose("dali", "cpu")
        except gp.BackendUnavailable as error:
            print(error)
    """)
    assert said.startswith("(1, 3, 16, 16)\n")
    assert "nvidia.dali cannot be imported (ModuleNotFoundError: " in said
    assert "pip install nvidia-dali-cuda120 (Linux only)" in said


@pytest.mark.parametrize("name", [["numba"], None, 3])
def test_choose_with_no_name_at_all_raises(name):
    with pytest.raises(ConfigError, match="backend="):
        backends.choose(name)
