"""Findings, and the ways in which a sub-goal succeeds or fails that are common to several kinds of sub-goal.

Every finding is a criterion with its concrete values and the verdict of this rollout on it, with the steps responsible:
a fail cites the step that made the mistake, an omission the step where leaving it out mattered most, a pass the steps
that fulfilled it. A finding whose condition never arose is not applicable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from draco.env.desk.judge.events import Change, Events, Listing

__all__ = ["Finding", "Findings", "steps_of"]


@dataclass(frozen=True, slots=True)
class Finding:
    """A criterion for this task, and how this rollout stands to it."""

    title: str
    description: str
    instruction: str
    grounding: str  #: the words of the request that it rests on
    topic: str  #: what it is about: target | choice | content | items | pages | confirm | once | secret | open | close
    score: int
    steps: tuple[int, ...]
    evidence: str
    omitted: bool = False  #: fails because the sub-goal was left out, not because it was done wrongly
    obvious: bool = True  #: one would write it from the request alone
    rank: int = 0  #: order within a proposal: outcomes first


def steps_of(changes: Iterable[Change]) -> tuple[int, ...]:
    """The steps that made these changes, each once."""
    return tuple(sorted({c.step for c in changes}))


class Findings:
    """Collects the findings of one rollout.

    Args:
        events: its facts.
    """

    def __init__(self, events: Events) -> None:
        self.events = events
        self.grounding = ""  #: the sentence of the request that is examined now
        self.found: list[Finding] = []

    def add(
        self,
        topic: str,
        title: str,
        description: str,
        instruction: str,
        *,
        fail: Sequence[int] = (),
        passed: Sequence[int] = (),
        evidence: str = "",
        omitted: bool = False,
        obvious: bool = True,
        rank: int = 1,
    ) -> None:
        """Any failing step makes a fail; else any passing step makes a pass; else it is not applicable."""
        score = -1 if fail else 1 if passed else 0
        steps = tuple(sorted({max(1, s) for s in (fail or passed)}))
        if not evidence:
            where = "step" + ("s " if len(steps) > 1 else " ") + ", ".join(map(str, steps))
            evidence = {1: f"fulfilled at {where}", -1: f"broken at {where}", 0: "its condition never arose"}[score]
        left_out = omitted and score < 0
        texts = (title, description, instruction, self.grounding)
        self.found.append(Finding(*texts, topic, score, steps, evidence, left_out, obvious, rank))

    def main(
        self,
        topic: str,
        title: str,
        description: str,
        instruction: str,
        done: Sequence[Change],
        right: Callable[[Change], bool],
    ) -> None:
        """The sub-goal's own criterion: something was done for it, and all of that hit the right thing."""
        self.add(
            topic,
            title,
            description,
            instruction + " Fail as well if nothing was done for it.",
            fail=steps_of(c for c in done if not right(c)) if done else (self.events.last,),
            passed=steps_of(done),
            evidence="" if done else f"none found up to step {self.events.last}",
            omitted=not done,
            rank=0,
        )

    def once(self, title: str, what: str, done: Sequence[Change], *arguments: str) -> None:
        """No change is made twice; changes with the same values of `arguments` are the same."""
        seen: set[object] = set()
        again = []
        for change in done:
            key = tuple(change.args.get(a) for a in arguments)
            if key in seen:
                again.append(change)
            # A change that is held and never confirmed was not made, so the next one is the first. Another criterion
            # judges the missing confirmation.
            if change.confirmed or not change.held:
                seen.add(key)
        self.add(
            "once",
            title,
            f"{what} is made one time, not again.",
            "Fail if the same change is made again after it took effect. Not applicable if it is never made.",
            fail=steps_of(again),
            passed=steps_of(done),
            obvious=False,
            rank=3,
        )

    def confirmed(self, title: str, what: str, done: Sequence[Change]) -> None:
        """Everything that was held is confirmed."""
        held = [c for c in done if c.held]
        self.add(
            "confirm",
            title,
            f"{what} is held at first and is confirmed afterwards.",
            "Look for a confirmation of every held id. Fail if one is neither confirmed nor cancelled. Not "
            "applicable if nothing was held.",
            fail=[self._confirmation_due(c, held) for c in held if not c.confirmed],
            passed=[c.confirmed for c in held],
            rank=2,
        )

    def _confirmation_due(self, change: Change, held: Sequence[Change]) -> int:
        """The step in which the confirmation was due: the next that holds nothing new for the sub-goal."""
        steps = {h.step for h in held if h.args != change.args}
        step = self.events.after(change.step)
        while step in steps and step < self.events.steps:
            step += 1
        return step

    def pages(self, title: str, what: str, listing: Listing | None, *handlers: str) -> None:
        """Every page is read. Going on to a call that is none of `handlers` leaves the rest of the list unread."""
        missing = listing is not None and listing.missing
        pages = listing.pages if listing is not None else {}
        self.add(
            "pages",
            title,
            f"All pages of the list of {what} are read, up to its end.",
            "Fail if an answer announces a next page that is never fetched. Not applicable if no page is read.",
            fail=[self.events.moved_on(max(pages.values()), *handlers)] if missing else (),
            passed=list(pages.values()),
            evidence=f"page {missing} is never fetched" if missing else "",
            rank=2,
        )

    def items(
        self, all_title: str, only_title: str, what: str, done: Sequence[Change], wanted: set[str], *, known: bool
    ) -> None:
        """All matching entries are acted on, and only matching ones. `known`: the list was looked at."""
        right = [c for c in done if str(c.args.get("id")) in wanted]
        left_out = sorted(wanted - {str(c.args.get("id")) for c in done})
        fails = bool(left_out) or not right
        self.add(
            "items",
            all_title,
            f"Every entry that the tools list as {what} is acted on.",
            "Collect the matching ids from the pages that were read and look for a successful call on each. Fail if "
            "one is missing, or if nothing was done.",
            fail=(self.events.last,) if fails else (),
            passed=steps_of(right),
            evidence=f"left out: {', '.join(left_out)}" if left_out else "nothing was done" if fails else "",
            omitted=not (done or known),
            rank=0,
        )
        self.add(
            "target",
            only_title,
            f"Nothing but entries that are {what} is acted on.",
            "Fail if a successful call names an id that the lists give to somebody else or in another state. Not "
            "applicable if there is no such call.",
            fail=steps_of(c for c in done if c not in right),
            passed=steps_of(right),
        )
