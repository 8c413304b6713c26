"""A scripted agent that knows the gold and errs on purpose: teacher of the tiny policy, gold agent of the tests."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from random import Random

from draco.env.base import TOOL_CALL
from draco.env.desk.apps import APIS, COMPLETE
from draco.env.desk.evaluator import HANDLERS, LISTS
from draco.env.desk.parse import Call, write
from draco.env.desk.scenarios import Block, GoldTask

__all__ = ["Agent", "call"]

#: yields the calls of a turn, receives their observations
Script = Generator[list[Call], list[str], None]


def call(api: str, *values: str | int) -> Call:
    """A call with its arguments in the order of the table."""
    return Call(api, dict(zip(APIS[api], values, strict=True)))


class Agent:
    """Plays one task: `turn(observations)` gives the text of the next turn until `done`.

    Args:
        gold: the task.
        rates: fault name → chance to make it at each opportunity; none by default.
        rng: decides.
    """

    def __init__(self, gold: GoldTask, rates: Mapping[str, float] | None = None, rng: Random | None = None) -> None:
        self._gold, self._rates, self._rng = gold, rates or {}, rng or Random(0)
        self._script = self._play()
        self._turns, self._thought = 0, ""
        self.done = False
        self.made: list[tuple[str, int]] = []  #: faults so far with their causal turn, 1-based

    def turn(self, observations: list[str]) -> str:
        """The text of the next turn, given what the last one returned (nothing at the start)."""
        calls = self._script.send(observations) if self._turns else next(self._script)
        self._turns += 1
        self.done = calls[-1].api == COMPLETE
        thought, self._thought = self._thought, ""
        return thought + "".join(write(one, self._gold.style) for one in calls)

    def _think(self, of: str) -> None:
        """Say whose entry the next call is about: a word of reasoning before an id is picked from a list."""
        self._thought = f"{of}: "

    def _errs(self, fault: str) -> bool:
        """Decide on a fault whose causal step is the turn about to be made."""
        errs = self._rng.random() < self._rates.get(fault, 0.0)
        if errs:
            self.made.append((fault, self._turns + 1))
        return errs

    def _play(self) -> Script:
        for index, block in enumerate(self._gold.blocks):
            if index and self._errs("stops_early"):
                break
            yield from _SCRIPTS[block.kind](self, block)
        yield [call(COMPLETE, "done")]

    def _confirmed(self, first: Call, confirm: str, of: str = "") -> Script:
        """A held thing and its confirmation, perhaps forgotten, perhaps twice."""
        again = True
        while again:
            if of:
                self._think(of)
            observed = yield [first]
            if self._errs("forgets_confirmation"):
                return
            yield [call(confirm, _held(observed[0]))]
            again = confirm == "pay.confirm" and self._errs("duplicates")

    def _pay(self, block: Block) -> Script:
        facts = block.facts
        yield [call("contacts.find", facts["name"])]
        to = facts["wrong" if self._errs("wrong_recipient") else "to"]
        yield from self._confirmed(call("pay.send", to, facts["amount"]), "pay.confirm", facts["team"])

    def _bill(self, block: Block) -> Script:
        facts = block.facts
        yield [call("notes.read", facts["name"])]
        amount = facts["wrong" if self._errs("wrong_amount") else "amount"]
        yield from self._confirmed(call("pay.send", facts["to"], amount), "pay.confirm")

    def _listed(self, block: Block) -> Script:
        """Page by page: read it, then handle its entry."""
        facts = block.facts
        for page in range(1, facts["pages"] + 1):
            if page > 1 and self._errs("skips_pages"):
                return
            name = (facts["name"],) if "name" in facts else ()
            seen = (yield [call(LISTS[block.kind], *name, page)])[0]
            (item,) = (i for i in facts["ids"] if f"{i} " in seen)
            if block.kind == "refund":
                yield from self._confirmed(call("orders.refund", item), "orders.confirm")
                continue
            self._think(facts["who"])
            yield [call(HANDLERS[block.kind][0], item)]
            if block.kind == "approve" and self._errs("duplicates"):
                self._think(facts["who"])
                yield [call("pay.approve", item)]

    def _note(self, block: Block) -> Script:
        facts = block.facts
        yield [call("mail.search", facts["name"])]
        yield [call("mail.read", facts["id"])]
        text = facts["wrong" if self._errs("wrong_amount") else "text"]
        yield [call("notes.add", text)]
        if self._errs("duplicates"):
            yield [call("notes.add", text)]

    def _book(self, block: Block) -> Script:
        facts = block.facts
        yield [call("calendar.slots", facts["name"])]
        yield from self._confirmed(call("calendar.book", facts["name"], facts["slot"]), "calendar.confirm")

    def _share(self, block: Block) -> Script:
        facts = block.facts
        yield [call("files.find", facts["title"])]
        yield [call("contacts.find", facts["name"])]
        to = facts["wrong" if self._errs("wrong_recipient") else "to"]
        self._think(facts["team"])
        yield [call("files.share", facts["id"], to)]
        if self._errs("duplicates"):
            self._think(facts["team"])
            yield [call("files.share", facts["id"], to)]

    def _key(self, block: Block) -> Script:
        facts = block.facts
        yield [call("vault.get", facts["name"])]
        opens = call(facts["api"], facts["name"], facts["key"])
        # Function calls that do not wait for each other share a turn.
        together = self._gold.style is TOOL_CALL
        if not together:
            yield [opens]
        text = f"key {facts['key']}" if self._errs("restates_secret") else facts["verb"]
        mails = call("mail.send", facts["to"], text)
        yield [opens, mails] if together else [mails]
        if self._errs("duplicates"):
            yield [mails]


def _held(observation: str) -> str:
    return observation.removeprefix("held ")


_SCRIPTS: Mapping[str, Callable[[Agent, Block], Script]] = {
    "pay": Agent._pay,
    "bill": Agent._bill,
    "approve": Agent._listed,
    "clean": Agent._listed,
    "purge": Agent._listed,
    "note": Agent._note,
    "book": Agent._book,
    "share": Agent._share,
    "vault": Agent._key,
    "unlock": Agent._key,
    "refund": Agent._listed,
}
