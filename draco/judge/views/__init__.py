"""What the judge is shown in each call, and into how many calls a judgement is cut: `judge.plan=paper|lean`."""

from __future__ import annotations

from draco.core.errors import ConfigError
from draco.judge.views.base import Plan
from draco.judge.views.lean import LeanPlan
from draco.judge.views.paper import PaperPlan

__all__ = ["PLANS", "LeanPlan", "PaperPlan", "Plan", "plan_named"]

PLANS: dict[str, type[Plan]] = {"paper": PaperPlan, "lean": LeanPlan}


def plan_named(name: str) -> Plan:
    """The plan of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in PLANS:
        raise ConfigError(f"judge.plan is {name!r}, expected {' or '.join(PLANS)}")
    return PLANS[name]()
