"""What a rule found."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: Short and stable, such as "cost-swing".
        evidence: The numbers it was seen in, as a sentence.
        cause: What that most likely comes from.
        fix: What to change; names the argument.
        share: The share of the run's time that it costs, as far as it can be told, from 0 to 1; the order of a
            diagnosis. What costs no time yet but will end the run, such as memory, counts as 1.
        numbers: The evidence by name.
    """

    code: str
    evidence: str
    cause: str
    fix: str
    share: float
    numbers: dict[str, float] = field(default_factory=dict)
