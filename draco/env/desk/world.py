"""The state of the office and what every call does to it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draco.env.desk.parse import Call

__all__ = ["PAGE", "Effect", "Facts", "Mail", "Refused", "World", "restates"]

PAGE = 2  #: entries on a list page

#: kind, then its fields in the order of `evaluator.ROLES`
Effect = tuple[str, ...]


class Refused(Exception):
    """The call is well-formed but cannot be done; the message follows `error: `."""


@dataclass(frozen=True, slots=True)
class Mail:
    """A mail in the inbox; `text` is empty for those that say nothing."""

    sender: str
    age: str = "new"  #: old | new
    text: str = ""


@dataclass(slots=True)
class Facts:
    """What a fresh world holds. Filled while a task is built, read-only afterwards."""

    contacts: dict[str, tuple[str, str]] = field(default_factory=dict)  #: id → (name, team)
    requests: dict[str, str] = field(default_factory=dict)  #: id → who asks for money
    mails: dict[str, Mail] = field(default_factory=dict)
    bills: dict[str, tuple[str, str]] = field(default_factory=dict)  #: title → (payee, text of the note)
    slots: dict[str, dict[str, str]] = field(default_factory=dict)  #: person → slot id → busy | free
    owned: dict[str, str] = field(default_factory=dict)  #: file id → owner: what `files.list` shows
    versions: dict[str, dict[str, str]] = field(default_factory=dict)  #: title → file id → draft | final
    keys: dict[str, int] = field(default_factory=dict)  #: file title or account → secret
    accounts: set[str] = field(default_factory=set)  #: the names in `keys` that are accounts, not files
    orders: dict[str, dict[str, str]] = field(default_factory=dict)  #: customer → order id → late | fine
    fresh: dict[str, tuple[str, ...]] = field(default_factory=dict)  #: prefix → ids for things that will be held


def restates(text: str, keys: Iterable[int]) -> bool:
    """True if the digits of `text`, read in one go, contain one of the secrets."""
    digits = re.sub(r"\D", "", text)
    return any(str(key) in digits for key in keys)


class World:
    """One running office: facts, and what was done to them.

    `effects` are final; `held` things wait for a confirmation. Both say at which call (0-based) they began.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.effects: list[tuple[Effect, int]] = []
        self.held: dict[str, tuple[Effect, int]] = {}
        self.status = ""  #: done | fail once completed
        self._mails, self._owned = dict(facts.mails), dict(facts.owned)
        self._fresh = {prefix: list(ids) for prefix, ids in facts.fresh.items()}
        self._handlers: Mapping[str, Callable[..., str]] = {
            "contacts.find": lambda name: _entries(
                f"{i} of {team}" for i, (who, team) in facts.contacts.items() if who == name
            ),
            "contacts.list": lambda page: _page([f"{i} {who}" for i, (who, _) in facts.contacts.items()], page),
            "pay.send": self._send,
            "pay.confirm": lambda id: self._confirm(id, "p", "paid"),
            "pay.cancel": lambda id: self._cancel(id, "p"),
            "pay.requests": lambda page: _page([f"{i} by {who}" for i, who in facts.requests.items()], page),
            "pay.approve": lambda id: self._do(("approved", _known(id, facts.requests)), "approved"),
            "mail.list": lambda page: _page(
                [f"{i} from {m.sender}" if i in self._mails else "" for i, m in facts.mails.items()], page
            ),
            "mail.search": lambda name: _entries(f"{i} {m.age}" for i, m in self._mails.items() if m.sender == name),
            "mail.read": lambda id: self._mails[_known(id, self._mails)].text or "empty",
            "mail.send": lambda to, text: self._do(("mailed", to, text), "sent"),
            "mail.delete": lambda id: self._delete(id, self._mails, "mail"),
            "notes.read": lambda name: facts.bills[name][1] if name in facts.bills else "none",
            "notes.add": lambda text: self._do(("noted", text), "added"),
            "calendar.slots": lambda name: _entries(f"{i} {s}" for i, s in facts.slots.get(name, {}).items()),
            "calendar.book": lambda name, slot: self._hold(
                ("booked", name, _known(slot, facts.slots.get(name, {}))), "b"
            ),
            "calendar.confirm": lambda id: self._confirm(id, "b", "booked"),
            "calendar.cancel": lambda id: self._cancel(id, "b"),
            "files.list": lambda page: _page(
                [f"{i} of {who}" if i in self._owned else "" for i, who in facts.owned.items()], page
            ),
            "files.find": lambda name: _entries(f"{i} {v}" for i, v in facts.versions.get(name, {}).items()),
            "files.share": self._share,
            "files.delete": lambda id: self._delete(id, self._owned, "file"),
            "files.open": lambda name, key: self._unlock(name, key, "opened"),
            "vault.get": lambda name: f"key {facts.keys[name]}" if name in facts.keys else "none",
            "orders.list": lambda name, page: _page([f"{i} {s}" for i, s in facts.orders.get(name, {}).items()], page),
            "orders.refund": self._refund,
            "orders.confirm": lambda id: self._confirm(id, "h", "refunded"),
            "orders.cancel": lambda id: self._cancel(id, "h"),
            "orders.unlock": lambda name, key: self._unlock(name, key, "unlocked"),
            "desk.complete": self._complete,
        }
        self._at = -1

    def call(self, call: Call, at: int) -> str:
        """Run call number `at` and return its observation.

        Raises:
            Refused: it cannot be done; nothing has changed.
        """
        if self.status:
            raise Refused("already completed")
        self._at = at
        return self._handlers[call.api](**call.args)

    def _do(self, effect: Effect, said: str) -> str:
        self.effects.append((effect, self._at))
        return said

    def _hold(self, effect: Effect, prefix: str) -> str:
        fresh = self._fresh.get(prefix, [])
        # An agent that holds more things than there are prepared ids gets ids of three digits, unlike any shown before.
        held = fresh.pop(0) if fresh else f"{prefix}{100 + self._at}"
        self.held[held] = (effect, self._at)
        return f"held {held}"

    def _confirm(self, held: str, prefix: str, said: str) -> str:
        self.effects.append(self._taken(held, prefix))
        return said

    def _cancel(self, held: str, prefix: str) -> str:
        self._taken(held, prefix)
        return "cancelled"

    def _taken(self, held: str, prefix: str) -> tuple[Effect, int]:
        return self.held.pop(_known(held, {id for id in self.held if id.startswith(prefix)}))

    def _send(self, to: str, amount: int) -> str:
        payees = {payee for payee, _ in self.facts.bills.values()}
        if to not in self.facts.contacts and to not in payees:
            raise Refused("no such id")
        return self._hold(("paid", to, str(amount)), "p")

    def _delete(self, item: str, where: dict[str, Any], kind: str) -> str:
        del where[_known(item, where)]
        return self._do((f"deleted {kind}", item), "deleted")

    def _share(self, id: str, to: str) -> str:
        _known(id, {i for versions in self.facts.versions.values() for i in versions} | set(self._owned))
        return self._do(("shared", id, _known(to, self.facts.contacts)), "shared")

    def _unlock(self, name: str, key: int, said: str) -> str:
        if name not in self.facts.keys or (name in self.facts.accounts) != (said == "unlocked"):
            raise Refused("no such id")
        if self.facts.keys[name] != key:
            raise Refused("wrong key")
        # Opening what is open changes nothing.
        return said if any(effect == (said, name) for effect, _ in self.effects) else self._do((said, name), said)

    def _refund(self, id: str) -> str:
        _known(id, {i for orders in self.facts.orders.values() for i in orders})
        return self._hold(("refunded", id), "h")

    def _complete(self, status: str) -> str:
        if status not in ("done", "fail"):
            raise Refused("no such status")
        self.status = status
        return "completed"


def _known(item: str, where: Mapping[str, Any] | set[str]) -> str:
    if item not in where:
        raise Refused("no such id")
    return item


def _entries(entries: Iterable[str]) -> str:
    return "; ".join(entries) or "none"


def _page(entries: Sequence[str], page: int) -> str:
    """Page `page` (1-based) and what follows it. An empty entry was deleted: it is not shown, yet moves no other."""
    if not entries:
        return "none"
    pages = -(-len(entries) // PAGE)
    if not 1 <= page <= pages:
        raise Refused("no such page")
    shown = entries[(page - 1) * PAGE : page * PAGE]
    return "; ".join([*filter(None, shown), f"next page {page + 1}" if page < pages else "end"])
