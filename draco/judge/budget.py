"""What judging may cost: sums over all attempts, and the caps that stop a run before it costs more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from draco.core.errors import JudgeConfigError, TrainingStopped
from draco.core.llm.money import Usage

__all__ = ["Spend"]

#: tokens of a reply before any was seen
_REPLY_GUESS = 1_000


@dataclass(slots=True)
class Spend:
    """Sums over all attempts of a run, earlier processes and other ranks included, and its caps.

    A request is sent only if the caps hold what is spent and what this request and those under way will probably cost.
    That is guessed from the length of the prompt, and scaled up where earlier guesses were too low: the first long
    prompts of a run cost more than the short call before it.
    """

    max_usd: float | None = None
    max_tokens: float | None = None
    usd: float = 0.0
    tokens: int = 0
    attempts: int = 0
    unpriced: int = 0  #: attempts without a known price
    estimated: int = 0  #: of this process's attempts, those whose tokens the provider did not give
    under_way: int = 0  #: guessed tokens of requests that were sent and not answered
    world: int = 1  #: ranks; each assumes that the others have spent as much as itself since the last exchange
    agreed: tuple[float, int] = (0.0, 0)  #: (USD, tokens) of all ranks at the last exchange
    _then: tuple[float, int] = (0.0, 0)  #: this object's own sums at that time
    _guessed: int = 0  #: sum of the guesses of answered requests
    _taken: int = 0  #: sum of what they took
    _replies: int = 0
    _written: int = 0  #: tokens of these replies

    def start(self, usd: float, tokens: int, attempts: int, unpriced: int) -> None:
        """Begin with the sums of earlier processes, over all ranks."""
        self.usd, self.tokens, self.attempts, self.unpriced = usd, tokens, attempts, unpriced
        self.agree(usd, tokens)

    def guess(self, messages: Sequence[Mapping[str, str]], max_tokens: int | None) -> int:
        """Tokens that a request will probably take.

        Four characters a token is the usual rule of thumb. `max_tokens` limits the reply; None = no limit.
        """
        reply = self._written // self._replies if self._replies else _REPLY_GUESS
        return sum(len(m["content"]) for m in messages) // 4 + min(reply, max_tokens or reply)

    @contextmanager
    def expecting(self, guess: int) -> Iterator[None]:
        """Count a request as under way, if the caps allow it; see `check`."""
        self.check(guess)
        self.under_way += guess
        try:
            yield
        finally:
            self.under_way -= guess

    def add(self, usage: Usage, cost: float | None, guess: int = 0, *, estimated: bool = False) -> None:
        """Count one attempt that the provider answered.

        Args:
            cost: USD; None = unknown.
            guess: tokens that it was guessed to take; 0 = none was made.
            estimated: `usage` is an estimate.
        """
        taken = usage.tokens_in + usage.tokens_out
        self.attempts += 1
        self.estimated += estimated
        self.tokens += taken
        self._replies += 1
        self._written += usage.tokens_out
        if guess:
            self._guessed += guess
            self._taken += taken
        if cost is None:
            self.unpriced += 1
        else:
            self.usd += cost

    def agree(self, usd: float, tokens: int) -> None:
        """Take the sums over all ranks."""
        self.agreed, self._then = (usd, tokens), (self.usd, self.tokens)

    def own(self) -> tuple[float, int]:
        """(USD, tokens) of this rank since the last exchange."""
        return self.usd - self._then[0], self.tokens - self._then[1]

    def total(self) -> tuple[float, int]:
        """(USD, tokens) of all ranks, estimated since the last exchange."""
        usd, tokens = self.own()
        return self.agreed[0] + usd * self.world, self.agreed[1] + tokens * self.world

    def check(self, guess: int) -> None:
        """See that the caps hold another request, which will probably take `guess` tokens.

        Raises:
            TrainingStopped: a cap would be passed.
            JudgeConfigError: a cap in USD cannot be kept because the price is unknown.
        """
        if self.max_usd is None and self.max_tokens is None:
            return
        if self.max_usd is not None and self.unpriced:
            raise JudgeConfigError(
                "judge.max_usd is set, but the judge's price is unknown: set judge.prices={input: …, output: …} in "
                "USD a million tokens, or cap tokens with judge.max_tokens_total instead"
            )
        usd, tokens = self.total()
        scale = max(1.0, self._taken / self._guessed) if self._guessed else 1.0  # never below the guess
        more = (self.under_way + guess) * scale * self.world
        more_usd = more * usd / tokens if tokens else 0.0
        for name, cap, spent, coming in (
            ("max_usd", self.max_usd, usd, more_usd),
            ("max_tokens_total", self.max_tokens, tokens, more),
        ):
            # Rounding errors of sums are no reason to stop.
            if cap is not None and (spent >= cap or spent + coming > cap * (1 + 1e-9)):
                raise TrainingStopped(
                    f"judge.{name}={cap:.10g} would be passed: {self.say()} so far, and about {coming:.3g} more for "
                    f"the next call and those under way; raise it to go on (judge.{name}=…)"
                )

    def say(self) -> str:
        """One phrase."""
        usd, tokens = self.total()
        price = "of unknown price" if self.unpriced else f"{usd:.4g} USD"
        partly = f" ({self.estimated} estimated)" if self.estimated else ""
        return f"{tokens} judge tokens in {self.attempts} attempts{partly}, {price}"
