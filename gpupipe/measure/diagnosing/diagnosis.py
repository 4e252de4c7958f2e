"""`gpupipe.diagnose`: findings from logs, the costliest first."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gpupipe.errors import ConfigError
from gpupipe.measure.diagnosing.finding import Finding
from gpupipe.measure.diagnosing.rules import LEAST_WAIT, RULES, described, waited_overall
from gpupipe.measure.watch import WatchReport
from gpupipe.measure.watch_log import Log, read_log


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What is wrong with a run.

    Attributes:
        findings: The costliest first; empty where nothing was found.
        logs: What was diagnosed, by rank.
        runs: What each rank's log shows: rank, steps, epochs, share waited, milliseconds, cores busy.
        bound: How many times as fast the run could be at best with data that never keep it waiting.
    """

    findings: tuple[Finding, ...]
    logs: tuple[Log, ...] = field(repr=False)
    runs: tuple[dict[str, Any], ...]
    bound: float

    def to_json(self) -> str:
        """Everything, as strict JSON."""
        found = {"findings": [asdict(each) for each in self.findings], "runs": self.runs, "bound": self.bound}
        return json.dumps(found, indent=2, allow_nan=False)

    def plot(self, path: str | os.PathLike[str]) -> Path:
        """Draw the log of the rank that waits most: waits and steps, and what was held and used meanwhile.

        Raises:
            BackendUnavailable: matplotlib is not installed.
            SourceError: It cannot be written.
        """
        from gpupipe.measure.plot import plot_watch

        return plot_watch(max(self.logs, key=waited_overall), Path(path))

    def __str__(self) -> str:
        lines = [
            f"rank {run['rank']}: {run['steps']} steps in {run['epochs']} epochs, waited {100 * run['waited']:.1f} % "
            "of the time"
            + ("" if run["cores_busy"] is None else f", {100 * run['cores_busy']:.0f} % of the cores busy")
            for run in self.runs
        ]
        lines.append(f"with data that never keep it waiting: at best {self.bound:.2f} times as fast")
        if not self.findings:
            lines.append("\nnothing found" + (": it is not data-bound" if self.bound < 1 / (1 - LEAST_WAIT) else ""))
        for number, finding in enumerate(self.findings, 1):
            lines += [
                f"\n{number}. {finding.code}: {finding.evidence}",
                f"   cause: {finding.cause}",
                f"   fix:   {finding.fix}",
            ]
        return "\n".join(lines)


def diagnose(*runs: str | os.PathLike[str] | WatchReport | Log) -> Diagnosis:
    """Say why a run waits, and what to change.

    Args:
        *runs: Logs that `watch` wrote, or its reports: of one run, one for each rank.

    Raises:
        ConfigError: None given, or one without steps.
        SourceError: A log cannot be read.
    """
    logs = [_log(run) for run in runs]
    if not logs:
        raise ConfigError("there is nothing to diagnose: give a log of gpupipe.watch, or its report", field="runs")
    for log in logs:
        if not len(log.steps["t"]):
            raise ConfigError(f"{log.name} holds no steps: let the run go on for a while", field="runs", value=log.name)
    return judged(sorted(logs, key=lambda log: log.rank))


def judged(logs: Sequence[Log]) -> Diagnosis:
    found = [finding for finding in (rule(logs) for rule in RULES) if finding is not None]
    waited = min(max(waited_overall(log) for log in logs), 0.999)
    return Diagnosis(
        logs=tuple(logs),
        findings=tuple(sorted(found, key=lambda finding: -finding.share)),
        runs=tuple(described(log) for log in logs),
        bound=1.0 / (1.0 - waited),
    )


def _log(run: str | os.PathLike[str] | WatchReport | Log) -> Log:
    if isinstance(run, WatchReport):
        return run.log
    return run if isinstance(run, Log) else read_log(os.fspath(run))
