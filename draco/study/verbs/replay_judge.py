"""`draco replay RUN judge=…`: a run's archived judge calls, sent byte for byte to another judge and compared."""

from __future__ import annotations

import asyncio
import re
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draco.config.arguments import option, passed_on, words
from draco.config.options import Count, Index, Positive
from draco.core.errors import ConfigError
from draco.core.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from draco.study.runs import Run

__all__ = ["Options", "replay_judge", "show"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `draco replay`: the runs; everything else is for another judge."""

    run: tuple[Path, ...] = words("run folders; with judge= one")
    judge: str | None = option(None, "send the archived calls to this judge", shown="none: recompute from the archive")
    matcher: str | None = option(
        None, "a model that says which criteria are the same", shown="their texts are compared"
    )
    phases: tuple[str, ...] = option(("score", "merge"), "kinds of calls that are sent")
    every: Count = option(1, "calls of every so many steps")
    max_calls: Index = option(0, "at most so many, spread evenly over the run", shown="0, all")
    max_usd: Positive | None = option(None, "send no call that would pass it", shown="no limit")
    window: Count = option(10, "steps a window of the summary")
    passed: tuple[str, ...] = passed_on("options of these judges", "judge.", "matcher.")


def replay_judge(given: Options) -> None:
    """Replay one run's calls and print the agreement."""
    if len(given.run) != 1:
        raise ConfigError(f"{len(given.run)} run folders are given; expected one run folder, whose calls are sent")
    from rich.console import Console

    from draco.config.compose import instantiate, judge_config
    from draco.core.files import write_json
    from draco.study.judge_replay import load_results, replay_calls, summarise_replay
    from draco.study.matching import load_matches, match_criteria
    from draco.study.runs import open_run

    run = open_run(given.run[0])
    client = instantiate(judge_config(_of("judge", given), run.config))
    asked = {k.replace("matcher", "judge", 1): v for k, v in _of("matcher", given).items()}
    matcher = instantiate(judge_config(asked, {})) if asked else None
    calls = _chosen(run, given)
    folder = run.path / "judge_replay" / _named(client.model)

    async def send() -> dict[str, int]:
        async with aclosing(client):
            return await replay_calls(calls, client, folder / "calls.jsonl", max_usd=given.max_usd)

    counts = asyncio.run(send())
    results = load_results(folder / "calls.jsonl")
    if not results:
        raise ConfigError(f"no call of {counts['sent']} got a usable reply; see {folder / 'calls.jsonl'}")
    matches: dict[str, int] = {}
    if matcher is not None:
        file = folder / f"matches-{_named(matcher.model)}.jsonl"

        async def match() -> dict[str, int]:
            async with aclosing(matcher):
                return await match_criteria(results.values(), matcher, file)

        matched = asyncio.run(match())
        matches = load_matches(file)
        print(f"matcher: asked {matched['asked']}, kept {matched['kept']}, failed {matched['failed']} (in no rate)")
    summary = summarise_replay(results.values(), client.model, given.window, matches)
    summary["counts"] = counts
    summary["matcher"] = None if matcher is None else matcher.model
    write_json(folder / "summary.json", summary)
    show(summary, Console())
    print(f"sent {counts['sent']}, kept {counts['kept']}, failed {counts['failed']}, left for want of money "
          f"{counts['left']}\nsummary: {folder / 'summary.json'}")  # fmt: skip


def _of(name: str, given: Options) -> dict[str, str]:
    """`judge` and `judge.KEY`, or those of the matcher."""
    choice = getattr(given, name)
    passed = (p.partition("=") for p in given.passed if p.startswith(f"{name}."))
    return {**({name: choice} if choice else {}), **{key: value for key, _, value in passed}}


def _chosen(run: Run, given: Options) -> list[dict[str, Any]]:
    """The archived calls that are sent.

    Raises:
        ConfigError: an unknown phase, or no such call.
    """
    from draco.judge.prompts import PHASES
    from draco.study.judge_replay import replayable

    if wrong := [p for p in given.phases if p not in PHASES]:
        raise ConfigError(f"phases={','.join(wrong)}: expected {', '.join(PHASES)}")
    calls = [c for c in replayable(run.path, run.steps[:: given.every]) if c["phase"] in given.phases]
    if not calls:
        raise ConfigError(f"{run.path}: no archived call of {', '.join(given.phases)} with a usable reply")
    limit = given.max_calls
    return [calls[i * len(calls) // limit] for i in range(limit)] if 0 < limit < len(calls) else calls


def _named(model: str) -> str:
    return re.sub(r"[^\w.-]+", "_", model)


#: tables that are printed: title, and heading by figure
_VERDICTS = {
    "calls": "calls", "pairs": "pairs", "agreement": "agree", "all_pass_baseline": "all pass",
    "false_pass": "false pass", "false_fail": "false fail", "kappa": "κ", "ac1": "AC1",
}  # fmt: skip
_SETS = {
    "calls": "calls", "recall": "criteria recall", "precision": "prec.", "model_recall": "by model recall",
    "model_precision": "prec.", "cited_recall": "cited steps recall", "cited_precision": "prec.",
}  # fmt: skip


def show(summary: dict[str, Any], console: Console) -> None:
    """A row a window: verdicts, then criteria and cited steps, each where it was asked for."""
    rows = [*summary["windows"], {"first_step": None, **summary["all"]}]
    for what, headings in (("verdicts", _VERDICTS), ("criteria and steps", _SETS)):
        names = [k for k in headings if any(row[k] is not None for row in rows)]
        if set(names) <= {"calls", "pairs"}:
            continue
        title = f"{summary['judge']} against {summary['reference']}: {what}"
        columns = ("step", *(headings[k] for k in names))
        labels = ("all" if row["first_step"] is None else f"{row['first_step'] + 1}–" for row in rows)
        cells = tuple((label, *(row[k] for k in names)) for label, row in zip(labels, rows, strict=True))
        counts = {"calls": "{}", "pairs": "{}"}
        console.print(Table("replay", title, columns, cells, "{:.3f}", forms=counts).terminal())
