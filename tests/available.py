"""The backends that can run here, so that a new one joins every battery by itself."""

import importlib
from functools import cache

import pytest

import gpupipe as gp
from gpupipe import backends
from gpupipe.errors import BackendUnavailable

ON_CPU = tuple(backends._BACKENDS)
each_backend = pytest.mark.parametrize("backend", ON_CPU)


@cache
def why_not(backend):
    """Why a backend cannot run on this CPU; None where it can."""
    try:
        backends.choose(backend, "cpu")
    except BackendUnavailable as error:
        return str(error)
    module = backends._BACKENDS[backend].module
    if importlib.util.find_spec(module) is None:
        return f"{module} is not there yet"
    return None


def need(backend):
    missing = why_not(backend)
    if missing is not None:
        pytest.skip(f"backend {backend}: {missing}")


def loader(source, recipe, backend, **arguments):
    """A loader on the CPU by a backend that may be missing, which skips the test."""
    need(backend)
    return gp.Loader(source, recipe, backend=backend, device="cpu", **arguments)
