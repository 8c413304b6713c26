"""How long a judge's prompts may become: the context that a model which judges must be served with."""

from __future__ import annotations

from draco.judge.transcript import DIGEST

__all__ = ["needed_context"]

_CRITERIA = 6000  #: tokens for 24 criteria and candidates, and for the instructions
_STEP = (DIGEST.action + DIGEST.observation) // 3 + 20  #: tokens of one step in a digest, at most


def needed_context(view: str, group_size: int, prompt: int, response: int, turns: int, reply: int) -> dict[str, int]:
    """Tokens that the largest calls may need: `score`, which shows one rollout, and `merge`, which shows all.

    Args:
        view: paper | lean. The lean merge is an estimate: a quarter of each rollout is shown in full.
        group_size: G.
        prompt, response, turns: limits of one rollout.
        reply: limit of the judge's reply.
    """
    one = prompt + response
    shown = one if view == "paper" else min(one, turns * _STEP + response // 4)
    return {"score": one + _CRITERIA + reply, "merge": group_size * shown + _CRITERIA + reply}
