"""Errors carry facts, and keep them on their way out of a worker process."""

import copy
import pickle
import threading
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from gpupipe import errors
from gpupipe.errors import (
    BackendError,
    BackendUnavailable,
    ConfigError,
    DecodeError,
    GpupipeError,
    RecordError,
    SourceError,
    StateError,
)

# Class -> its parents and the facts it always has: the table in CONVENTIONS.
HIERARCHY = {
    GpupipeError: ((Exception,), ()),
    ConfigError: ((GpupipeError, ValueError), ("field", "value", "allowed")),
    SourceError: ((GpupipeError, OSError), ("uri",)),
    RecordError: ((SourceError,), ("uri", "index", "key", "path", "offset")),
    DecodeError: ((RecordError,), ("uri", "index", "key", "path", "offset", "backend")),
    BackendError: ((GpupipeError, RuntimeError), ("backend", "stage")),
    BackendUnavailable: ((BackendError, ImportError), ("backend", "stage", "missing", "install")),
    StateError: ((GpupipeError, ValueError), ("expected", "actual")),
}
CLASSES = pytest.mark.parametrize("kind", list(HIERARCHY), ids=lambda kind: kind.__name__)


def raise_in_worker(kind: type[GpupipeError], message: str, facts: dict[str, object]) -> None:
    raise kind(message, **facts)


def test_module_has_no_error_that_these_tests_miss():
    found = {value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert found == set(HIERARCHY)


@CLASSES
def test_class_parents_are_those_of_the_conventions(kind):
    assert kind.__bases__ == HIERARCHY[kind][0]


@CLASSES
def test_error_without_facts_has_them_as_none(kind):
    error = kind("it failed")
    assert {name: getattr(error, name) for name in HIERARCHY[kind][1]} == dict.fromkeys(HIERARCHY[kind][1])


@CLASSES
@pytest.mark.parametrize("round_trip", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_error_after_a_round_trip_has_class_message_and_facts(kind, round_trip):
    facts = {name: f"the {name}" for name in HIERARCHY[kind][1]} | {"extra": (1, [2.5, None])}
    back = round_trip(kind("it failed: 3 is not 4", **facts))
    assert type(back) is kind
    assert str(back) == back.message == "it failed: 3 is not 4"
    assert back.args == ("it failed: 3 is not 4",)
    assert back.facts == facts
    assert {name: getattr(back, name) for name in facts} == facts


@CLASSES
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_error_survives_every_pickle_protocol(kind, protocol):
    back = pickle.loads(pickle.dumps(kind("broken", extra=7), protocol))
    assert (type(back), str(back), back.extra) == (kind, "broken", 7)


def test_error_with_a_fact_that_cannot_be_pickled_travels_with_its_repr():
    lock = threading.Lock()
    error = ConfigError("no", field="steps", value=lock, allowed=lambda: 0)
    assert error.value is lock
    back = pickle.loads(pickle.dumps(error))
    assert back.field == "steps"
    assert back.value == repr(lock)
    assert "<lambda>" in back.allowed


def test_errors_of_every_class_come_out_of_a_worker_process():
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        for kind, (_, names) in HIERARCHY.items():
            facts = dict.fromkeys(names, 3)
            with pytest.raises(kind, match="from a worker") as caught:
                pool.submit(raise_in_worker, kind, "from a worker", facts).result(timeout=60)
            assert type(caught.value) is kind
            assert caught.value.facts == facts


@CLASSES
def test_error_is_caught_as_the_builtin_it_stands_for(kind):
    for parent in kind.__mro__[:-1]:
        with pytest.raises(parent):
            raise kind("x")


@CLASSES
def test_error_with_a_cause_keeps_it(kind):
    with pytest.raises(kind) as caught:
        raise kind("x") from KeyError("the cause")
    assert isinstance(caught.value.__cause__, KeyError)


@CLASSES
def test_str_is_the_message_alone(kind):
    # OSError and KeyError format their arguments in their own ways.
    assert str(kind("line one\nline two", extra=1)) == "line one\nline two"
