"""`desk`: an embedded office of small apps for long-horizon tool use. TEXTS.md says what agents see."""

from draco.env.desk.environment import DeskEnvironment
from draco.env.desk.evaluator import DeskEvaluator

__all__ = ["DeskEnvironment", "DeskEvaluator"]
