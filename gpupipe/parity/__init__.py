"""How far apart two backends are, stage by stage: `gpupipe.check_parity(source, recipe, ...)` returns a `Report`.

tolerances.py   the bounds, and why
stages.py       what each stage does alone
plain.py        what people run today
compare.py      runs both sides
tally.py        sums up differences
report.py, html.py   what is shown
"""

from __future__ import annotations

from gpupipe.parity.compare import check_parity
from gpupipe.parity.report import BadFile, Report, Row
from gpupipe.parity.tally import Sample
from gpupipe.parity.tolerances import Tolerance

__all__ = ["BadFile", "Report", "Row", "Sample", "Tolerance", "check_parity"]
