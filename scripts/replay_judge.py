"""Send a run's archived judge calls, byte for byte, to another judge and compare.

    python scripts/replay_judge.py runs/NAME --judge litellm judge.model=openai/gpt-5.4 max_usd=20

Writes `judge_replay/MODEL/calls.jsonl` (a line a call; it can be interrupted and goes on) and `summary.json`:
agreement beside that of a judge that passes everything, false passes and fails (the archived verdicts are the
reference), Cohen's κ, Gwet's AC1, recall and precision of the criteria and, with phases=attribute, of the cited steps,
over all and by window. Criteria are matched
by their texts (rapidfuzz, which takes paraphrases for different ones) and, where matcher= names one, by a model too.
Figure F9 is drawn from it. Options (key=value or --key value):
    judge, judge.KEY   the other judge
    matcher, matcher.KEY   a model that says which criteria are the same, such as
                matcher=litellm matcher.model=openai/gpt-5.4; its answers are kept in `matches-MODEL.jsonl`
    phases      of calls (default: score,merge)
    every       calls of every so many steps (default 1)
    max_calls   at most so many, spread evenly over the run
    max_usd     send no call that would pass it (of the other judge; matcher.max_usd is the matcher's)
    window      steps a window (default 10)
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draco.config.arguments import number, parse, run_main, whole
from draco.config.compose import instantiate, judge_config
from draco.core.errors import ConfigError
from draco.core.files import write_json
from draco.judge.client import JudgeClient
from draco.judge.prompts import PHASES
from draco.study.judge_replay import load_results, replay_calls, replayable, summarise_replay
from draco.study.matching import load_matches, match_criteria
from draco.study.runs import open_run

OPTIONS = {"judge", "matcher", "phases", "every", "max_calls", "max_usd", "window"}


def main(arguments: list[str]) -> None:
    """Replay one run's calls and print the agreement."""
    words, given = parse(arguments, OPTIONS, ("judge.", "matcher."))
    if len(words) != 1:
        raise ConfigError("expected one run folder: python scripts/replay_judge.py runs/NAME --judge …")
    every, window = whole(given, "every", 1, least=1), whole(given, "window", 10, least=1)
    limit = whole(given, "max_calls", 0)  # 0: all
    max_usd = number(given, "max_usd", 1.0) if "max_usd" in given else None
    run = open_run(Path(words[0]))
    client = instantiate(judge_config(given, run.config))
    asked = {k.replace("matcher", "judge", 1): v for k, v in given.items() if k.split(".")[0] == "matcher"}
    matcher = instantiate(judge_config(asked, {})) if asked else None
    phases = given.get("phases", "score,merge").split(",")
    if wrong := [p for p in phases if p not in PHASES]:
        raise ConfigError(f"phases={','.join(wrong)}: expected {', '.join(PHASES)}")
    calls = [c for c in replayable(run.path, run.steps[::every]) if c["phase"] in phases]
    if not calls:
        raise ConfigError(f"{run.path}: no archived call of {', '.join(phases)} with a usable reply")
    calls = [calls[i * len(calls) // limit] for i in range(limit)] if 0 < limit < len(calls) else calls
    folder = run.path / "judge_replay" / _named(client.model)

    async def send() -> dict[str, int]:
        try:
            return await replay_calls(calls, client, folder / "calls.jsonl", max_usd=max_usd)
        finally:
            await client.aclose()

    counts = asyncio.run(send())
    results = load_results(folder / "calls.jsonl")
    if not results:
        raise ConfigError(f"no call of {counts['sent']} got a usable reply; see {folder / 'calls.jsonl'}")
    matches: dict[str, int] = {}
    if matcher is not None:
        file = folder / f"matches-{_named(matcher.model)}.jsonl"
        matched = asyncio.run(_match(results.values(), matcher, file))
        matches = load_matches(file)
        print(f"matcher: asked {matched['asked']}, kept {matched['kept']}, failed {matched['failed']} (in no rate)")
    summary = summarise_replay(results.values(), client.model, window, matches)
    summary["counts"] = counts
    summary["matcher"] = None if matcher is None else matcher.model
    write_json(folder / "summary.json", summary)
    show(summary, Console())
    print(f"sent {counts['sent']}, kept {counts['kept']}, failed {counts['failed']}, left for want of money "
          f"{counts['left']}\nsummary: {folder / 'summary.json'}")  # fmt: skip


def _named(model: str) -> str:
    return re.sub(r"[^\w.-]+", "_", model)


async def _match(results: Iterable[Mapping[str, Any]], matcher: JudgeClient, file: Path) -> dict[str, int]:
    try:
        return await match_criteria(results, matcher, file)
    finally:
        await matcher.aclose()


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
        table = Table(title=title, box=box.SIMPLE, padding=(0, 0, 0, 1))
        for heading in ("step", *(headings[k] for k in names)):
            table.add_column(heading, justify="right")
        for row in rows:
            label = "all" if row["first_step"] is None else f"{row['first_step'] + 1}–"
            cells = (row[k] for k in names)
            table.add_row(label, *("–" if v is None else f"{v:.3f}" if isinstance(v, float) else str(v) for v in cells))
        console.print(table)


if __name__ == "__main__":
    run_main(main)
