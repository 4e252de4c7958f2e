import time

import pytest

from gpupipe.errors import ConfigError
from gpupipe.remote.retries import GaveUp, Retries, is_permanent

FAST = Retries(tries=4, first_s=0.001, longest_s=0.01, attempt_s=1, limit_s=5)


class HttpError(Exception):
    def __init__(self, status, headers=None):
        super().__init__(f"HTTP {status}")
        self.status, self.headers = status, headers


def failing(*errors):
    """An attempt that fails in these ways, one after another, and then succeeds."""
    waiting = list(errors)

    def attempt(_):
        if waiting:
            raise waiting.pop(0)
        return "done"

    return attempt


def test_call_tries_again_and_counts():
    again = []
    assert FAST.call(failing(OSError("reset"), TimeoutError(), HttpError(503)), lambda: again.append(1)) == "done"
    assert len(again) == 3


def test_call_gives_up_after_its_tries():
    with pytest.raises(GaveUp, match=r"4 tries in .* the last: OSError: e4") as error:
        FAST.call(failing(*(OSError(f"e{number}") for number in range(1, 9))))
    assert error.value.tries == 4
    assert not error.value.missing


@pytest.mark.parametrize(
    "error", [FileNotFoundError("gone"), PermissionError(), HttpError(404), HttpError(403), TypeError(), ValueError()]
)
def test_call_does_not_try_again_what_cannot_change(error):
    with pytest.raises(GaveUp, match="1 try in") as found:
        FAST.call(failing(error))
    assert found.value.missing == (isinstance(error, FileNotFoundError) or getattr(error, "status", 0) == 404)


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_status_that_passes_is_not_permanent(status):
    assert not is_permanent(HttpError(status))


def test_not_found_that_was_made_of_something_else_is_judged_by_that():
    error = FileNotFoundError("url")
    error.__cause__ = HttpError(503)
    assert not is_permanent(error)
    error.__cause__ = HttpError(404)
    assert is_permanent(error)


def test_call_keeps_its_limit():
    began = time.monotonic()
    slow = Retries(tries=1000, first_s=0.05, longest_s=0.05, attempt_s=1, limit_s=0.2)
    with pytest.raises(GaveUp):
        slow.call(failing(*(OSError() for _ in range(1000))))
    assert time.monotonic() - began < 2


def test_call_waits_as_long_as_the_store_says():
    retries = Retries(tries=2, first_s=0.001, longest_s=0.3, attempt_s=1, limit_s=5)
    began = time.monotonic()
    retries.call(failing(HttpError(503, {"Retry-After": "60"})))
    assert 0.3 <= time.monotonic() - began < 3


def test_message_is_short_and_on_one_line():
    with pytest.raises(GaveUp) as error:
        Retries(tries=1).call(failing(OSError("x\n" * 5000)))
    assert len(str(error.value)) < 300
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "options", [{"tries": 0}, {"tries": 1.5}, {"first_s": 0}, {"limit_s": float("inf")}, {"attempt_s": "1"}]
)
def test_retries_that_cannot_be_raise(options):
    with pytest.raises(ConfigError, match=next(iter(options))):
        Retries(**options)
