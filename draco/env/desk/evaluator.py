"""Success by state check, and which steps caused a failure. Evaluation only: nothing on the training path imports it.

The causal step of a mistake is where the agent left the right procedure (TEXTS.md beside this file, 4): the wrong call
itself, or the step in which a missing call was due.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Literal

from draco.config.options import checked
from draco.core.types import Task
from draco.env.base import Evaluator, Outcome
from draco.env.desk.scenarios import Block, GoldTask, gold_task
from draco.env.desk.world import PAGE, Effect, restates

__all__ = ["FAULTS", "DeskEvaluator"]

FAULTS = (
    "skips_pages", "restates_secret", "wrong_recipient", "wrong_amount", "duplicates", "forgets_confirmation",
    "stops_early",
)  # fmt: skip
#: effect kind → the fault that a difference in each of its fields means
ROLES: Mapping[str, tuple[str, ...]] = {
    "paid": ("wrong_recipient", "wrong_amount"),
    "approved": ("wrong_recipient",),
    "deleted mail": ("wrong_recipient",),
    "deleted file": ("wrong_recipient",),
    "noted": ("wrong_amount",),
    "mailed": ("wrong_recipient", "wrong_text"),
    "booked": ("wrong_recipient", "wrong_recipient"),
    "shared": ("wrong_recipient", "wrong_recipient"),
    "opened": ("wrong_recipient",),
    "unlocked": ("wrong_recipient",),
    "refunded": ("wrong_recipient",),
}
#: block kind → the list whose pages it needs
LISTS: Mapping[str, str] = {
    "approve": "pay.requests",
    "clean": "mail.list",
    "purge": "files.list",
    "refund": "orders.list",
}
#: block kind → the calls that handle an entry of its list
HANDLERS: Mapping[str, tuple[str, ...]] = {
    "approve": ("pay.approve",),
    "clean": ("mail.delete",),
    "purge": ("files.delete",),
    "refund": ("orders.refund", "orders.confirm"),
}


@checked("env")
class DeskEvaluator(Evaluator):
    """Reads the record of a desk episode; the gold is built again from the task's id.

    Args:
        step: what `Outcome.causal_steps` counts: `turn`, or `tool_call` (`code_block` is the same) for every call.
    """

    def __init__(self, step: Literal["turn", "tool_call", "code_block"] = "turn") -> None:
        self._by_turn = step == "turn"

    def evaluate(self, task: Task, end_state: str) -> Outcome:
        """Success, faults and causal steps; `detail["steps"]` has the steps of each fault."""
        return self.evaluate_gold(gold_task(task.id), end_state)

    def evaluate_gold(self, gold: GoldTask, end_state: str) -> Outcome:
        """The same for a given gold task, which may belong to no split."""
        try:
            record = json.loads(end_state)
            if record["task"] != gold.task.id:
                raise ValueError(f"the end state is of task {record['task']}")
            case = _Case(gold, record)
        except (KeyError, TypeError, ValueError) as error:
            return Outcome(success=None, error=f"unreadable end state: {error!r}")
        wanted = sorted(effect for block in gold.blocks for effect in block.effects)
        done = sorted(effect for effect, _ in case.effects)
        success = done == wanted and not case.held and case.status == "done"
        case.run()
        steps = {
            fault: sorted({case.turns[at] if self._by_turn and case.turns else at + 1 for at in calls})
            for fault, calls in sorted(case.faults.items())
        }
        causal = tuple(sorted({step for some in steps.values() for step in some}))
        return Outcome(success, causal, tuple(steps), detail={"steps": steps})


class _Case:
    """One record under examination; `faults` maps names to 0-based numbers of calls."""

    def __init__(self, gold: GoldTask, record: Mapping[str, Any]) -> None:
        self.gold = gold
        self.calls: list[dict[str, Any]] = record["calls"]
        self.turns: list[int] = [call["turn"] for call in self.calls]
        self.effects: list[tuple[Effect, int]] = [(tuple(effect), at) for effect, at in record["effects"]]
        self.held: list[tuple[Effect, int]] = [(tuple(effect), at) for effect, at in record["held"]]
        self.status: str = record["status"]
        self.faults: dict[str, set[int]] = defaultdict(set)
        self.missing = [(effect, block) for block in gold.blocks for effect in block.effects]

    def run(self) -> None:
        self._leaks()
        for _, at in self.held:
            self.faults["forgets_confirmation"].add(self._later(at))
        # What is held and was never confirmed counts as done here: the missing confirmation is its only fault.
        self._match(sorted([*self.effects, *self.held], key=lambda made: made[1]))
        for effect, block in self.missing:
            self._omission(effect, block)
        if self.status != "done":
            self.faults["gave_up" if self.status == "fail" else "unfinished"].add(max(len(self.calls) - 1, 0))

    def _leaks(self) -> None:
        keys = self.gold.world.keys.values()
        for effect, at in self.effects:
            if effect[0] in ("mailed", "noted") and restates(effect[-1], keys):
                self.faults["restates_secret"].add(at)

    def _match(self, made: list[tuple[Effect, int]]) -> None:
        """Take what was asked for off the list of what is missing, and name the fault of everything else."""
        asked = {effect for block in self.gold.blocks for effect in block.effects}
        wrong = []
        for effect, at in made:
            hit = next((lack for lack in self.missing if lack[0] == effect), None)
            if hit is not None:
                self.missing.remove(hit)
            elif effect in asked:
                self.faults["duplicates"].add(at)
            else:
                wrong.append((effect, at))
        for effect, at in wrong:
            self._wrong(effect, at, asked)

    def _wrong(self, effect: Effect, at: int, asked: set[Effect]) -> None:
        def alike(other: Effect) -> int:
            return sum(a == b for a, b in zip(effect, other, strict=True))

        lacks = [lack for lack in self.missing if lack[0][0] == effect[0]]
        if lacks:
            meant = max(lacks, key=lambda lack: alike(lack[0]))
            self.missing.remove(meant)
            other = meant[0]
        else:
            kin = sorted(e for e in asked if e[0] == effect[0])
            if not kin:
                self.faults["extra_action"].add(at)
                return
            other = max(kin, key=alike)
        for role, a, b in zip(ROLES[effect[0]], effect[1:], other[1:], strict=True):
            # The only fault of a text with a key in it is the leak.
            if a != b and not (effect[0] in ("mailed", "noted") and at in self.faults.get("restates_secret", ())):
                self.faults[role].add(at)

    def _omission(self, effect: Effect, block: Block) -> None:
        listing = LISTS.get(block.kind)
        pages = self._fetched(listing, block) if listing else {}
        if pages and self._page_of(block, effect[-1]) not in pages:
            after = self._later(max(pages.values()), HANDLERS[block.kind])
            if after > max(pages.values()):
                self.faults["skips_pages"].add(after)
        elif self.status == "done":
            worked = pages and any(made in block.effects for made, _ in self.effects)
            self.faults["misses_item" if worked else "stops_early"].add(len(self.calls) - 1)

    def _fetched(self, listing: str, block: Block) -> dict[int, int]:
        """Pages of the block's list that were shown → the call that did."""
        return {
            call["args"]["page"]: at
            for at, call in enumerate(self.calls)
            if call["api"] == listing
            and call["args"].get("name", block.facts.get("name")) == block.facts.get("name")
            and not call["observation"].startswith(("error: ", "none"))
        }

    def _page_of(self, block: Block, item: str) -> int:
        world = self.gold.world
        listed: Mapping[str, tuple[str, ...]] = {
            "approve": tuple(world.requests),
            "clean": tuple(world.mails),
            "purge": tuple(world.owned),
            "refund": tuple(world.orders.get(block.facts.get("name", ""), {})),
        }
        return listed[block.kind].index(item) // PAGE + 1

    def _later(self, at: int, skipped: tuple[str, ...] = ()) -> int:
        """First call of a later turn that is none of `skipped`, or the last call there is."""
        later = (i for i in range(at + 1, len(self.calls)) if self.turns[i] > self.turns[at])
        return next((i for i in later if self.calls[i]["api"] not in skipped), len(self.calls) - 1)
