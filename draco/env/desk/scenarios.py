"""Tasks from seeds: a family is a list of blocks (sub-goals), a scenario fixes their order, a variant the parameters.

Names and numbers come from one pool a split, and the pools are disjoint: no name, amount, code or key of a train task
occurs in a test task (ids are labels without meaning and may be the same). `Random(str)` seeds by SHA-512, so tasks are
the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from itertools import permutations
from random import Random
from typing import Any

from draco.core.errors import ConfigError
from draco.core.types import Task
from draco.env.base import CODE, TOOL_CALL, ActionFormat
from draco.env.desk.world import Effect, Facts, Mail

__all__ = [
    "BLOCK_APPS",
    "FAMILIES",
    "SPLITS",
    "SYLLABLES",
    "Block",
    "Family",
    "GoldTask",
    "compose",
    "gold_task",
    "pools",
    "task_ids",
]

_SYLLABLES = (
    "ka lu ri mo te na so vi pe du zo fi ja ke bo ra mi nu ta lo go wi hu sa "
    "ba ci fu ga vu je xo bi mu ni po qu re si tu va we xi yo za ce dy fe gi"
)
SYLLABLES = tuple(_SYLLABLES.split())
BLOCK_APPS: Mapping[str, tuple[str, ...]] = {
    "pay": ("contacts", "pay"),
    "bill": ("notes", "pay"),
    "approve": ("pay",),
    "clean": ("mail",),
    "note": ("mail", "notes"),
    "book": ("calendar",),
    "share": ("files", "contacts"),
    "purge": ("files",),
    "vault": ("vault", "files", "mail"),
    "unlock": ("vault", "orders", "mail"),
    "refund": ("orders",),
}


@dataclass(frozen=True, slots=True)
class Family:
    """What the tasks of a family are made of, by difficulty 1, 2, 3."""

    name: str
    blocks: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    style: ActionFormat = CODE


def _family(one: str, two: str, three: str, style: ActionFormat = CODE) -> Family:
    blocks = (tuple(one.split()), tuple(two.split()), tuple(three.split()))
    return Family("_".join(dict.fromkeys(blocks[0])), blocks, style)


_SEEN = (
    _family("pay clean", "pay clean pay", "pay clean pay"),
    _family("book bill book", "bill book bill", "bill book bill book"),
    _family("approve note", "note approve note", "note approve note"),
    _family("vault clean", "vault clean vault", "vault clean vault"),
    _family("share pay share", "pay share pay", "share pay share pay"),
    _family("purge vault", "vault purge vault", "vault purge vault"),
    _family("bill approve", "bill approve bill", "bill approve bill"),
    _family("note book note", "book note book", "note book note book"),
    _family("unlock refund", "unlock refund unlock", "unlock refund unlock", TOOL_CALL),
)
#: each brings together a pair of apps that no family above has
_UNSEEN = (
    _family("share book share", "book share book", "share book share book"),
    _family("vault bill vault", "bill vault bill", "vault bill vault bill"),
    _family("purge note", "note purge note", "note purge note"),
    _family("book vault book", "vault book vault", "book vault book vault"),
    _family("share note share", "note share note", "share note share note"),
    _family("pay book pay", "book pay book", "pay book pay book"),
    _family("pay bill pay", "bill pay bill", "pay bill pay bill"),
    _family("approve vault", "vault approve vault", "vault approve vault"),
)


@dataclass(frozen=True, slots=True)
class _Split:
    scenarios: int
    families: tuple[Family, ...]
    names: int  #: size of its pool of names
    numbers: int


SPLITS: Mapping[str, _Split] = {
    "train": _Split(30, _SEEN, 64, 42),
    "dev": _Split(20, _SEEN, 24, 16),
    "test_normal": _Split(56, _SEEN, 40, 16),
    "test_challenge": _Split(56, _UNSEEN, 40, 16),
}
FAMILIES: Mapping[str, Family] = {family.name: family for family in (*_SEEN, *_UNSEEN)}
VARIANTS = 3
EVERY = "every"
_IDS = tuple(str(n) for n in range(10, 100))


@cache
def pools(split: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names (two different syllables) and two-digit numbers of a split; pools of different splits are disjoint.

    The pool `EVERY` is the union of all: every word that a task of any split can hold.
    """
    if split == EVERY:
        parts = [pools(name) for name in SPLITS]
        return tuple(n for names, _ in parts for n in names), tuple(n for _, numbers in parts for n in numbers)
    names = ["".join(pair) for pair in permutations(SYLLABLES, 2)]
    numbers = [str(n) for n in range(10, 100)]
    rng = Random("desk pools")
    rng.shuffle(names)
    rng.shuffle(numbers)
    for name, part in SPLITS.items():
        if name == split:
            return tuple(names[: part.names]), tuple(numbers[: part.numbers])
        names, numbers = names[part.names :], numbers[part.numbers :]
    raise ConfigError(f"desk has no split {split!r}; there are {', '.join(SPLITS)}")


@dataclass(frozen=True, slots=True)
class Block:
    """One sub-goal: what the user reads, the effects that fulfil it, and what a scripted agent needs to know."""

    kind: str
    sentence: str
    effects: tuple[Effect, ...]
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class GoldTask:
    """A task with its gold, which stays with the evaluator and the scripted agent."""

    task: Task
    blocks: tuple[Block, ...]
    world: Facts
    style: ActionFormat


class _Draw:
    """Draws parameters of one task without repeating a name, or a number behind the same letter.

    As long as the pool allows, names of a task share no syllable and numbers behind a letter no first digit: what makes
    a task hard is to keep to the procedure, not to tell `kalu` from `kari`.
    """

    def __init__(self, split: str, rng: Random) -> None:
        names, self._numbers = pools(split)
        self.rng = rng
        self._names = rng.sample(names, len(names))
        self._syllables: set[str] = set()
        self._used: dict[str, list[str]] = {}

    def name(self) -> str:
        name = min(self._names, key=lambda n: (n[:2] in self._syllables) + (n[2:] in self._syllables))
        self._names.remove(name)
        self._syllables |= {name[:2], name[2:]}
        return name

    def number(self) -> str:
        return self._draw("", self._numbers)

    def id(self, prefix: str) -> str:
        return prefix + self._draw(prefix, _IDS)

    def _draw(self, kind: str, pool: tuple[str, ...]) -> str:
        used = self._used.setdefault(kind, [])
        left = [n for n in pool if n not in used]
        fresh = [n for n in left if n[0] not in {u[0] for u in used}]
        used.append(self.rng.choice(fresh or left))
        return used[-1]

    def mixed(self, *items: Any) -> list[Any]:
        return self.rng.sample(items, len(items))

    def pages(self, count: int) -> list[bool]:
        """For every entry of a list of `count` pages: is the task about it? One of the two on each page is."""
        return [flag for _ in range(count) for flag in self.mixed(True, False)]


def _pay(d: _Draw, w: Facts, pages: int) -> Block:
    name, team, other, amount = d.name(), d.name(), d.name(), d.number()
    to, wrong = d.id("k"), d.id("k")
    w.contacts.update(d.mixed((to, (name, team)), (wrong, (name, other))))
    facts = {"name": name, "team": team, "to": to, "wrong": wrong, "amount": int(amount)}
    return Block("pay", f"pay {name} of {team} {amount}.", (("paid", to, amount),), facts)


def _bill(d: _Draw, w: Facts, pages: int) -> Block:
    title, payee, due, paid = d.name(), d.name(), d.number(), d.number()
    w.bills[title] = (payee, " ".join([f"to {payee}", *d.mixed(f"due {due}", f"paid {paid}")]))
    facts = {"name": title, "to": payee, "amount": int(due), "wrong": int(paid)}
    return Block("bill", f"pay the bill {title}.", (("paid", payee, due),), facts)


def _listed(d: _Draw, pages: int, prefix: str) -> tuple[str, dict[str, str], list[str]]:
    """A name, entries id → name, and the ids of that name."""
    name, flags = d.name(), d.pages(pages)
    entries = {d.id(prefix): name if about else d.name() for about in flags}
    return name, entries, [i for i, who in entries.items() if who == name]


def _approve(d: _Draw, w: Facts, pages: int) -> Block:
    name, entries, ids = _listed(d, pages, "r")
    w.requests.update(entries)
    effects = tuple(("approved", i) for i in ids)
    return Block("approve", f"approve all requests by {name}.", effects, {"who": name, "ids": ids, "pages": pages})


def _clean(d: _Draw, w: Facts, pages: int) -> Block:
    name, entries, ids = _listed(d, pages, "m")
    # Before all other mails, so that the list shows these first and every page is about the task.
    w.mails = {**{i: Mail(who) for i, who in entries.items()}, **w.mails}
    effects = tuple(("deleted mail", i) for i in ids)
    return Block("clean", f"delete all mails from {name}.", effects, {"who": name, "ids": ids, "pages": pages})


def _purge(d: _Draw, w: Facts, pages: int) -> Block:
    name, entries, ids = _listed(d, pages, "f")
    w.owned.update(entries)
    effects = tuple(("deleted file", i) for i in ids)
    return Block("purge", f"delete all files of {name}.", effects, {"who": name, "ids": ids, "pages": pages})


def _note(d: _Draw, w: Facts, pages: int) -> Block:
    name, code, was = d.name(), d.number(), d.number()
    new, old = d.id("m"), d.id("m")
    text = " ".join(d.mixed(f"code {code}", f"was {was}"))
    w.mails.update(d.mixed((new, Mail(name, "new", text)), (old, Mail(name, "old"))))
    facts = {"name": name, "id": new, "text": code, "wrong": was}
    return Block("note", f"note the code in the new mail from {name}.", (("noted", code),), facts)


def _book(d: _Draw, w: Facts, pages: int) -> Block:
    name, free, busy = d.name(), d.id("t"), d.id("t")
    w.slots[name] = dict(d.mixed((free, "free"), (busy, "busy")))
    return Block("book", f"book {name} at the free time.", (("booked", name, free),), {"name": name, "slot": free})


def _share(d: _Draw, w: Facts, pages: int) -> Block:
    title, name, team, other = d.name(), d.name(), d.name(), d.name()
    file, draft, to, wrong = d.id("f"), d.id("f"), d.id("k"), d.id("k")
    w.versions[title] = dict(d.mixed((file, "final"), (draft, "draft")))
    w.contacts.update(d.mixed((to, (name, team)), (wrong, (name, other))))
    facts = {"title": title, "name": name, "team": team, "id": file, "to": to, "wrong": wrong}
    return Block("share", f"share the final file {title} with {name} of {team}.", (("shared", file, to),), facts)


def _vault(d: _Draw, w: Facts, pages: int) -> Block:
    title, name = d.name(), d.name()
    w.keys[title] = int(d.number() + d.number())
    facts = {"name": title, "key": w.keys[title], "to": name, "verb": "opened", "api": "files.open"}
    effects = (("opened", title), ("mailed", name, "opened"))
    return Block("vault", f"open the file {title} with its key and mail {name} opened.", effects, facts)


def _unlock(d: _Draw, w: Facts, pages: int) -> Block:
    account, name = d.name(), d.name()
    w.keys[account] = int(d.number() + d.number())
    w.accounts.add(account)
    facts = {"name": account, "key": w.keys[account], "to": name, "verb": "unlocked", "api": "orders.unlock"}
    effects = (("unlocked", account), ("mailed", name, "unlocked"))
    return Block("unlock", f"unlock the account {account} with its key and mail {name} unlocked.", effects, facts)


def _refund(d: _Draw, w: Facts, pages: int) -> Block:
    name, flags = d.name(), d.pages(pages)
    w.orders[name] = {d.id("o"): "late" if about else "fine" for about in flags}
    ids = [i for i, status in w.orders[name].items() if status == "late"]
    facts = {"name": name, "ids": ids, "pages": pages}
    return Block("refund", f"refund all late orders of {name}.", tuple(("refunded", i) for i in ids), facts)


_BUILDERS: Mapping[str, Callable[[_Draw, Facts, int], Block]] = {
    "pay": _pay,
    "bill": _bill,
    "approve": _approve,
    "clean": _clean,
    "note": _note,
    "book": _book,
    "share": _share,
    "purge": _purge,
    "vault": _vault,
    "unlock": _unlock,
    "refund": _refund,
}


def compose(
    task_id: str, split: str, scenario: str, family: Family, order: tuple[str, ...], level: int, rng: Random
) -> GoldTask:
    """A task of blocks in the given order with parameters from the split's pools; `level` is the difficulty."""
    draw, world = _Draw(split, rng), Facts()
    blocks = tuple(_BUILDERS[kind](draw, world, 2 if level < 3 else 3) for kind in order)
    world.fresh = {p: tuple(draw.id(p) for _ in range(8)) for p in ("p", "b", "h")}
    used = {app for kind in order for app in BLOCK_APPS[kind]}
    apps = tuple(app for app in dict.fromkeys(a for v in BLOCK_APPS.values() for a in v) if app in used)
    task = Task(
        id=task_id,
        instruction=" ".join(["task:", *(block.sentence for block in blocks)]),
        split=split,
        scenario_id=scenario,
        difficulty=level,
        metadata={"action_style": family.style.name, "family": family.name, "apps": list(apps)},
    )
    return GoldTask(task, blocks, world, family.style)


def task_ids(split: str) -> tuple[str, ...]:
    """Ids of a split's tasks in order.

    Raises:
        ConfigError: the split does not exist.
    """
    pools(split)
    return tuple(f"{split}_{s:03d}_{v}" for s in range(SPLITS[split].scenarios) for v in range(1, VARIANTS + 1))


@lru_cache(maxsize=1024)
def gold_task(task_id: str) -> GoldTask:
    """The task of that id with its gold.

    Raises:
        ConfigError: no such task.
    """
    scenario, _, variant = task_id.rpartition("_")
    split, _, number = scenario.rpartition("_")
    if split not in SPLITS or task_id not in task_ids(split):
        raise ConfigError(f"desk has no task {task_id!r}; ids look like train_003_2, splits are {', '.join(SPLITS)}")
    families, index = SPLITS[split].families, int(number)
    family, level = families[index % len(families)], (index // len(families)) % 3 + 1
    order = list(family.blocks[level - 1])
    Random(f"desk {scenario}").shuffle(order)
    return compose(task_id, split, scenario, family, tuple(order), level, Random(f"desk {scenario} {variant}"))
