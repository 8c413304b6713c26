"""The sub-goals of a request, and which of them every change was made for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from draco.env.desk.judge.ledger import Effect, Ledger

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


def assign(ledger: Ledger, goals: Sequence[Goal]) -> tuple[dict[int, list[Effect]], list[Effect]]:
    """Changes by the position of their sub-goal, and those that belong to none. Cancelled ones are left out."""
    assigned: dict[int, list[Effect]] = {i: [] for i in range(len(goals))}
    extra: list[Effect] = []
    for effect in ledger.effects:
        if not effect.cancelled:
            at = _goal_of(ledger, goals, assigned, effect)
            (extra if at is None else assigned[at]).append(effect)
    return assigned, extra


def _goal_of(ledger: Ledger, goals: Sequence[Goal], assigned: dict[int, list[Effect]], e: Effect) -> int | None:
    """The sub-goal that fits best: values first, then the look-up that went before, then the least served."""
    fits = {
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
    }[e.kind]
    options = [i for i, g in enumerate(goals) if g.kind in fits]
    if not options:
        return None
    scores = {i: _fit(ledger, e, goals[i]) for i in options}
    best = max(options, key=lambda i: (scores[i], -len([x for x in assigned[i] if x.kind == e.kind]), -i))
    # Opening or booking something that no sentence names is nobody's sub-goal done wrongly.
    return None if e.kind in {"open", "unlock", "book"} and scores[best] < 8 else best


def _fit(led: Ledger, e: Effect, g: Goal) -> int:
    args = g.args
    if g.kind == "pay":
        name, team = led.teams.get(str(e.args.get("to")), (led.names.get(str(e.args.get("to")), ""), ""))
        return (
            8 * (name == args[0])
            + 4 * (team == args[1])
            + 3 * same(e.args.get("amount"), int(args[2]))
            + 2 * (e.context == ("contacts.find", args[0]))
        )
    if g.kind == "bill":
        payee, due, paid = led.bills.get(args[0], ("", -1, -1))
        return (
            8 * (e.args.get("to") == payee)
            + 3 * (same(e.args.get("amount"), due) or same(e.args.get("amount"), paid))
            + 4 * (e.context == ("notes.read", args[0]))
        )
    if g.kind == "note":
        mails = led.states.get(("mail.search", args[0]), {})
        known = {str(n) for m in mails for n in led.codes.get(m, ())}
        return 8 * (e.args.get("text") in known) + 4 * (e.context[1] in mails) + 2 * (e.context[1] == args[0])
    if g.kind in {"book", "open"}:
        return 8 * (e.args.get("name") == args[0])
    if g.kind == "share":
        owner = led.teams.get(str(e.args.get("to")), ("", ""))
        return (
            8 * (e.args.get("id") in led.states.get(("files.find", args[0]), {}))
            + 3 * (owner[0] == args[1])
            + (owner[1] == args[2])
        )
    if g.kind in {"vault", "unlock"}:
        if e.kind in {"open", "unlock"}:
            return 8 * (e.args.get("name") == args[0])
        word = "opened" if g.kind == "vault" else "unlocked"
        key = led.keys.get(args[0], ("\0", 0))[0]
        text = str(e.args.get("text"))
        return 8 * (e.args.get("to") == args[1]) + 4 * (text == word) + 4 * (key in text)
    return 1
