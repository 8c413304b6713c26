"""What each prompt shows, and whether score and attribution are one call: `judge.plan=paper|lean` chooses the view.

paper.py   five kinds of call, every attempt in full
lean.py    fewer calls, shorter prompts
dedup.py   which proposed criteria are the same
size.py    how long the prompts may become
"""

from __future__ import annotations

from draco.judge.views.lean import LeanView
from draco.judge.views.paper import PaperView

__all__ = ["VIEWS", "LeanView", "PaperView"]

#: by the value of `judge.plan`
VIEWS: dict[str, PaperView] = {view.name: view for view in (PaperView(), LeanView())}
