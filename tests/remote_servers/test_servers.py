"""The servers of these tests do what they are for: what the other tests find rests on it."""

import http.client
import socket
import time
from contextlib import suppress

import fsspec
import pytest

from tests.remote_servers import s3
from tests.remote_servers.proxy import KINDS, Fault, Proxy, always, first, seeded
from tests.remote_servers.serving import Request
from tests.remote_servers.store import FolderStore, Slow

DATA = bytes(range(256)) * 10


@pytest.fixture
def proxy(served):
    root, store = served
    (root / "a b").mkdir()
    (root / "a b" / "x.bin").write_bytes(DATA)
    (root / "y.bin").write_bytes(b"y")
    with Proxy(store.url) as proxy:
        yield proxy


def ask(server, target, method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, target, headers=headers)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def raw(server, target="/y.bin"):
    """All bytes of one answer, and whether the connection was reset."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode())
        found = b""
        try:
            while part := connection.recv(65536):
                found += part
        except ConnectionResetError:
            return found, True
        return found, False


def test_store_is_a_file_system_to_fsspec(proxy):
    fs = fsspec.filesystem("http", skip_instance_cache=True)
    assert fs.find(proxy.url) == [f"{proxy.url}/a%20b/x.bin", f"{proxy.url}/y.bin"]
    assert fs.cat_file(f"{proxy.url}/a%20b/x.bin") == DATA
    assert fs.cat_file(f"{proxy.url}/a%20b/x.bin", start=100, end=300) == DATA[100:300]
    assert fs.info(f"{proxy.url}/y.bin")["size"] == 1


@pytest.mark.parametrize(
    ("span", "data"),
    [("bytes=0-0", DATA[:1]), ("bytes=2550-9999", DATA[2550:]), ("bytes=7-", DATA[7:]), ("bytes=-9", DATA[-9:])],
)
def test_store_gives_ranges(proxy, span, data):
    status, headers, body = ask(proxy, "/a%20b/x.bin", Range=span)
    assert (status, body) == (206, data)
    assert headers["Content-Range"].endswith(f"/{len(DATA)}")


def test_store_refuses_a_range_behind_the_end(proxy):
    status, headers, _ = ask(proxy, "/a%20b/x.bin", Range="bytes=2560-2570")
    assert (status, headers["Content-Range"]) == (416, f"bytes */{len(DATA)}")


def test_store_tags_by_content(proxy, served):
    root, _ = served
    status, before, body = ask(proxy, "/y.bin", method="HEAD")
    assert (status, before["Content-Length"], body) == (200, "1", b"")
    (root / "y.bin").write_bytes(b"z")
    assert ask(proxy, "/y.bin")[1]["ETag"] != before["ETag"]
    (root / "y.bin").write_bytes(b"y")
    assert ask(proxy, "/y.bin")[1]["ETag"] == before["ETag"]


def test_store_has_nothing_above_its_root(proxy, served):
    (served[0].parent / "secret").write_text("x")
    assert ask(proxy, "/../secret")[0] == ask(proxy, "/none")[0] == 404


@pytest.mark.parametrize("kind", KINDS)
def test_each_fault_hits_once_and_only_then(proxy, kind):
    whole, _ = raw(proxy, "/a%20b/x.bin")
    proxy.forget()
    proxy.plan = first(Fault(kind=kind))
    found, was_reset = raw(proxy, "/a%20b/x.bin")
    assert found != whole
    assert was_reset == (kind == "reset")
    head, _, body = found.partition(b"\r\n\r\n")
    facts = {"refuse": not found, "head": not body, "flip": len(body) == len(DATA), "extra": len(body) > len(DATA)}
    facts |= {"cut": body == DATA[:1280] and b": 2560" in head, "short": body == DATA[:1280] and b": 1280" in head}
    facts |= {"long": body == DATA and b": 2660" in head, "less": body == DATA and b": 1280" in head}
    facts |= {"500": b" 500 " in head, "503": b" 503 " in head, "503 later": b"Retry-After: 1" in head, "reset": True}
    assert facts[kind]
    assert raw(proxy, "/a%20b/x.bin") == (whole, False)
    assert [each.kind for each in proxy.done] == [kind]


def test_seeded_faults_are_the_same_in_any_order_and_end():
    requests = [Request("GET", f"/{number}", None, attempt) for number in range(200) for attempt in range(3)]
    plan, again, other = seeded(1), seeded(1), seeded(2)
    drawn = [plan(each) for each in requests]
    assert drawn == [again(each) for each in reversed(requests)][::-1]
    assert drawn != [other(each) for each in requests]
    assert all(fault.kind is None for request, fault in zip(requests, drawn, strict=True) if request.attempt == 2)
    assert 130 < sum(fault.kind is not None for fault in drawn) < 270
    assert {fault.kind for fault in drawn} >= set(KINDS) - {"flip"}


def test_slow_store_waits_and_stalls_for_its_share():
    slow = Slow(0, 0.02, 2, 0.1, 0.5)
    delays = [slow(Request("GET", f"/{number}", None, 0), 0) for number in range(1000)]
    assert set(delays) == {0.02, 2.02}
    assert 60 < delays.count(2.02) == slow.stalls < 150
    assert {slow(Request("GET", f"/{number}", None, 0), 1) for number in range(100)} == {0, 2}


def test_slow_store_gives_large_objects_whole(served):
    root, _ = served
    data = bytes(range(256)) * 10_000
    (root / "large.bin").write_bytes(data)
    parts = []

    def delay_s(request, part):
        parts.append((request.method, part))
        return 0.0

    with FolderStore(root, delay_s) as store:
        assert ask(store, "/large.bin")[2] == data
        assert ask(store, "/large.bin", method="HEAD")[1]["Content-Length"] == str(len(data))
    assert parts == [("GET", 0), ("GET", 1), ("GET", 2), ("HEAD", 0)]


def test_delay_and_pause_take_their_time(proxy):
    proxy.plan = always(Fault(delay_s=0.1, pause_s=0.1))
    start = time.perf_counter()
    assert ask(proxy, "/a%20b/x.bin")[2] == DATA
    assert time.perf_counter() - start >= 0.2


def test_server_goes_away_and_comes_back_on_its_port(proxy):
    kept = socket.create_connection(("127.0.0.1", proxy.port), timeout=10)
    assert ask(proxy, "/y.bin")[2] == b"y"
    proxy.stop()
    with kept, suppress(ConnectionResetError):  # or a FIN, which is as good
        assert kept.recv(1) == b""
    with pytest.raises(ConnectionRefusedError):
        ask(proxy, "/y.bin")
    proxy.start()
    assert ask(proxy, "/y.bin")[2] == b"y"


def test_requests_are_counted_by_object(proxy):
    for _ in range(3):
        ask(proxy, "/y.bin")
    ask(proxy, "/y.bin", method="HEAD")
    ask(proxy, "/a%20b/x.bin", Range="bytes=0-1")
    assert proxy.fetches() == {"/y.bin": 3, "/a%20b/x.bin": 1}
    assert proxy.fetches(".bin").total() == 4
    assert proxy.requests[-1] == Request("GET", "/a%20b/x.bin", "bytes=0-1", 0)


def test_s3_server_behind_the_proxy(s3_server, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x y.bin").write_bytes(DATA)
    s3_server.upload(tmp_path, "servers")
    with Proxy(s3_server.url) as proxy:
        fs = fsspec.filesystem("s3", skip_instance_cache=True, **s3.options(proxy.url))
        assert fs.find("servers") == ["servers/a/x y.bin"]
        assert fs.cat_file("servers/a/x y.bin", start=5, end=9) == DATA[5:9]
        before = fs.info("servers/a/x y.bin")["ETag"]
        s3_server.put("servers", "a/x y.bin", b"other")
        fs.invalidate_cache()
        assert fs.info("servers/a/x y.bin")["ETag"] != before
        assert "/servers/a/x%20y.bin" in proxy.fetches()
