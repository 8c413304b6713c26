"""Environments: what an agent acts in, and, apart from it, what tells whether it succeeded."""

from draco.env.base import ActionFormat, ActionSpan, Environment, Episode, Evaluator, Outcome, Reply

__all__ = ["ActionFormat", "ActionSpan", "Environment", "Episode", "Evaluator", "Outcome", "Reply"]
