"""Every kind of data set from real servers: what comes is what is on the local disk, through all faults that pass."""

import zlib

import pytest

import gpupipe as gp
from tests.remote_servers.data_sets import (
    KINDS,
    OVER_HTTP,
    RETRIES,
    assert_same,
    batches,
    cache_of,
    contents,
    each_kind,
    of_objects,
    published,
)
from tests.remote_servers.proxy import LOUD, Fault, always, first, seeded


@each_kind
def test_remote_equals_local(remote, tmp_path, kind, cached):
    local, target = published(remote, kind)
    with_cache = cache_of(tmp_path, cached)
    source = remote.open(target, **KINDS[kind].options, **with_cache)
    assert contents(source) == contents(local)
    assert source.fingerprint == local.fingerprint
    assert source.labels.tolist() == local.labels.tolist()
    assert source.classes == local.classes
    remote.proxy.forget()
    assert contents(source) == contents(local)
    source.close()
    assert contents(source) == contents(local)
    if cached:
        assert not remote.proxy.fetches(), "everything was in the cache"


@pytest.mark.parametrize(("kind", "cached"), [("folder", True), ("tar", False), ("lmdb", True)])
def test_s3_through_faults_equals_local(s3_remote, tmp_path, kind, cached):
    local, target = published(s3_remote, kind)
    s3_remote.proxy.plan = of_objects(seeded(7, kinds=LOUD, share=0.6, at_most=1, jitter_s=0.02))
    source = s3_remote.open(target, **KINDS[kind].options, **cache_of(tmp_path, cached))
    assert contents(source) == contents(local)
    assert s3_remote.proxy.done
    if cached:
        s3_remote.proxy.plan = always(Fault(kind="refuse"))
        assert contents(source) == contents(local), "nothing but whole objects came into the cache"


@pytest.mark.parametrize("fault", LOUD)
@pytest.mark.parametrize(("kind", "cached"), [("folder", False), ("tar", True)])
def test_each_fault_costs_a_retry_and_nothing_else(http_remote, tmp_path, kind, cached, fault):
    local, target = published(http_remote, kind)
    source = http_remote.open(target, **cache_of(tmp_path, cached))
    http_remote.proxy.forget()
    http_remote.proxy.plan = of_objects(first(Fault(kind=fault)))
    assert contents(source) == contents(local)
    assert {each.kind for each in http_remote.proxy.done} == {fault}
    assert source.cache_stats.retries > 0 or fault in ("refuse", "head"), "aiohttp repeats these itself"


def test_flipped_bit_is_found_where_the_server_gives_a_checksum(remote, tmp_path):
    """ETags of objects that were uploaded to S3 in one part are their MD5."""
    local, target = published(remote, "folder")
    source = remote.open(target, cache_dir=tmp_path / "cache")
    remote.proxy.forget()
    remote.proxy.plan = of_objects(first(Fault(kind="flip")))
    found = contents(source)
    assert {each.kind for each in remote.proxy.done} == {"flip"}
    if remote.url("").startswith("s3:"):
        assert found == contents(local)
        assert source.cache_stats.retries > 0


@pytest.mark.parametrize(("kind", "cached"), OVER_HTTP)
def test_epoch_of_a_loader_through_faults_equals_a_local_one(http_remote, tmp_path, kind, cached):
    local, target = published(http_remote, kind)
    http_remote.proxy.plan = of_objects(seeded(8, kinds=LOUD, share=0.3, jitter_s=0.02))
    source = http_remote.open(target, **KINDS[kind].options, **cache_of(tmp_path, cached))
    expected = batches(local)
    assert_same(batches(source), expected)
    assert http_remote.proxy.done
    assert_same(batches(source), expected)  # from the cache, where there is one


@pytest.mark.parametrize(
    ("remote", "cache"), [("http", "none"), ("http", "small"), ("s3", "large")], indirect=["remote"]
)
def test_epochs_in_shard_order_through_faults_equal_local_ones(remote, tmp_path, cache):
    local, target = published(remote, "tar")
    with_cache = cache_of(tmp_path, cache != "none")
    if cache == "small":
        with_cache["cache_bytes"] = 3 * max(path.stat().st_size for path in (remote.root / "shards").glob("*.tar"))
    order = gp.Sharding(order=gp.ShardOrder(lanes=1, window=6))
    remote.proxy.plan = of_objects(seeded(9, kinds=LOUD, share=0.3, jitter_s=0.02))
    source = remote.open(target, **with_cache)
    for _ in range(2):
        assert_same(batches(source, sharding=order), batches(local, sharding=order))
    assert remote.proxy.done
    if cache == "small":
        assert source.cache_stats.evictions > 0


def test_stalls_are_waited_out_or_cut_short(http_remote, tmp_path):
    remote = http_remote
    local, target = published(remote, "folder")

    def plan(request):
        stalls = (
            request.method == "GET"
            and request.attempt == 0
            and zlib.crc32(request.path.rpartition("train")[2].encode()) % 5 == 0
        )
        return Fault(delay_s=0.4) if stalls else None

    remote.proxy.plan = of_objects(plan)
    slow = remote.open(target, cache_dir=tmp_path / "patient")
    assert contents(slow) == contents(local)
    remote.proxy.forget()
    quick = remote.open(target, cache_dir=tmp_path / "quick", retries=gp.Retries(**{**RETRIES, "attempt_s": 0.2}))
    assert contents(quick) == contents(local)
    assert quick.cache_stats.retries > slow.cache_stats.retries == 0
