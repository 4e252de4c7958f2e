"""The index of a cache: what many processes do to it at once."""

import sqlite3
import threading

from gpupipe.cache.index import Index


def test_open_while_another_process_begins_waits_for_it(tmp_path):
    """SQLite refuses the change to a write-ahead log at once while another one writes, and asks no timeout."""
    other = sqlite3.connect(tmp_path / "index.sqlite3", isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    threading.Timer(0.1, other.close).start()
    index = Index(str(tmp_path), lambda _: None)
    assert index.rows() == []
    index.close()
