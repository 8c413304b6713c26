"""A model behind HTTP on this machine that answers the n-th request as a test says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from support.loopback_judge import Answer, LoopbackJudge

CANARY = "sk-canary-9876543210fedcba"


class ModelServer(LoopbackJudge):
    """`says(n, body)` is status and text of request n, from 1; tokens told are `prompt_tokens` read and 7 written."""

    def __init__(self) -> None:
        super().__init__(self._answer)
        self.says: Callable[[int, dict[str, Any]], tuple[int, str]] = lambda n, body: (200, "ready")
        self.prompt_tokens: Callable[[dict[str, Any]], int] = lambda body: 100
        self.headers: Mapping[str, str] = {}  #: of what is not 200

    def _answer(self, body: dict[str, Any]) -> Answer:
        status, text = self.says(len(self.bodies), body)
        if status != 200:
            return Answer(status=status, error=text, headers=self.headers)
        return Answer(text, tokens=(self.prompt_tokens(body), 7, 64))
