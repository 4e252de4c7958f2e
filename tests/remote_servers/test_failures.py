"""Faults that last, and servers that go away: errors that say what failed, in time, and no harm done."""

import threading
import time

import pytest
import torch

import gpupipe as gp
from tests.available import loader
from tests.remote_servers.data_sets import assert_same, batches, cache_of, contents, of_objects, published
from tests.remote_servers.proxy import LOUD, Fault, always, first


def cause_of(error):
    """The first in the chain of causes that is not ours."""
    while isinstance(error, gp.GpupipeError):
        error = error.__cause__
    return error


@pytest.mark.parametrize(("fault", "cached"), [*((fault, False) for fault in LOUD), ("cut", True), ("503", True)])
def test_lasting_fault_is_an_error_that_names_object_tries_and_cause(http_remote, tmp_path, fault, cached):
    _, target = published(http_remote, "folder")
    retries = gp.Retries(tries=3, first_s=0.01, longest_s=0.02, attempt_s=2, limit_s=10)
    source = http_remote.open(target, retries=retries, **cache_of(tmp_path, cached))
    http_remote.proxy.plan = of_objects(always(Fault(kind=fault)))
    with pytest.raises(gp.RecordError) as caught:
        source[4]
    error = caught.value
    assert (error.index, error.key) == (4, source.key(4))
    assert error.path == http_remote.url(f"{target}/{source.key(4)}")
    assert error.path in str(error)
    assert "3 tries" in str(error)
    assert not isinstance(cause_of(error), gp.GpupipeError)
    http_remote.proxy.plan = None
    assert source[4].index == 4, "a failure is of its time"


def test_server_that_never_answers_is_an_error_in_time(http_remote, tmp_path):
    _, target = published(http_remote, "folder")
    source = http_remote.open(
        target,
        cache_dir=tmp_path / "cache",
        retries=gp.Retries(tries=2, first_s=0.01, longest_s=0.02, attempt_s=1, limit_s=10),
    )
    http_remote.proxy.plan = of_objects(always(Fault(delay_s=10)))
    start = time.monotonic()
    with pytest.raises(gp.RecordError, match="2 tries"):
        source[0]
    assert time.monotonic() - start < 8


def test_limit_of_time_holds_over_all_tries(http_remote):
    _, target = published(http_remote, "folder")
    source = http_remote.open(
        target, retries=gp.Retries(tries=1000, first_s=0.05, longest_s=0.1, attempt_s=5, limit_s=0.5)
    )
    http_remote.proxy.plan = of_objects(always(Fault(kind="503")))
    start = time.monotonic()
    with pytest.raises(gp.RecordError):
        source[0]
    assert time.monotonic() - start < 4


def test_retry_after_is_waited_for(http_remote):
    _, target = published(http_remote, "folder")
    retries = gp.Retries(tries=3, first_s=0.01, longest_s=2, attempt_s=5, limit_s=20)
    source = http_remote.open(target, retries=retries)
    http_remote.proxy.plan = of_objects(first(Fault(kind="503 later")))
    start = time.monotonic()
    source[0]
    assert 1 <= time.monotonic() - start < 4


def test_object_that_is_gone_is_asked_for_once(remote, tmp_path):
    _, target = published(remote, "folder")
    source = remote.open(target, cache_dir=tmp_path / "cache")
    key = source.key(2)
    remote.proxy.forget()
    remote.remove(f"{target}/{key}")
    with pytest.raises(gp.RecordError) as caught:
        source[2]
    assert isinstance(cause_of(caught.value), FileNotFoundError)
    assert remote.proxy.fetches(key).total() == 1


def test_secrets_are_nowhere_in_errors(s3_remote):
    _, target = published(s3_remote, "folder")
    options = {**s3_remote.storage_options, "secret": "hush-hush-123"}
    retries = gp.Retries(tries=2, first_s=0.01, longest_s=0.02, limit_s=5)
    source = s3_remote.open(target, storage_options=options, retries=retries)
    s3_remote.proxy.plan = always(Fault(kind="refuse"))
    with pytest.raises(gp.RecordError) as caught:
        source[0]
    said = f"{caught.value!r} {caught.value} {caught.value.facts} {source!r} {source.fingerprint} {source.uri}"
    assert "hush" not in said


@pytest.mark.parametrize(
    ("remote", "kind", "cached"),
    [("http", "folder", False), ("http", "tar", True), ("s3", "folder", True)],
    indirect=["remote"],
)
def test_server_goes_away_in_the_middle_and_comes_back(remote, tmp_path, kind, cached):
    local, target = published(remote, kind)
    patient = gp.Retries(tries=100, first_s=0.02, longest_s=0.2, attempt_s=5, limit_s=30)
    source = remote.open(target, retries=patient, **cache_of(tmp_path, cached))
    away = threading.Event()
    remote.proxy.forget()

    def plan(_):
        if len(remote.proxy.requests) >= 2 and not away.is_set():
            away.set()
            threading.Thread(target=go_away, daemon=True).start()
        return Fault(delay_s=0.02)

    def go_away():
        remote.proxy.stop()
        time.sleep(0.5)
        remote.proxy.start()

    remote.proxy.plan = plan
    assert_same(batches(source), batches(local))
    assert away.is_set()
    assert source.cache_stats.retries > 0


def test_server_that_is_gone_is_an_error_and_the_source_goes_on_when_it_is_back(http_remote, tmp_path):
    remote = http_remote
    local, target = published(remote, "folder")
    retries = gp.Retries(tries=3, first_s=0.01, longest_s=0.02, attempt_s=1, limit_s=5)
    source = remote.open(target, retries=retries, cache_dir=tmp_path / "cache")
    source[0]
    remote.proxy.stop()
    assert source[0].index == 0, "it is in the cache"
    with pytest.raises(gp.RecordError, match="3 tries"):
        source[1]
    with pytest.raises(gp.SourceError):
        remote.open(target, retries=retries, cache_dir=tmp_path / "cache")
    remote.proxy.start()
    assert contents(source) == contents(local)


@pytest.mark.parametrize("policy", ["substitute", "ignore"])
def test_loader_goes_on_without_an_object_that_never_comes(http_remote, tmp_path, policy):
    local, target = published(http_remote, "folder")
    bad = local.key(3)
    http_remote.proxy.plan = always(Fault(kind="500"), path=bad.replace(".", r"\."))
    retries = gp.Retries(tries=2, first_s=0.01, longest_s=0.02, attempt_s=1, limit_s=5)
    source = http_remote.open(target, cache_dir=tmp_path / "cache", retries=retries)
    fields = ("image", "label", "index", "key", "valid")
    with loader(
        source, gp.Recipe.eval(size=24, resize=24), "torchvision", batch_size=4, on_error=policy, fields=fields
    ) as made:
        found = list(made)
        assert [each.index for each in made.errors] == [3]
    with loader(local, gp.Recipe.eval(size=24, resize=24), "torchvision", batch_size=4, fields=fields) as expected:
        for number, (each, other) in enumerate(zip(found, expected, strict=True)):
            for row in range(len(each[0])):
                if number * 4 + row != 3:
                    assert torch.equal(each[0][row], other[0][row])
