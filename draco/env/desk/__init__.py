"""`desk`: an embedded office of small apps for long-horizon tool use. TEXTS.md says what agents see.

scenarios    tasks and their gold from seeds
apps         the calls, as one table
parse        the text of an action → a checked call
world        the state of the office, and what every call does to it
environment  tasks and episodes
evaluator    success by state check, and the steps that caused a failure
agent        a scripted agent that knows the gold and errs on purpose
judge/       the scripted judge; rubric.yaml is the general rubric that it knows
"""

from draco.env.desk.environment import DeskEnvironment
from draco.env.desk.evaluator import DeskEvaluator

__all__ = ["DeskEnvironment", "DeskEvaluator"]
