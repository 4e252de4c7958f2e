"""What the logs of `gpupipe.watch` say about why training waits, and what to change."""

from gpupipe.measure.diagnosing.diagnosis import Diagnosis, diagnose
from gpupipe.measure.diagnosing.finding import Finding

__all__ = ["Diagnosis", "Finding", "diagnose"]
