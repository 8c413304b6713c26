"""Send a run's archived judge calls, byte for byte, to another judge and compare.

    python scripts/replay_judge.py runs/NAME --judge litellm judge.model=openai/gpt-5.4 max_usd=20

Writes `judge_replay/MODEL/calls.jsonl` (a line a call; it can be interrupted and goes on) and `summary.json`:
agreement beside that of a judge that passes everything, false passes and fails (the archived verdicts are the
reference), Cohen's κ, Gwet's AC1, recall and precision of the criteria (matched by rapidfuzz), over all and by window.
Figure F9 is drawn from it. Options (key=value or --key value):
    judge, judge.KEY   the other judge
    phases      of calls (default: score,merge)
    every       calls of every so many steps (default 1)
    max_calls   at most so many, spread evenly over the run
    max_usd     stop when so much is spent
    window      steps a window (default 10)
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draco.analysis.judge_replay import load_results, replay_calls, replayable, summarise_replay
from draco.analysis.judging import judge_config
from draco.analysis.runs import open_run
from draco.arguments import parse
from draco.errors import ConfigError, DracoError
from draco.judge.prompts import PHASES
from draco.run import instantiate
from draco.summary import write_json

OPTIONS = {"judge", "phases", "every", "max_calls", "max_usd", "window"}


def main(arguments: list[str]) -> None:
    """Replay one run's calls and print the agreement."""
    words, given = parse(arguments, OPTIONS, ("judge.",))
    if len(words) != 1:
        raise ConfigError("expected one run folder: python scripts/replay_judge.py runs/NAME --judge …")
    run = open_run(Path(words[0]))
    client = instantiate(judge_config(given, run.config))
    phases = given.get("phases", "score,merge").split(",")
    if wrong := [p for p in phases if p not in PHASES]:
        raise ConfigError(f"phases={','.join(wrong)}: expected {', '.join(PHASES)}")
    calls = [c for c in replayable(run.path, run.steps[:: int(given.get("every", 1))]) if c["phase"] in phases]
    if not calls:
        raise ConfigError(f"{run.path}: no archived call of {', '.join(phases)} with a usable reply")
    limit = int(given.get("max_calls", len(calls)))
    calls = [calls[i * len(calls) // limit] for i in range(limit)] if 0 < limit < len(calls) else calls
    folder = run.path / "judge_replay" / re.sub(r"[^\w.-]+", "_", client.model)
    max_usd = float(given["max_usd"]) if "max_usd" in given else None

    async def send() -> dict[str, int]:
        try:
            return await replay_calls(calls, client, folder / "calls.jsonl", max_usd=max_usd)
        finally:
            await client.aclose()

    counts = asyncio.run(send())
    results = load_results(folder / "calls.jsonl")
    if not results:
        raise ConfigError(f"no call of {counts['sent']} got a usable reply; see {folder / 'calls.jsonl'}")
    summary = summarise_replay(results.values(), client.model, int(given.get("window", 10)))
    summary["counts"] = counts
    write_json(folder / "summary.json", summary)
    show(summary, Console())
    print(f"sent {counts['sent']}, kept {counts['kept']}, failed {counts['failed']}, left for want of money "
          f"{counts['left']}\nsummary: {folder / 'summary.json'}")  # fmt: skip


def show(summary: dict[str, Any], console: Console) -> None:
    """A row a window."""
    table = Table(title=f"{summary['judge']} against {summary['reference']}")
    columns = (
        "calls",
        "pairs",
        "agreement",
        "all_pass_baseline",
        "false_pass",
        "false_fail",
        "kappa",
        "ac1",
        "recall",
        "precision",
    )
    for name in ("steps", *columns):
        table.add_column(name.replace("_", " "), justify="right")
    for row in [*summary["windows"], {"first_step": None, **summary["all"]}]:
        label = "all" if row["first_step"] is None else f"from {row['first_step'] + 1}"
        table.add_row(
            label,
            *(
                "–" if row[c] is None else f"{row[c]:.3f}" if isinstance(row[c], float) else str(row[c])
                for c in columns
            ),
        )
    console.print(table)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except DracoError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
