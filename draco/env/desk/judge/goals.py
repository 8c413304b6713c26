"""The sub-goals of a request, and which of them every change was made for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draco.env.desk.judge.events import Change, Events

__all__ = ["Goal", "assign", "goals_of", "same"]


@dataclass(frozen=True, slots=True)
class Goal:
    """One sentence of the request."""

    kind: str
    args: tuple[str, ...]
    sentence: str


_TASK = re.compile(r"^task: (.*)$", re.MULTILINE)
_GOALS = [
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("bill", r"pay the bill (\w+)"),
        ("pay", r"pay (\w+) of (\w+) (\d+)"),
        ("approve", r"approve all requests by (\w+)"),
        ("clean", r"delete all mails from (\w+)"),
        ("purge", r"delete all files of (\w+)"),
        ("note", r"note the code in the new mail from (\w+)"),
        ("book", r"book (\w+) at the free time"),
        ("share", r"share the final file (\w+) with (\w+) of (\w+)"),
        ("vault", r"open the file (\w+) with its key and mail (\w+) opened"),
        ("unlock", r"unlock the account (\w+) with its key and mail (\w+) unlocked"),
        ("refund", r"refund all late orders of (\w+)"),
    )
]

#: kind of change → the kinds of sub-goal that it can be made for
_SERVES: Mapping[str, tuple[str, ...]] = {
    "pay": ("pay", "bill"),
    "approve": ("approve",),
    "mail_delete": ("clean",),
    "file_delete": ("purge",),
    "note": ("note",),
    "book": ("book",),
    "share": ("share",),
    "open": ("vault",),
    "unlock": ("unlock",),
    "mail": ("vault", "unlock"),
    "refund": ("refund",),
}


def goals_of(request: str) -> tuple[Goal, ...]:
    """The sub-goals of a user message."""
    found = _TASK.search(request)
    goals = []
    for sentence in (found[1] if found else request).split("."):
        sentence = sentence.strip()
        for kind, pattern in _GOALS:
            if match := pattern.fullmatch(sentence):
                goals.append(Goal(kind, match.groups(), sentence))
                break
    return tuple(goals)


def same(value: object, number: int) -> bool:
    """True if a call's argument is this number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value == number


def assign(events: Events, goals: Sequence[Goal]) -> tuple[dict[int, list[Change]], list[Change]]:
    """Changes by the position of their sub-goal, and those that belong to none. Cancelled ones are left out."""
    assigned: dict[int, list[Change]] = {i: [] for i in range(len(goals))}
    extra: list[Change] = []
    for change in events.changes:
        if not change.cancelled:
            at = _goal_of(events, goals, assigned, change)
            (extra if at is None else assigned[at]).append(change)
    return assigned, extra


def _goal_of(events: Events, goals: Sequence[Goal], assigned: dict[int, list[Change]], c: Change) -> int | None:
    """The sub-goal that fits best: by values, then by the last look-up, then the one with the fewest changes so far."""
    options = [i for i, g in enumerate(goals) if g.kind in _SERVES[c.kind]]
    if not options:
        return None
    scores = {i: _fit(events, c, goals[i]) for i in options}
    best = max(options, key=lambda i: (scores[i], -len([x for x in assigned[i] if x.kind == c.kind]), -i))
    # Nobody asked for opening or booking something that no sentence names: it is no sub-goal done wrongly.
    return None if c.kind in {"open", "unlock", "book"} and scores[best] < 8 else best


def _fit(events: Events, c: Change, g: Goal) -> int:
    args = g.args
    if g.kind == "pay":
        name, team = events.teams.get(str(c.args.get("to")), (events.names.get(str(c.args.get("to")), ""), ""))
        return (
            8 * (name == args[0])
            + 4 * (team == args[1])
            + 3 * same(c.args.get("amount"), int(args[2]))
            + 2 * (c.context == ("contacts.find", args[0]))
        )
    if g.kind == "bill":
        payee, due, paid = events.bills.get(args[0], ("", -1, -1))
        return (
            8 * (c.args.get("to") == payee)
            + 3 * (same(c.args.get("amount"), due) or same(c.args.get("amount"), paid))
            + 4 * (c.context == ("notes.read", args[0]))
        )
    if g.kind == "note":
        mails = events.states.get(("mail.search", args[0]), {})
        known = {str(n) for m in mails for n in events.codes.get(m, ())}
        return 8 * (c.args.get("text") in known) + 4 * (c.context[1] in mails) + 2 * (c.context[1] == args[0])
    if g.kind == "book":
        return 8 * (c.args.get("name") == args[0])
    if g.kind == "share":
        owner = events.teams.get(str(c.args.get("to")), ("", ""))
        return (
            8 * (c.args.get("id") in events.states.get(("files.find", args[0]), {}))
            + 3 * (owner[0] == args[1])
            + (owner[1] == args[2])
        )
    if g.kind in {"vault", "unlock"}:
        if c.kind in {"open", "unlock"}:
            return 8 * (c.args.get("name") == args[0])
        word = "opened" if g.kind == "vault" else "unlocked"
        key = events.keys.get(args[0], ("\0", 0))[0]
        text = str(c.args.get("text"))
        return 8 * (c.args.get("to") == args[1]) + 4 * (text == word) + 4 * (key in text)
    return 1
