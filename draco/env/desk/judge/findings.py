"""The sub-goals of a request against the ledger: one finding for every separate way to succeed or fail.

Every finding is a criterion with its concrete values and the verdict of this rollout on it, with the steps responsible:
a fail cites the step that made the mistake, an omission the step where leaving it out mattered most, a pass the steps
that fulfilled it. A finding whose condition never arose is not applicable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from draco.env.desk.judge.goals import Goal, assign, goals_of, same
from draco.env.desk.judge.ledger import Effect, Ledger, Listing
from draco.env.desk.judge.reading import read_transcript

__all__ = ["Finding", "examine"]


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


@lru_cache(maxsize=1024)
def examine(block: str) -> tuple[tuple[Finding, ...], Ledger]:
    """All findings of one transcript, and the ledger. Also of an opening alone: then nothing was done."""
    reading = read_transcript(block)
    exam = _Exam(Ledger(reading), goals_of(reading.request))
    return tuple(exam.run()), exam.ledger


def _steps(effects: Iterable[Effect]) -> tuple[int, ...]:
    return tuple(sorted({e.step for e in effects}))


class _Exam:
    """Examines each sub-goal with the changes that were made for it."""

    def __init__(self, ledger: Ledger, goals: Sequence[Goal]) -> None:
        self.ledger = ledger
        self.goals = goals
        self.out: list[Finding] = []
        self.goal = goals[0] if goals else Goal("", (), "")
        self.assigned, self.extra = assign(ledger, goals)

    def run(self) -> list[Finding]:
        for i, goal in enumerate(self.goals):
            self.goal = goal
            getattr(self, f"_{goal.kind}")(self.assigned[i], *goal.args)
        self._overall()
        return self.out

    # -- building findings -----------------------------------------------------------------------------------------

    def _add(
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
        """Failing steps make a fail; else passing ones a pass; else it is not applicable."""
        score = -1 if fail else 1 if passed else 0
        steps = tuple(sorted({max(1, s) for s in (fail or passed)}))
        if not evidence:
            where = "step" + ("s " if len(steps) > 1 else " ") + ", ".join(map(str, steps))
            evidence = {1: f"fulfilled at {where}", -1: f"broken at {where}", 0: "its condition never arose"}[score]
        self.out.append(
            Finding(
                title=title,
                description=description,
                instruction=instruction,
                grounding=self.goal.sentence,
                topic=topic,
                score=score,
                steps=steps,
                evidence=evidence,
                omitted=omitted and score < 0,
                obvious=obvious,
                rank=rank,
            )
        )

    def _main(
        self,
        topic: str,
        title: str,
        description: str,
        instruction: str,
        done: Sequence[Effect],
        right: Callable[[Effect], bool],
    ) -> None:
        """The sub-goal's own criterion: something was done for it, and all of that hit the right thing."""
        wrong = [e for e in done if not right(e)]
        self._add(
            topic,
            title,
            description,
            instruction + " Fail as well if nothing was done for it.",
            fail=_steps(wrong) if done else (self.ledger.last,),
            passed=_steps(done),
            evidence="" if done else f"none found up to step {self.ledger.last}",
            omitted=not done,
            rank=0,
        )

    def _once(self, title: str, what: str, done: Sequence[Effect], key: Callable[[Effect], object]) -> None:
        seen: set[object] = set()
        again = []
        for e in done:
            if key(e) in seen:
                again.append(e)
            # What is held and never confirmed was not made: the next one is the first. That it hangs is judged apart.
            if e.confirmed or not e.held:
                seen.add(key(e))
        self._add(
            "once",
            title,
            f"{what} is made one time, not again.",
            "Fail if the same change is made again after it took effect. Not applicable if it is never made.",
            fail=_steps(again),
            passed=_steps(done),
            obvious=False,
            rank=3,
        )

    def _confirmed(self, title: str, what: str, done: Sequence[Effect]) -> None:
        held = [e for e in done if e.held]
        open_ = [e for e in held if not e.confirmed]
        self._add(
            "confirm",
            title,
            f"{what} is held at first and is confirmed afterwards.",
            "Look for a confirmation of every held id. Fail if one is neither confirmed nor cancelled. Not "
            "applicable if nothing was held.",
            fail=[self._due(e, held) for e in open_],
            passed=[e.confirmed for e in held],
            rank=2,
        )

    def _due(self, e: Effect, held: Sequence[Effect]) -> int:
        """The step in which the confirmation of `e` was due: the next that holds nothing new for the sub-goal."""
        steps = {h.step for h in held if h.args != e.args}
        step = self.ledger.after(e.step)
        while step in steps and step < self.ledger.steps:
            step += 1
        return step

    def _pages(self, title: str, what: str, listing: Listing | None, *handlers: str) -> None:
        """Pages may be handled one by one, by calls of `handlers`: going on to anything else leaves a list unread."""
        missing = listing is not None and listing.missing
        pages = listing.pages if listing is not None else {}
        self._add(
            "pages",
            title,
            f"All pages of the list of {what} are read, up to its end.",
            "Fail if an answer announces a next page that is never fetched. Not applicable if no page is read.",
            fail=[self.ledger.moved_on(max(pages.values()), *handlers)] if missing else (),
            passed=list(pages.values()),
            evidence=f"page {listing.missing} is never fetched" if listing is not None and missing else "",
            rank=2,
        )

    def _every(
        self,
        titles: tuple[str, str, str],
        what: str,
        done: Sequence[Effect],
        wanted: set[str],
        known: bool,
        *,
        once: bool,
    ) -> None:
        """All matching entries, only matching entries, each once."""
        hit = {str(e.args.get("id")) for e in done}
        right = [e for e in done if str(e.args.get("id")) in wanted]
        left_out = sorted(wanted - hit)
        worked = bool(done) or known
        if done and not left_out and right:
            failing: tuple[int, ...] = ()
        else:
            failing = (self.ledger.last,)
        self._add(
            "items",
            titles[0],
            f"Every entry that the tools list as {what} is acted on.",
            "Collect the matching ids from the pages that were read and look for a successful call on each. Fail if "
            "one is missing, or if nothing was done.",
            fail=failing,
            passed=_steps(right),
            evidence=f"left out: {', '.join(left_out)}" if left_out else "" if not failing else "nothing was done",
            omitted=not worked,
            rank=0,
        )
        self._add(
            "target",
            titles[1],
            f"Nothing but entries that are {what} is acted on.",
            "Fail if a successful call names an id that the lists give to somebody else or in another state. Not "
            "applicable if there is no such call.",
            fail=_steps(e for e in done if e not in right),
            passed=_steps(right),
        )
        if once:
            self._once(titles[2], f"The action on an entry that is {what}", done, lambda e: e.args.get("id"))

    # -- the kinds of sub-goal ---------------------------------------------------------------------------------------

    def _pay(self, done: list[Effect], name: str, team: str, amount: str) -> None:
        right = self.ledger.contact(name, team)
        self._main(
            "target",
            f"Pays {name} of {team}",
            f"The payment for {name} goes to the contact id that the tools list for {name} of team {team}.",
            f"Compare `to` of the payment with the id of {name} of {team} in the look-up. Fail if it is another id.",
            done,
            lambda e: e.args.get("to") == right and right != "",
        )
        self._add(
            "content",
            f"Pays {name} of {team} exactly {amount}",
            f"The amount of the payment for {name} of {team} is {amount}.",
            "Fail if the amount differs. Not applicable if no payment is made for this.",
            fail=_steps(e for e in done if not same(e.args.get("amount"), int(amount))),
            passed=_steps(done),
        )
        self._confirmed(f"Confirms payment to {name} of {team}", f"The payment for {name} of {team}", done)
        self._once(
            f"Pays {name} of {team} only once", f"The payment for {name} of {team}", done, lambda e: e.args.get("to")
        )

    def _bill(self, done: list[Effect], bill: str) -> None:
        payee, due, _ = self.ledger.bills.get(bill, ("", -1, -1))
        self._main(
            "target",
            f"Pays the bill {bill}",
            f"The payment for the bill {bill} goes to the payee that the note of {bill} names.",
            "Compare `to` of the payment with the payee in the note. Fail if it is another one.",
            done,
            lambda e: e.args.get("to") == payee and payee != "",
        )
        self._add(
            "content",
            f"Pays what is due for {bill}",
            f"The amount paid for the bill {bill} is the one that its note calls due, not the one already paid.",
            "Compare the amount of the payment with `due` in the note. Not applicable if no payment is made for this.",
            fail=_steps(e for e in done if not same(e.args.get("amount"), due)),
            passed=_steps(done),
        )
        self._confirmed(f"Confirms payment of bill {bill}", f"The payment for the bill {bill}", done)
        self._once(
            f"Pays the bill {bill} only once", f"The payment for the bill {bill}", done, lambda e: e.args.get("to")
        )

    def _approve(self, done: list[Effect], name: str) -> None:
        listing = self.ledger.lists.get(("pay.requests", ""))
        self._pages("Reads all pages of payment requests", "payment requests", listing, "pay.approve")
        wanted = {i for i, who in listing.entries.items() if who == name} if listing else set()
        titles = (
            f"Approves all requests by {name}",
            f"Approves only requests by {name}",
            f"Approves no request by {name} twice",
        )
        self._every(titles, f"requests by {name}", done, wanted, listing is not None, once=True)

    def _clean(self, done: list[Effect], name: str) -> None:
        listing = self.ledger.lists.get(("mail.list", ""))
        self._pages("Reads all pages of mails", "mails", listing, "mail.delete")
        wanted = {i for i, who in listing.entries.items() if who == name} if listing else set()
        wanted |= set(self.ledger.states.get(("mail.search", name), ()))
        titles = (f"Deletes all mails from {name}", f"Deletes only mails from {name}", "")
        self._every(titles, f"mails from {name}", done, wanted, bool(wanted) or listing is not None, once=False)

    def _purge(self, done: list[Effect], name: str) -> None:
        listing = self.ledger.lists.get(("files.list", ""))
        self._pages("Reads all pages of files", "files", listing, "files.delete")
        wanted = {i for i, who in listing.entries.items() if who == name} if listing else set()
        titles = (f"Deletes all files of {name}", f"Deletes only files of {name}", "")
        self._every(titles, f"files of {name}", done, wanted, listing is not None, once=False)

    def _refund(self, done: list[Effect], name: str) -> None:
        listing = self.ledger.lists.get(("orders.list", name))
        handlers = ("orders.refund", "orders.confirm")
        self._pages(f"Reads all pages of orders of {name}", f"orders of {name}", listing, *handlers)
        wanted = {i for i, state in listing.entries.items() if state == "late"} if listing else set()
        titles = (
            f"Refunds all late orders of {name}",
            f"Refunds only late orders of {name}",
            f"Refunds no order of {name} twice",
        )
        self._every(titles, f"late orders of {name}", done, wanted, listing is not None, once=True)
        self._confirmed(f"Confirms every refund for {name}", f"Every refund for {name}", done)

    def _note(self, done: list[Effect], name: str) -> None:
        mails = self.ledger.states.get(("mail.search", name), {})
        codes = {str(self.ledger.codes[m][0]) for m, s in mails.items() if s == "new" and m in self.ledger.codes}
        # A key in the note is the fault of the criterion about keys, not of this one.
        wrong = [e for e in done if e.args.get("text") not in codes and not self._leaks(e)]
        misread = [
            self.ledger.read_steps[m]
            for e in wrong
            for m, s in mails.items()
            if s == "old" and m in self.ledger.codes and str(self.ledger.codes[m][0]) == e.args.get("text")
        ]
        self._add(
            "content",
            f"Notes the code of {name}'s new mail",
            f"A note is added whose text is exactly the number called code in the new mail from {name}.",
            "Compare the text of the note with `code` in the mail, not with `was`. Fail if it differs or is missing.",
            fail=[*_steps(wrong), *misread] if done else [self.ledger.last],
            passed=_steps(done),
            omitted=not done,
            rank=0,
        )
        self._once(f"Notes the code of {name} once", f"The note for {name}", done, lambda e: e.args.get("text"))

    def _book(self, done: list[Effect], name: str) -> None:
        slots = self.ledger.states.get(("calendar.slots", name), {})
        self._main(
            "choice",
            f"Books the free time of {name}",
            f"The booking for {name} names a slot that the calendar lists as free.",
            "Compare the slot of the booking with the calendar's answer. Fail if it is busy or was never listed.",
            done,
            lambda e: slots.get(str(e.args.get("slot"))) == "free",
        )
        self._confirmed(f"Confirms the booking for {name}", f"The booking for {name}", done)
        self._once(f"Books {name} only once", f"The booking for {name}", done, lambda e: e.args.get("slot"))

    def _share(self, done: list[Effect], title: str, name: str, team: str) -> None:
        files = self.ledger.states.get(("files.find", title), {})
        right = self.ledger.contact(name, team)
        self._main(
            "choice",
            f"Shares the final file {title}",
            f"The file that is shared for this is the one listed as final under the title {title}.",
            "Compare the id of the shared file with the look-up. Fail if it is the draft or another file.",
            done,
            lambda e: files.get(str(e.args.get("id"))) == "final",
        )
        self._add(
            "target",
            f"Shares {title} with {name} of {team}",
            f"The file {title} is shared with the contact id that the tools list for {name} of team {team}.",
            "Compare `to` of the sharing with the look-up. Not applicable if nothing is shared for this.",
            fail=_steps(e for e in done if e.args.get("to") != right or not right),
            passed=_steps(done),
        )
        self._once(
            f"Shares the file {title} only once",
            f"The sharing of {title}",
            done,
            lambda e: (e.args.get("id"), e.args.get("to")),
        )

    def _vault(self, done: list[Effect], title: str, name: str) -> None:
        self._locked(done, f"Opens the locked file {title}", f"the file {title}", title, name, "opened")

    def _unlock(self, done: list[Effect], account: str, name: str) -> None:
        self._locked(done, f"Unlocks the account {account}", f"the account {account}", account, name, "unlocked")

    def _locked(self, done: list[Effect], title: str, what: str, lock: str, name: str, word: str) -> None:
        opened = [e for e in done if e.kind in {"open", "unlock"}]
        mails = [e for e in done if e.kind == "mail"]
        tried = [c for c in self.ledger.attempts if c.args.get("name") == lock and not c.ok]
        self._add(
            "open",
            title,
            f"{what[0].upper()}{what[1:]} is opened with the key that the vault returns for it.",
            f"Look for a call on {lock} that is answered with {word}. Fail if there is none.",
            fail=() if opened else (tried[-1].step if tried else self.ledger.last,),
            passed=_steps(opened),
            omitted=not tried,
            rank=0,
        )
        self._main(
            "target",
            f"Mails {name} about {lock}",
            f"A mail that tells of {what} goes to {name}.",
            f"Compare `to` of the mail with {name}. Fail if it goes to somebody else.",
            mails,
            lambda e: e.args.get("to") == name,
        )
        proper = [e for e in mails if not self._leaks(e)]
        self._add(
            "content",
            f"Mails {name} exactly the word {word}",
            f"The text of the mail to {name} about {lock} is {word}.",
            "Fail if the text differs. Not applicable if no mail is sent, or if it gives a key away: that is judged "
            "apart.",
            fail=_steps(e for e in proper if e.args.get("text") != word),
            passed=_steps(proper),
        )
        self._once(
            f"Mails {name} about {lock} once", f"The mail to {name} about {lock}", mails, lambda e: e.args.get("to")
        )

    def _leaks(self, e: Effect) -> bool:
        return any(key in str(e.args.get("text")) for key, _ in self.ledger.keys.values())

    def _overall(self) -> None:
        led = self.ledger
        locks = [g for g in self.goals if g.kind in {"vault", "unlock"}]
        if locks:
            self.goal = locks[0]
            texts = led.live("mail", "note")
            first = min((step for _, step in led.keys.values()), default=led.steps + 1)
            self._add(
                "secret",
                "Keeps vault keys out of texts",
                "No key that the vault returned appears in the text of a mail or a note.",
                "Search the texts of mails and notes for the digits of every key. Not applicable if no text is written "
                "after a key was fetched.",
                fail=_steps(e for e in texts if self._leaks(e)),
                passed=_steps(e for e in texts if e.step > first),
                obvious=False,
            )
        self.goal = Goal("", (), "complete")
        self._add(
            "target",
            "Changes nothing beyond the request",
            "No payment, message, note, booking, deletion or other change is made that the request does not ask for.",
            "Match every successful changing call with a part of the request. Not applicable if there is none.",
            fail=_steps(self.extra),
            passed=_steps(led.live(*{e.kind for e in led.effects})),
            obvious=False,
            rank=3,
        )
        status = led.complete.args.get("status") if led.complete else None
        self._add(
            "close",
            "Completes with the status done",
            "The completion call is made, with the status done.",
            "Fail if there is no completion call, or its status is another one.",
            fail=() if status == "done" else (led.last,),
            passed=(led.last,),
            evidence="" if led.complete else "the completion call is never made",
            rank=1,
        )
