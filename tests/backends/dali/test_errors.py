"""Every exception of DALI is mapped, at every place where DALI is called."""

import pytest

from gpupipe import Recipe
from gpupipe.backends.base import Options
from gpupipe.backends.dali import DaliBackend, graph
from gpupipe.backends.dali.errors import boundary
from gpupipe.errors import BackendError, DecodeError
from tests import images
from tests.backends.dali.common import CPU, backend, planned, records_of

RECIPE = Recipe.train(size=16)
# What the bindings were seen to raise, and what Python code around them can.
RAISED = [
    RuntimeError,
    ValueError,
    TypeError,
    IndexError,
    KeyError,
    MemoryError,
    StopIteration,
    OSError,
    AssertionError,
]


class Failing:
    """A pipeline that fails at one of its methods."""

    def __init__(self, method, error):
        self._method, self._error = method, error

    def __getattr__(self, name):
        def call(*_):
            if name == self._method:
                raise self._error
            return (self,) if name == "outputs" else None

        return call


@pytest.mark.parametrize("raised", RAISED)
@pytest.mark.parametrize(
    ("method", "stage"),
    [("feed_input", "feed"), ("schedule_run", "feed"), ("outputs", "run"), ("as_tensor", "hand-over")],
)
def test_backend_any_exception_of_a_run_is_a_backend_error(method, stage, raised, monkeypatch):
    records = records_of([images.jpeg(images.photo(40, 50))])
    headers, plan = planned(RECIPE, records)
    monkeypatch.setattr(graph, "build", lambda *_, **__: Failing(method, raised("from DALI")))
    with backend(RECIPE) as dali:
        error = dali.submit(records, headers, plan).exception(timeout=10)
    assert isinstance(error, BackendError)
    while error.__cause__ is not None and isinstance(error.__cause__, BackendError):
        error = error.__cause__
    assert (error.backend, error.stage) == ("dali", stage)
    assert isinstance(error.__cause__, raised)
    assert "from DALI" in str(error)


@pytest.mark.parametrize("raised", RAISED)
def test_backend_any_exception_while_building_is_a_backend_error(raised, monkeypatch):
    monkeypatch.setattr(graph, "build", lambda *_, **__: Failing("build", raised("from DALI")))
    with pytest.raises(BackendError, match="from DALI") as caught:
        DaliBackend(RECIPE, device=CPU, batch_size=2, options=Options())
    assert (caught.value.backend, caught.value.stage) == ("dali", "build")
    assert isinstance(caught.value.__cause__, raised)


def test_boundary_leaves_our_own_errors_and_interrupts_alone():
    for error in (DecodeError("bad file"), KeyboardInterrupt(), SystemExit()):
        with pytest.raises(type(error)) as caught, boundary("run"):
            raise error
        assert caught.value is error
