"""Servers for these tests, and a guard: none of them may hang."""

from __future__ import annotations

import faulthandler
import signal
from pathlib import Path

import pytest

from tests.remote_servers import s3, store
from tests.remote_servers.data_sets import HttpRemote, S3Remote

GUARD_S = 60


class Hangs(BaseException):
    """Not an Exception, so that nothing takes it for a failure that is worth another try."""


@pytest.fixture(autouse=True)
def guard():
    """End a test that hangs: with an exception in the main thread, and where that waits in foreign code the process."""

    def hangs(*_):
        faulthandler.dump_traceback()
        raise Hangs(f"not done after {GUARD_S} s")

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(GUARD_S)
    faulthandler.dump_traceback_later(GUARD_S + 30, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="session")
def s3_server():
    server = s3.S3Server()
    yield server
    server.stop()


@pytest.fixture
def served(tmp_path: Path):
    """An empty folder that an HTTP server gives out, and the server."""
    root = tmp_path / "served"
    root.mkdir()
    with store.FolderStore(root) as server:
        yield root, server


@pytest.fixture
def http_remote(tmp_path: Path):
    """A `Remote` over HTTP, whose folder is empty yet."""
    (tmp_path / "data").mkdir()
    remote = HttpRemote(tmp_path / "data")
    yield remote
    remote.close()


@pytest.fixture
def s3_remote(tmp_path: Path, s3_server):
    """The same over S3."""
    (tmp_path / "data").mkdir()
    remote = S3Remote(tmp_path / "data", s3_server)
    yield remote
    remote.close()


@pytest.fixture(params=["http", "s3"])
def remote(request):
    """Either."""
    return request.getfixturevalue(f"{request.param}_remote")
