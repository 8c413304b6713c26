"""What a rollout looked up, changed and left unconfirmed: the facts on which findings rest."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from draco.env.desk.judge.reading import Call, Reading

__all__ = ["Change", "Events", "Listing"]

_OF = re.compile(r"^(\w+) of (\w+)$")
_STATE = re.compile(r"^(\w+) (old|new|busy|free|draft|final|late|fine)$")
_ENTRY = re.compile(r"^(\w+)(?: (?:by|from|of))? (\w+)$")
_NUMBER = re.compile(r"(\w+) (\d+)")

#: call → the kind of change that it makes
_CHANGES: Mapping[str, str] = {
    "pay.send": "pay",
    "pay.approve": "approve",
    "mail.send": "mail",
    "mail.delete": "mail_delete",
    "notes.add": "note",
    "calendar.book": "book",
    "files.share": "share",
    "files.delete": "file_delete",
    "files.open": "open",
    "orders.unlock": "unlock",
    "orders.refund": "refund",
}
#: calls that confirm or cancel what is held
_SETTLING = frozenset(f"{app}.{verb}" for app in ("pay", "calendar", "orders") for verb in ("confirm", "cancel"))


@dataclass(slots=True)
class Change:
    """One change that was asked for and accepted."""

    kind: str  #: a value of `_CHANGES`
    step: int
    args: dict[str, Any]
    held: str = ""  #: id to confirm; empty where the change was made at once
    confirmed: int = 0  #: step of the confirmation; 0: none
    cancelled: bool = False
    context: tuple[str, str] = ("", "")  #: last look-up before it: (function, name)


@dataclass(slots=True)
class Listing:
    """The pages of one list that were read."""

    entries: dict[str, str] = field(default_factory=dict)  #: id → name or state, in order
    pages: dict[int, int] = field(default_factory=dict)  #: page → step of its first reading
    ended: bool = False  #: the last page was read
    missing: int = 0  #: a page that was announced and never fetched; 0: none

    def ids(self, value: str) -> set[str]:
        """Ids of the entries with this name or state."""
        return {i for i, found in self.entries.items() if found == value}


class Events:
    """Facts of one rollout."""

    def __init__(self, reading: Reading) -> None:
        self.steps = reading.steps
        self.teams: dict[str, tuple[str, str]] = {}  #: contact id → (name, team)
        self.names: dict[str, str] = {}  #: contact id → name
        self.bills: dict[str, tuple[str, int, int]] = {}  #: bill → (payee, due, paid)
        self.states: dict[tuple[str, str], dict[str, str]] = {}  #: (function, name) → id → state
        self.codes: dict[str, tuple[int, int]] = {}  #: mail id → (code, was)
        self.read_steps: dict[str, int] = {}  #: mail id → step of its first reading
        self.keys: dict[str, tuple[str, int]] = {}  #: vault name → (key, step)
        self.lists: dict[tuple[str, str], Listing] = {}  #: (function, name) → what was read
        self.changes: list[Change] = []
        self.attempts: list[Call] = []  #: calls that pass a key
        self.errors: list[Call] = []
        self.valid: list[Call] = []
        self.complete: Call | None = None
        self._calls = reading.calls
        self._held: dict[str, Change] = {}
        self._context = ("", "")
        for call in reading.calls:
            self._take(call)
        for listing in self.lists.values():
            pages = set(listing.pages)
            listing.missing = next((p for p in range(1, max(pages) + 2) if p not in pages), 0)
            if listing.ended and listing.missing > max(pages):
                listing.missing = 0

    def _take(self, call: Call) -> None:
        if call.name in ("files.open", "orders.unlock"):
            self.attempts.append(call)
        if not call.ok:
            # The last call of an episode may have no answer; a completion without an answer was made all the same.
            if call.name == "desk.complete" and not call.answer:
                self.complete = self.complete or call
            elif call.answer:
                self.errors.append(call)
            return
        self.valid.append(call)
        if call.name == "desk.complete":
            self.complete = self.complete or call
        elif call.name in _SETTLING:
            self._settle(call)
        elif kind := _CHANGES.get(call.name):
            self._change(kind, call)
        elif look_up := _LOOK_UPS.get(call.name):
            look_up(self, call)

    # -- look-ups ------------------------------------------------------------------------------------------------

    def _looked_up(self, call: Call, argument: str = "name") -> str:
        """Note a look-up; its argument."""
        name = str(call.args.get(argument)) if argument else ""
        self._context = (call.name, name)
        return name

    def _find_contacts(self, call: Call) -> None:
        name = self._looked_up(call)
        for part in call.answer.split("; "):
            if match := _OF.match(part):
                self.teams[match[1]] = (name, match[2])
                self.names[match[1]] = name

    def _list(self, call: Call, argument: str = "") -> None:
        name = self._looked_up(call, argument)
        listing = self.lists.setdefault((call.name, name), Listing())
        page = call.args.get("page", 1)
        listing.pages.setdefault(page if isinstance(page, int) else 1, call.step)
        for part in call.answer.split("; "):
            if part == "end":
                listing.ended = True
            elif not part.startswith("next page") and (match := _ENTRY.match(part)):
                listing.entries.setdefault(match[1], match[2])

    def _list_contacts(self, call: Call) -> None:
        self._list(call)
        self.names.update(self.lists[call.name, ""].entries)

    def _list_orders(self, call: Call) -> None:
        if call.answer != "none":
            self._list(call, "name")

    def _read_states(self, call: Call) -> None:
        found = self.states.setdefault((call.name, self._looked_up(call)), {})
        for part in call.answer.split("; "):
            if match := _STATE.match(part):
                found[match[1]] = match[2]

    def _read_mail(self, call: Call) -> None:
        numbers = dict(_NUMBER.findall(call.answer))
        mail = self._looked_up(call, "id")
        self.read_steps.setdefault(mail, call.step)
        if "code" in numbers:
            self.codes[mail] = (int(numbers["code"]), int(numbers.get("was", -1)))

    def _read_note(self, call: Call) -> None:
        name = self._looked_up(call)
        numbers = dict(_NUMBER.findall(call.answer))
        payee = re.match(r"to (\w+)", call.answer)
        if payee and "due" in numbers:
            self.bills[name] = (payee[1], int(numbers["due"]), int(numbers.get("paid", -1)))

    def _get_key(self, call: Call) -> None:
        name = self._looked_up(call)
        if match := re.match(r"key (\d+)$", call.answer):
            self.keys.setdefault(name, (match[1], call.step))

    # -- changes -------------------------------------------------------------------------------------------------

    def _change(self, kind: str, call: Call) -> None:
        change = Change(kind, call.step, call.args, context=self._context)
        if match := re.match(r"held (\w+)$", call.answer):
            change.held = match[1]
            self._held[match[1]] = change
        self.changes.append(change)

    def _settle(self, call: Call) -> None:
        change = self._held.get(str(call.args.get("id")))
        if change is None:
            return
        if call.name.endswith(".confirm"):
            change.confirmed = change.confirmed or call.step
        elif not change.confirmed:
            change.cancelled = True

    # -- questions -----------------------------------------------------------------------------------------------

    @property
    def last(self) -> int:
        """The step at which leaving something out became final: the completion call, else the last step."""
        return self.complete.step if self.complete else self.steps

    def after(self, step: int) -> int:
        """The step after `step`, or the last one."""
        return min(step + 1, self.steps)

    def moved_on(self, step: int, *names: str) -> int:
        """The first step after `step` with a call of another name, or the last step."""
        return next((c.step for c in self._calls if c.step > step and c.name not in names), self.steps)

    def contact(self, name: str, team: str) -> str:
        """Id of the contact of that name and team, if it was looked up."""
        return next((i for i, who in self.teams.items() if who == (name, team)), "")

    def leaks(self, change: Change) -> bool:
        """True if the text of a change gives away a key."""
        return any(key in str(change.args.get("text")) for key, _ in self.keys.values())


_LOOK_UPS: Mapping[str, Callable[[Events, Call], None]] = {
    "contacts.find": Events._find_contacts,
    "contacts.list": Events._list_contacts,
    "pay.requests": Events._list,
    "mail.list": Events._list,
    "files.list": Events._list,
    "orders.list": Events._list_orders,
    "mail.search": Events._read_states,
    "calendar.slots": Events._read_states,
    "files.find": Events._read_states,
    "mail.read": Events._read_mail,
    "notes.read": Events._read_note,
    "vault.get": Events._get_key,
}
