"""What the calls of a rollout looked up, changed and left held: the facts that findings rest on."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from draco.env.desk.judge.reading import Call, Reading

__all__ = ["Effect", "Ledger", "Listing"]

_OF = re.compile(r"^(\w+) of (\w+)$")
_STATE = re.compile(r"^(\w+) (old|new|busy|free|draft|final|late|fine)$")
_ENTRY = re.compile(r"^(\w+)(?: (?:by|from|of))? (\w+)$")
_NUMBER = re.compile(r"(\w+) (\d+)")


@dataclass(slots=True)
class Effect:
    """One change that was asked for and accepted."""

    kind: str  #: pay | approve | mail_delete | note | book | share | file_delete | open | unlock | mail | refund
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


class Ledger:
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
        self.effects: list[Effect] = []
        self.attempts: list[Call] = []  #: calls that pass a key
        self.errors: list[Call] = []
        self.valid: list[Call] = []
        self.complete: Call | None = None
        self._calls = reading.calls
        self._held: dict[str, Effect] = {}
        self._context = ("", "")
        for call in reading.calls:
            self._take(call)
        for listing in self.lists.values():
            pages = set(listing.pages)
            listing.missing = next((p for p in range(1, max(pages) + 2) if p not in pages), 0)
            if listing.ended and listing.missing > max(pages):
                listing.missing = 0

    def _take(self, call: Call) -> None:
        if call.name in {"files.open", "orders.unlock"}:
            self.attempts.append(call)
        if not call.ok:
            # The last call of an episode may have no answer; a completion without one still was made.
            if call.name == "desk.complete" and not call.answer:
                self.complete = self.complete or call
            elif call.answer:
                self.errors.append(call)
            return
        self.valid.append(call)
        handler = getattr(self, f"_{call.name.replace('.', '_')}", None)
        if handler is not None:
            handler(call, call.args)

    # -- look-ups ------------------------------------------------------------------------------------------------

    def _looked_up(self, call: Call, name: str) -> None:
        self._context = (call.name, name)

    def _contacts_find(self, call: Call, args: dict[str, Any]) -> None:
        name = str(args.get("name"))
        self._looked_up(call, name)
        for part in call.answer.split("; "):
            if match := _OF.match(part):
                self.teams[match[1]] = (name, match[2])
                self.names[match[1]] = name

    def _list(self, call: Call, key: tuple[str, str]) -> None:
        listing = self.lists.setdefault(key, Listing())
        page = call.args.get("page", 1)
        listing.pages.setdefault(page if isinstance(page, int) else 1, call.step)
        self._looked_up(call, key[1])
        for part in call.answer.split("; "):
            if part == "end":
                listing.ended = True
            elif not part.startswith("next page") and (match := _ENTRY.match(part)):
                listing.entries.setdefault(match[1], match[2])

    def _contacts_list(self, call: Call, args: dict[str, Any]) -> None:
        self._list(call, ("contacts.list", ""))
        self.names.update(self.lists["contacts.list", ""].entries)

    def _pay_requests(self, call: Call, args: dict[str, Any]) -> None:
        self._list(call, ("pay.requests", ""))

    def _mail_list(self, call: Call, args: dict[str, Any]) -> None:
        self._list(call, ("mail.list", ""))

    def _files_list(self, call: Call, args: dict[str, Any]) -> None:
        self._list(call, ("files.list", ""))

    def _orders_list(self, call: Call, args: dict[str, Any]) -> None:
        if call.answer != "none":
            self._list(call, ("orders.list", str(args.get("name"))))

    def _choices(self, call: Call, args: dict[str, Any]) -> None:
        name = str(args.get("name"))
        self._looked_up(call, name)
        found = self.states.setdefault((call.name, name), {})
        for part in call.answer.split("; "):
            if match := _STATE.match(part):
                found[match[1]] = match[2]

    _mail_search = _calendar_slots = _files_find = _choices

    def _mail_read(self, call: Call, args: dict[str, Any]) -> None:
        numbers = dict(_NUMBER.findall(call.answer))
        mail = str(args.get("id"))
        self._looked_up(call, mail)
        self.read_steps.setdefault(mail, call.step)
        if "code" in numbers:
            self.codes[mail] = (int(numbers["code"]), int(numbers.get("was", -1)))

    def _notes_read(self, call: Call, args: dict[str, Any]) -> None:
        name = str(args.get("name"))
        self._looked_up(call, name)
        numbers = dict(_NUMBER.findall(call.answer))
        payee = re.match(r"to (\w+)", call.answer)
        if payee and "due" in numbers:
            self.bills[name] = (payee[1], int(numbers["due"]), int(numbers.get("paid", -1)))

    def _vault_get(self, call: Call, args: dict[str, Any]) -> None:
        name = str(args.get("name"))
        self._looked_up(call, name)
        if match := re.match(r"key (\d+)$", call.answer):
            self.keys.setdefault(name, (match[1], call.step))

    # -- changes -------------------------------------------------------------------------------------------------

    def _did(self, kind: str, call: Call) -> None:
        effect = Effect(kind, call.step, call.args, context=self._context)
        if match := re.match(r"held (\w+)$", call.answer):
            effect.held = match[1]
            self._held[match[1]] = effect
        self.effects.append(effect)

    def _settle(self, call: Call, args: dict[str, Any]) -> None:
        effect = self._held.get(str(args.get("id")))
        if effect is None:
            return
        if call.name.endswith(".confirm"):
            effect.confirmed = effect.confirmed or call.step
        elif not effect.confirmed:
            effect.cancelled = True

    _pay_confirm = _pay_cancel = _calendar_confirm = _calendar_cancel = _orders_confirm = _orders_cancel = _settle

    def _pay_send(self, call: Call, args: dict[str, Any]) -> None:
        self._did("pay", call)

    def _pay_approve(self, call: Call, args: dict[str, Any]) -> None:
        self._did("approve", call)

    def _mail_delete(self, call: Call, args: dict[str, Any]) -> None:
        self._did("mail_delete", call)

    def _notes_add(self, call: Call, args: dict[str, Any]) -> None:
        self._did("note", call)

    def _calendar_book(self, call: Call, args: dict[str, Any]) -> None:
        self._did("book", call)

    def _files_share(self, call: Call, args: dict[str, Any]) -> None:
        self._did("share", call)

    def _files_delete(self, call: Call, args: dict[str, Any]) -> None:
        self._did("file_delete", call)

    def _files_open(self, call: Call, args: dict[str, Any]) -> None:
        self._did("open", call)

    def _orders_unlock(self, call: Call, args: dict[str, Any]) -> None:
        self._did("unlock", call)

    def _mail_send(self, call: Call, args: dict[str, Any]) -> None:
        self._did("mail", call)

    def _orders_refund(self, call: Call, args: dict[str, Any]) -> None:
        self._did("refund", call)

    def _desk_complete(self, call: Call, args: dict[str, Any]) -> None:
        self.complete = self.complete or call

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

    def live(self, *kinds: str) -> list[Effect]:
        """Changes of these kinds that were not cancelled."""
        return [e for e in self.effects if e.kind in kinds and not e.cancelled]

    def contact(self, name: str, team: str) -> str:
        """Id of the contact of that name and team, if it was looked up."""
        return next((i for i, who in self.teams.items() if who == (name, team)), "")
