"""Environments: what an agent acts in and, apart from it, what tells whether it succeeded.

base       the contract: Environment, Episode, Evaluator, Outcome; how actions are written in a turn
records    one record for each evaluated rollout
success    metrics over records: TGC, SGC, pass^k, leaderboard
desk/      an embedded office of small apps, with its scripted judge
appworld/  AppWorld's own engine in its own Python environment
"""

from draco.env.base import ActionFormat, ActionSpan, Environment, Episode, Evaluator, Outcome, Reply

__all__ = ["ActionFormat", "ActionSpan", "Environment", "Episode", "Evaluator", "Outcome", "Reply"]
