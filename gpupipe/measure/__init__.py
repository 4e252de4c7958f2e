"""Measuring: how fast a loader is, against what people run today."""

from __future__ import annotations

from gpupipe.measure.bench import BenchReport, bench

__all__ = ["BenchReport", "bench"]
