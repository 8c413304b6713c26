"""The check that a model passes before it trains: every path gives what plain transformers and PEFT give.

check       runs it, or takes the result of an equal model from the cache
examine     compares and decides
paths       plain rows, the update's passes, the engine's rollouts
rows        what they run on
twin        a policy around a small copy of the model
templates   end tokens, and the chat format against the template's own rendering
verdict     packed, unpacked or refused, and the table
"""

from draco.run.conformance.check import conform, settle
from draco.run.conformance.verdict import Verdict

__all__ = ["Verdict", "conform", "settle"]
