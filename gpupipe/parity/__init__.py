"""How far apart two backends are, stage by stage: `gpupipe.parity(source, recipe, ...)` returns a `Report`.

tolerances.py   the bounds, and why
stages.py       what each stage does alone
plain.py        what people run today
compare.py      runs both sides
tally.py        sums up differences
report.py, html.py   what is shown
"""

from __future__ import annotations

import sys
import types
from typing import Any

from gpupipe.parity.compare import parity
from gpupipe.parity.report import BadFile, Report, Row
from gpupipe.parity.tally import Sample
from gpupipe.parity.tolerances import Tolerance

__all__ = ["BadFile", "Report", "Row", "Sample", "Tolerance", "parity"]


class _CallableModule(types.ModuleType):
    """`gpupipe.parity` is this package and also the function: which of the two a program imports first must not matter.

    The import system binds `gpupipe.parity` to the package, whatever `gpupipe.__getattr__` would have put there.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Report:
        return parity(*args, **kwargs)


sys.modules[__name__].__class__ = _CallableModule
