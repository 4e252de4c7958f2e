"""gpupipe.diagnose: planted conditions are found, healthy runs are left alone.

Logs are made here, so that each rule sees exactly what it is about; benchmarks/bench_diagnose.py plants the conditions
in real runs and counts hits and false alarms.
"""

import json
import subprocess
import sys

import numpy as np
import pytest

import gpupipe as gp
from gpupipe.cli import main
from gpupipe.errors import ConfigError, SourceError
from gpupipe.measure.diagnosing.rules import _theil_sen
from gpupipe.measure.watch_log import log_of
from tests.conftest import REPO

WORKERS = {
    "kind": "DataLoader",
    "workers": 8,
    "persistent_workers": True,
    "pin_memory": False,
    "sampler": "EpochSampler",
}


def events(
    *,
    epochs=3,
    steps=100,
    wait_s=0.001,
    step_s=0.1,
    first_wait_s=None,
    cost=None,
    loader=None,
    begin=None,
    tensor_bytes=None,
    ready=None,
    seed=0,
    **looks,
):
    """A run; each of `looks` is a gauge: from the share of the run that has passed to its value."""
    rng = np.random.default_rng(seed)
    yield {
        "event": "begin", "version": 1, "rank": 0, "world_size": 1, "cores": 8, "gpu": False, "torch_threads": 8,
        "loader": WORKERS | (loader or {}), **(begin or {}),
    }  # fmt: skip
    clock = 0.0
    total = epochs * steps
    gauges = {
        "cpu_s": lambda share: 4 * share * total * (np.mean(wait_s) + step_s),
        "machine_use": lambda _: 0.5,
    } | looks
    for number in range(total):
        epoch, step = divmod(number, steps)
        wait = float(np.broadcast_to(wait_s, total)[number] * rng.uniform(0.8, 1.2))
        if step == 0 and first_wait_s is not None and epoch:
            wait = first_wait_s
        work = step_s * float(rng.uniform(0.95, 1.05))
        clock += wait + work
        weight = None if cost is None else float(cost[number])
        times = {"t": clock, "wait_s": wait, "step_s": work}
        yield {
            "event": "step",
            "epoch": epoch,
            "step": step,
            "samples": 64,
            "bytes": weight,
            "tensor_bytes": tensor_bytes,
            "ready": ready,
            **times,
        }
        if number % 5 == 0:
            yield {"event": "resources", "t": clock, **{name: value(number / total) for name, value in gauges.items()}}
    yield {"event": "end", "t": clock}


def diagnosed(**run):
    return gp.diagnose(log_of(list(events(**run)), "test"))


def codes(**run):
    return [finding.code for finding in diagnosed(**run).findings]


@pytest.mark.parametrize("seed", range(20))
def test_healthy_runs_are_left_alone(seed):
    rng = np.random.default_rng(seed)
    memory = 2e9 + 3e7 * rng.standard_normal(400)
    assert codes(
        seed=seed,
        wait_s=rng.exponential(0.001, 300),
        cost=rng.lognormal(11, 0.1, 300),
        host_bytes=lambda share: memory[int(share * 399)] + 3e8 * min(1, 10 * share),  # fills its pools at first
        files=lambda _: 40 + int(rng.integers(3)),
        threads=lambda _: 20,
        processes=lambda _: 9,
        shared_memory_bytes=lambda _: 2e8,
        shared_memory_limit_bytes=lambda _: 8e9,
    ) == []  # fmt: skip


def test_idle_cores_with_few_workers():
    found = diagnosed(wait_s=0.1, loader={"workers": 2}, cpu_s=lambda share: 40 * share)
    assert [finding.code for finding in found.findings] == ["too-few-workers"]
    assert "num_workers=" in found.findings[0].fix
    assert found.bound == pytest.approx(2, rel=0.05)


def test_idle_cores_with_as_many_workers_as_cores():
    assert codes(wait_s=0.1, cpu_s=lambda share: 40 * share) == ["blocked-reads"]


def test_cores_that_others_use():
    assert codes(wait_s=0.1, cpu_s=lambda share: 40 * share, machine_use=lambda _: 0.95) == ["crowded"]


def test_busy_cores():
    assert codes(wait_s=0.1, cpu_s=lambda share: 8 * 60 * share) == ["decode-bound"]


def test_batches_that_were_ready_and_came_late_are_not_loaded_slowly():
    found = diagnosed(wait_s=0.05, ready=1, tensor_bytes=4e6, loader={"workers": 2}, cpu_s=lambda share: 40 * share)
    assert [finding.code for finding in found.findings] == ["slow-hand-over"]
    assert found.findings[0].numbers["hand_over_s"] == pytest.approx(0.05, rel=0.05)
    assert codes(wait_s=0.05, ready=0, loader={"workers": 2}, cpu_s=lambda share: 40 * share) == ["too-few-workers"]


def test_rank_that_waits_for_loading_is_found_beside_one_that_waits_longer_for_the_hand_over():
    few = {"workers": 2}
    ranks = [
        log_of(
            list(events(wait_s=wait_s, ready=ready, tensor_bytes=4e6, loader=few, begin={"rank": rank, "world_size": 2},
                        cpu_s=lambda share: 40 * share)),
            f"rank {rank}",
        )
        for rank, (wait_s, ready) in enumerate([(0.05, 1), (0.04, 0)])
    ]  # fmt: skip
    assert {"slow-hand-over", "too-few-workers"} <= {finding.code for finding in gp.diagnose(*ranks).findings}


def test_hand_over_that_every_loop_pays_is_left_alone():
    assert codes(wait_s=0.015, ready=1, tensor_bytes=4e6, loader={"workers": 2}) == []


def test_epochs_that_begin_late_name_persistent_workers():
    found = diagnosed(first_wait_s=5.0, loader={"persistent_workers": False})
    assert [finding.code for finding in found.findings] == ["late-epochs"]
    assert found.findings[0].fix == "persistent_workers=True"


def test_steps_that_follow_the_cost_of_their_batch():
    cost = np.random.default_rng(0).lognormal(0, 1, 300)
    found = diagnosed(wait_s=0.05 * cost, cost=1e6 * cost)
    assert "cost-swing" in [finding.code for finding in found.findings]
    assert 'CostAware("bytes")' in next(each for each in found.findings if each.code == "cost-swing").fix


def test_swing_without_a_tie_to_the_cost_is_not_blamed_on_it():
    rng = np.random.default_rng(0)
    assert "cost-swing" not in codes(wait_s=0.05 * rng.lognormal(0, 1, 300), cost=rng.lognormal(13, 1, 300))


def test_memory_that_rises_to_the_end():
    assert codes(host_bytes=lambda share: 2e9 + 1e9 * share) == ["rising-memory"]


def test_memory_that_stops_rising_is_left_alone():
    assert codes(host_bytes=lambda share: 2e9 + 1e9 * min(share, 0.15)) == []


@pytest.mark.parametrize("name", ["files", "threads", "processes"])
def test_handles_that_rise_with_each_epoch(name):
    assert codes(epochs=6, steps=50, **{name: lambda share: 20 + 4 * int(6 * share + 0.001)}) == [f"rising-{name}"]


def test_one_slow_rank_is_named():
    logs = [
        log_of(
            list(events(seed=rank, begin={"rank": rank, "world_size": 4}, wait_s=0.05 if rank == 2 else 0.001)),
            str(rank),
        )
        for rank in range(4)
    ]
    found = gp.diagnose(*reversed(logs)).findings
    uneven = next(finding for finding in found if finding.code == "uneven-ranks")
    assert uneven.numbers["rank"] == 2
    assert "rank 2" in uneven.evidence


def test_even_ranks_are_left_alone():
    logs = [log_of(list(events(seed=rank, begin={"rank": rank, "world_size": 4})), str(rank)) for rank in range(4)]
    assert gp.diagnose(*logs).findings == ()


def test_rare_waits_of_seconds():
    waits = np.full(300, 0.001)
    waits[[37, 120, 222, 290]] = 2.5
    found = diagnosed(wait_s=waits)
    assert [finding.code for finding in found.findings] == ["sudden-waits"]
    assert "cache_dir" in found.findings[0].fix


def test_full_shared_memory():
    assert codes(shared_memory_bytes=lambda _: 6e7, shared_memory_limit_bytes=lambda _: 6.7e7) == ["full-shared-memory"]


def test_pinning_without_a_gpu():
    assert codes(loader={"pin_memory": True}) == ["pinned-without-gpu"]
    assert codes(loader={"pin_memory": True}, begin={"gpu": True}) == []


def test_more_threads_than_cores():
    run = {"wait_s": 0.1, "cpu_s": lambda share: 8 * 60 * share}
    assert "oversubscribed" in codes(**run, running=lambda _: 40)
    assert "oversubscribed" not in codes(**run, running=lambda _: 9)


def test_batches_that_wait_in_too_large_a_number():
    run = {"begin": {"memory_limit_bytes": int(8e9)}, "loader": {"prefetch_factor": 8}, "tensor_bytes": 38_500_000}
    assert codes(**run) == ["deep-prefetch"]
    assert codes(**run | {"loader": {"prefetch_factor": 2}}) == []


def test_global_batch_size_that_was_not_meant():
    run = {"begin": {"world_size": 4, "global_batch_size": 64}, "loader": {"sampler": "DistributedSampler"}}
    found = diagnosed(**run).findings
    assert [finding.code for finding in found] == ["wrong-global-batch"]
    assert found[0].fix.startswith("batch_size=16,")
    assert codes(begin={"world_size": 4, "global_batch_size": 256}, loader={"sampler": "DistributedSampler"}) == []


def test_memory_that_rises_is_named_by_its_type():
    log = list(events(host_bytes=lambda share: 2e9 + 1e9 * share))
    for number in range(4):
        log.insert(
            -1, {"event": "types", "t": 0.0, "bytes": {"builtins.list": 1000, "torch.Tensor": 10**8 * (1 + number)}}
        )
    found = gp.diagnose(log_of(log, "test")).findings
    assert "torch.Tensor holds 200 MB more" in found[0].cause


def test_small_files_read_one_by_one():
    run = {
        "wait_s": 0.1,
        "cpu_s": lambda share: 40 * share,
        "reads": lambda share: 1e5 * share,
        "read_bytes": lambda share: 1e8 * share,
    }
    assert "small-reads" in codes(**run, cost=np.full(300, 64 * 4000.0))
    assert "small-reads" not in codes(**run, cost=np.full(300, 64 * 110_000.0))


def test_ranks_that_do_not_share_the_data_set():
    assert codes(begin={"world_size": 8}, loader={"sampler": "RandomSampler"}) == ["not-sharded"]
    assert codes(begin={"world_size": 8}, loader={"sampler": "DistributedSampler"}) == []


def test_findings_come_costliest_first():
    waits = np.full(300, 0.02)
    waits[[37, 120, 222]] = 3.0
    found = diagnosed(wait_s=waits, host_bytes=lambda share: 2e9 + 1e9 * share, loader={"pin_memory": True}).findings
    assert [finding.code for finding in found] == ["rising-memory", "sudden-waits", "pinned-without-gpu"]


def test_theil_sen_against_scipy():
    stats = pytest.importorskip("scipy.stats")
    rng = np.random.default_rng(1)
    times = np.sort(rng.uniform(0, 100, 80))
    values = 3 * times + rng.standard_normal(80) * 20
    slope, low, high, chance = _theil_sen(times, values)
    expected = stats.theilslopes(values, times, 0.95)
    assert slope == pytest.approx(expected.slope)
    assert low == pytest.approx(expected.low_slope, rel=0.02)
    assert high == pytest.approx(expected.high_slope, rel=0.02)
    assert chance < 1e-10


def test_diagnose_command_reads_logs_and_tells_by_its_status(tmp_path, capsys):
    healthy, sick = tmp_path / "healthy.jsonl", tmp_path / "sick.jsonl"
    healthy.write_text("".join(json.dumps(event) + "\n" for event in events()))
    sick.write_text(
        "".join(
            json.dumps(event) + "\n"
            for event in events(wait_s=0.1, loader={"workers": 1}, cpu_s=lambda share: 9 * share)
        )
    )
    assert main(["diagnose", str(healthy)]) == 0
    assert "nothing found" in capsys.readouterr().out
    picture = tmp_path / "sick.png"
    assert main(["diagnose", str(sick), "--json", "--plot", str(picture)]) == 1
    assert picture.stat().st_size > 1000
    assert json.loads(capsys.readouterr().out)["findings"][0]["code"] == "too-few-workers"
    assert main(["diagnose", str(tmp_path / "none")]) == 2


def test_diagnose_nothing_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="nothing to diagnose"):
        gp.diagnose()
    empty = [event for event in events() if event["event"] != "step"]
    with pytest.raises(ConfigError, match="no steps"):
        gp.diagnose(log_of(empty, "empty"))
    with pytest.raises(SourceError, match="cannot read the log"):
        gp.diagnose(tmp_path / "none")


@pytest.mark.parametrize(
    "name", ["rising-files", "rising-threads", "rising-memory", "pinned-without-gpu", "wrong-global-batch"]
)
def test_real_runs_with_a_planted_condition(name, tmp_path):
    """Those conditions that no busy machine can hide; benchmarks/bench_diagnose.py has the others."""
    bench = REPO / "benchmarks" / "bench_diagnose.py"
    log = str(tmp_path / "{rank}.jsonl")
    command = [sys.executable, "-W", "ignore", str(bench), "--condition", name, "--seed", "1", "--write", log]
    subprocess.run(command, check=True, timeout=120)
    assert name in [finding.code for finding in gp.diagnose(tmp_path / "0.jsonl").findings]
