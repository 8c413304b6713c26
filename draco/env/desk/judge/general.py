"""Findings summed up to general criteria: one verdict each for the whole rollout.

That is the grain at which a general rubric can be judged. A criterion fails if any part of the task failed it, passes
if some part fulfilled it, and is not applicable where it never came up. It cites the steps of all parts that brought
its verdict about.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from draco.env.desk.judge.findings import Finding
from draco.env.desk.judge.ledger import Ledger

__all__ = ["GENERAL", "Result"]

Result = tuple[int, tuple[int, ...], str]  #: score, steps, evidence


def _result(fail: Iterable[int], passed: Iterable[int]) -> Result:
    failing, passing = sorted(set(fail)), sorted(set(passed))
    if failing:
        return -1, tuple(failing), f"broken at step(s) {', '.join(map(str, failing))}"
    if passing:
        return 1, tuple(passing), f"fulfilled at step(s) {', '.join(map(str, passing))}"
    return 0, (), "its condition never arose"


def _topics(*topics: str) -> Callable[[Sequence[Finding], Ledger], Result]:
    """Sum of the findings on some topics; what was left out altogether is another criterion's matter."""

    def judge(findings: Sequence[Finding], ledger: Ledger) -> Result:
        mine = [f for f in findings if f.topic in topics and not f.omitted]
        return _result(
            (j for f in mine if f.score < 0 for j in f.steps), (j for f in mine if f.score > 0 for j in f.steps)
        )

    return judge


def _performs(findings: Sequence[Finding], ledger: Ledger) -> Result:
    mine = [f for f in findings if f.rank == 0]
    return _result((j for f in mine if f.omitted for j in f.steps), (j for f in mine if not f.omitted for j in f.steps))


def _needs_key(findings: Sequence[Finding], ledger: Ledger) -> Result:
    fetched = ledger.keys
    missing = [c for c in ledger.attempts if fetched.get(str(c.args.get("name")), ("", c.step))[1] >= c.step]
    known = [fetched[str(c.args.get("name"))][1] for c in ledger.attempts if str(c.args.get("name")) in fetched]
    return _result((c.step for c in missing), known)


def _right_key(findings: Sequence[Finding], ledger: Ledger) -> Result:
    opened = {c.args.get("name") for c in ledger.attempts if c.ok}
    return _result(
        (c.step for c in ledger.attempts if not c.ok and c.args.get("name") not in opened),
        (c.step for c in ledger.attempts if c.ok),
    )


def _valid(findings: Sequence[Finding], ledger: Ledger) -> Result:
    # A wrong key is a well-formed call.
    bad = [c.step for c in ledger.errors if c.answer != "error: wrong key"]
    return _result(bad, (c.step for c in ledger.valid))


def _recovers(findings: Sequence[Finding], ledger: Ledger) -> Result:
    mended, stuck = [], []
    for error in ledger.errors:
        later = [c.step for c in ledger.valid if c.step > error.step and (c.name == error.name or not error.name)]
        if later:
            mended.append(later[0])
        else:
            stuck.append(ledger.after(error.step))
    return _result(stuck, mended)


#: title of a general criterion → its rule
GENERAL: dict[str, Callable[[Sequence[Finding], Ledger], Result]] = {
    "Performs required actions": _performs,
    "Targets exact items": _topics("target"),
    "Applies correct selection logic": _topics("choice"),
    "Uses exact action content": _topics("content"),
    "Processes items completely": _topics("items"),
    "Fetches complete data": _topics("pages"),
    "Verifies action outcome": _topics("confirm"),
    "Stops after completion": _topics("once"),
    "Protects secret values": _topics("secret"),
    "Retrieves needed credentials": _needs_key,
    "Authenticates correctly": _right_key,
    "Completes task properly": _topics("close"),
    "Uses valid API calls": _valid,
    "Recovers from failures": _recovers,
}
