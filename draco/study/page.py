"""report.html: one file a run that holds everything: summary, curves and the credit viewer.

The page opens from the disk and makes no network request (its content security policy forbids any). Each group of the
archive is one compressed, base64-encoded block; the page decodes a block when its group is shown. Texts of the policy,
the tools and the judge are data in these blocks and reach the page as text nodes only.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from itertools import takewhile
from typing import Any

from draco.core.files import write_text
from draco.run.archive import read_calls
from draco.run.numbers import StepNumbers, inert_share, total
from draco.study.judgements import rows_by_group
from draco.study.pieces import TokenPieces
from draco.study.runs import Run

__all__ = ["render_page", "write_page"]

_TRAINED = "success on training tasks"
_INERT = "inert: verdicts unanimous"
#: metrics that the page draws first, in this order; the others on demand
CURVES = (
    "reward/mean", "rubric/pass_rate", "credit/inert_verdicts", "group/zero_std", "rollout/turns", "update/loss",
    "update/kl", "update/entropy", "update/grad_norm", "judge/cost_usd", "eval/tgc", "eval/sgc",
)  # fmt: skip


def write_page(run: Run, numbers: Sequence[StepNumbers], *, max_mb: float = 64.0, max_text: int = 4000) -> int:
    """Write report.html into the run folder.

    Args:
        run: the run.
        numbers: of its archived steps.
        max_mb: size limit; above it steps are thinned out evenly, and the page says so.
        max_text: characters of one action, observation or reply; what is cut off is counted there.

    Returns:
        bytes written.
    """
    content = render_page(run, numbers, max_mb=max_mb, max_text=max_text)
    write_text(run.path / "report.html", content)
    return len(content.encode())


def render_page(run: Run, numbers: Sequence[StepNumbers], *, max_mb: float, max_text: int) -> str:
    """The page as text; see `write_page`."""
    pieces = TokenPieces(str(run.config.get("policy", {}).get("path", "")))
    blocks: dict[int, list[tuple[dict[str, Any], str]]] = {}
    for step in run.steps:
        blocks[step] = [(head, _pack(block)) for head, block in group_blocks(run, step, pieces, max_text)]
    notes = [pieces.gap] if pieces.gap else []
    size = sum(len(packed) for groups in blocks.values() for _, packed in groups)
    stride = max(1, -int(-size // (max_mb * 1e6)))
    if stride > 1:
        kept = sorted({*run.steps[::stride], run.steps[-1]})
        notes.append(f"{len(kept)} of {len(run.steps)} steps are in this page, evenly spaced (max_mb={max_mb:g}).")
        blocks = {s: blocks[s] for s in kept}
    index = {
        "name": run.path.name,
        "setting": run.setting,
        "unit": "training step" if run.config.get("steps") else "batch",
        "tiles": _tiles(run) or _counted_tiles(numbers),
        "summary": _summary(run),
        "evaluations": _evaluations(run),
        "curves": _curves(run, numbers),
        "config": json.dumps(run.config, indent=1, ensure_ascii=False),
        "notes": notes,
        "steps": [{"step": s, "groups": [head for head, _ in groups]} for s, groups in blocks.items()],
    }
    scripts = [f'<script type="text/plain" id="index">{_pack(index)}</script>']
    scripts += [
        f'<script type="text/plain" id="g{step}-{i}">{packed}</script>'
        for step, groups in blocks.items()
        for i, (_, packed) in enumerate(groups)
    ]
    assets = files("draco.study") / "assets"
    page = (assets / "page.html").read_text(encoding="utf-8")
    for mark, text in (
        ("{{title}}", html.escape(f"{run.path.name} · {run.setting}")),
        ("{{style}}", (assets / "page.css").read_text(encoding="utf-8")),
        ("{{script}}", (assets / "page.js").read_text(encoding="utf-8")),
        ("{{data}}", "\n".join(scripts)),  # last: base64 holds no marks
    ):
        page = page.replace(mark, text, 1)
    return page


def _pack(content: Any) -> str:
    text = json.dumps(content, ensure_ascii=False, separators=(",", ":"), allow_nan=False, default=float)
    # mtime 0: the same archive gives the same page
    return base64.b64encode(gzip.compress(text.encode(errors="surrogatepass"), 6, mtime=0)).decode()


def _summary(run: Run) -> list[tuple[str, str]]:
    """Lines of summary.json that are one value; null is shown as "not measured"."""
    shown = {k: v for k, v in run.summary.items() if isinstance(v, str | int | float | None)}
    return [
        (k, "not measured" if v is None else f"{v:.4g}" if isinstance(v, float) else str(v)) for k, v in shown.items()
    ]


def _tiles(run: Run) -> list[tuple[str, str]]:
    """The few figures of a run that a reader wants first: (value, name); what was not measured is left out."""
    known = {k: v for k, v in run.summary.items() if isinstance(v, int | float)}

    def share(key: str) -> str:
        return f"{100 * known[key]:.1f}%" if key in known else "–"

    tiles = [
        (f"{share(f'base_{key}')} → {share(f'final_{key}')}", f"{name}, before → after")
        for name, key in (("tasks solved (TGC)", "success"), ("scenarios solved (SGC)", "sgc"))
        if f"final_{key}" in known
    ]
    for name, key in (("rubric passed, mean over training", "rubric_pass_rate"), (_INERT, "inert_share")):
        tiles += [(share(key), name)] if key in known else []
    if "judge_calls" in known:
        cost = run.summary.get("judge_cost_usd")
        bill = "price unknown" if cost is None else "free" if cost == 0 else f"${cost:.2f}"
        tiles.append((f"{known['judge_calls']:,}", f"judge calls, {bill}"))
    if "steps" in known:
        tiles.append((f"{known['steps']:,}", "training steps"))
    return tiles


def _counted_tiles(numbers: Sequence[StepNumbers]) -> list[tuple[str, str]]:
    """The same for trajectories that were judged without a run: counted from the archive."""
    judged, rollouts = sum(n.members for n in numbers), sum(n.rollouts for n in numbers)
    shares = (("rubric passed", total(n.verdicts for n in numbers).pass_rate), (_INERT, inert_share(numbers)))
    tiles = [(f"{judged:,} of {rollouts:,}", "trajectories judged")] if rollouts else []
    return tiles + [(f"{100 * share:.1f}%", name) for name, share in shares if share is not None]


def _evaluations(run: Run) -> list[dict[str, Any]]:
    keys = ("tgc", "sgc", "turns", "cost_usd", "quarantined", "unevaluated")
    return [
        {"split": e.split, "checkpoint": e.checkpoint, "n": e.n, **{k: e.figure(k) for k in keys}}
        for e in run.evaluations
    ]


def _curves(run: Run, numbers: Sequence[StepNumbers]) -> list[dict[str, Any]]:
    """Every metric as {name, x, y, first}, and success on training tasks from train_success.csv."""
    points: dict[str, list[tuple[float, float]]] = {}
    for name in sorted({k for row in run.metrics for k in row if k != "step" and not k.startswith("summary/")}):
        points[name] = [(row["step"], row[name]) for row in run.metrics if name in row and math.isfinite(row[name])]
    if not points and numbers:  # judged from a file: there are no metrics, but the archive has verdicts
        rates = [(s.step + 1, s.verdicts.pass_rate) for s in numbers]
        points["rubric/pass_rate"] = [(x, y) for x, y in rates if y is not None]
    if run.train_success:
        known = {s: counts for s, counts in run.train_success.items() if counts[1]}
        points[_TRAINED] = [(s + 1, good / n) for s, (good, n) in known.items()]
    order = {name: i for i, name in enumerate((*CURVES, _TRAINED))}
    curves = [
        {"name": name, "x": [x for x, _ in found], "y": [y for _, y in found], "first": name in order}
        for name, found in points.items()
    ]
    return sorted(curves, key=lambda c: (min(order.get(c["name"], 99), len(CURVES)), c["name"]))


def group_blocks(
    run: Run, step: int, pieces: TokenPieces, max_text: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the page shows of every group of a step: (line for the picker, block)."""
    groups = rows_by_group(run.path, step, "trajectories", "criteria", "verdicts", "credits", "failures")
    try:
        calls = read_calls(run.path, [step])
    except FileNotFoundError:
        calls = []
    # An archive without trajectories still has credits.
    shown = {g: rows for g, rows in groups.items() if rows["trajectories"]} or {
        g: rows for g, rows in groups.items() if rows["credits"]
    }
    return [_group(g, rows, calls, pieces, _cutter(max_text)) for g, rows in shown.items()]


def _cutter(most: int) -> Callable[[str | None], str]:
    def cut(text: str | None) -> str:
        text = text or ""
        left = len(text) - most
        return text if left <= 0 else f"{text[:most]}\n[{left} more characters are in the archive]"

    return cut


def _group(
    group: int,
    rows: Mapping[str, list[dict[str, Any]]],
    calls: Sequence[Mapping[str, Any]],
    pieces: TokenPieces,
    cut: Callable[[str | None], str],
) -> tuple[dict[str, Any], dict[str, Any]]:
    verdicts = {(v["criterion"], v["sample"]): v for v in rows["verdicts"]}
    rollouts = _rollouts(rows, cut)
    first = rows["trajectories"][0] if rows["trajectories"] else {}
    opening = takewhile(lambda m: m["role"] != "assistant", first.get("messages", ()))
    block = {
        "task": first.get("task_id", ""),
        "opening": [[m["role"], cut(m["content"])] for m in opening],
        "rollouts": rollouts,
        "pieces": pieces.of({i for r in rollouts for s in r["steps"] for i in s["tok"]}),
        "criteria": [
            {"title": c["title"], "text": c["description"], "how": c["evaluator_instruction"], "source": c["source"],
             "out": c["dropped"], "evidence": c["evidence"]}
            for c in rows["criteria"]
        ],
        "verdicts": [
            [_verdict(verdicts.get((c["criterion"], r["sample"])), cut) for r in rollouts] for c in rows["criteria"]
        ],
        "calls": [
            {"phase": c["phase"], "sample": c["sample"], "attempt": c["attempt"], "outcome": c["outcome"],
             "error": cut(c["error"]), "model": c["served_model"] or c["model"], "in": c["tokens_in"],
             "out": c["tokens_out"], "cached": c["tokens_cached"], "usd": c["cost_usd"],
             "s": round(c["latency_s"], 3), "reply": cut(c["reply"])}
            for c in calls if c["task_id"] == first.get("task_id")
        ],
    }  # fmt: skip
    rewards = [r["r"] for r in rollouts if r["r"] is not None]
    head = {
        "task": first.get("task_id", ""), "group": group, "g": len(rollouts), "judged": len(rewards),
        "mean": sum(rewards) / len(rewards) if rewards else None, "flat": any(r["flat"] for r in rollouts),
        "moved": sum(r["reason"] == "credited" for r in rollouts),
    }  # fmt: skip
    return head, block


def _rollouts(rows: Mapping[str, list[dict[str, Any]]], cut: Callable[[str | None], str]) -> list[dict[str, Any]]:
    """Rollouts of a group with their credit, step by step."""
    credits = {r["sample"]: r for r in rows["credits"]}
    failures = {r["sample"]: f"{r['phase']}: {r['reason']}" for r in rows["failures"]}
    dropped = {r["criterion"]: r["dropped"] for r in rows["criteria"]}
    rollouts = []
    for t in rows["trajectories"]:
        credit = credits.get(t["sample"])
        counts = _counts([v for v in rows["verdicts"] if v["sample"] == t["sample"]], dropped, len(t["steps"]))
        steps = [
            {
                "act": cut(s["action"]), "obs": cut(s["observation"]), "turn": s["turn"], "n": s["stop"] - s["start"],
                "a": credit["step_advantages"][j] if credit else None,
                "q": credit["qualities"][j] if credit and credit["qualities"] else None,
                "pf": counts[j],
                "tok": t["token_ids"][s["start"] : s["stop"]],
                "lp": [round(x, 3) for x in t["logprobs"][s["start"] : s["stop"]]],
            }
            for j, s in enumerate(t["steps"])
        ]  # fmt: skip
        rollouts.append({
            "sample": t["sample"], "end": t["termination"], "error": cut(t["error"]), "steps": steps,
            "r": credit["reward"] if credit else None, "A": credit["advantage"] if credit else None,
            "reason": credit["reason"] if credit else "", "flat": bool(credit and credit["zero_std"]),
            "lost": failures.get(t["sample"], ""),
        })  # fmt: skip
    return rollouts


def _verdict(v: Mapping[str, Any] | None, cut: Callable[[str | None], str]) -> list[Any] | None:
    if v is None:
        return None
    return [v["score"], v["override"], v["cited_steps"] or [], cut(v["justification"]), cut(v["evidence"]),
            cut(v["explanation"])]  # fmt: skip


def _counts(verdicts: Sequence[Mapping[str, Any]], dropped: Mapping[int, bool], steps: int) -> list[list[int]]:
    """[p_j, f_j] of every step: surviving verdicts that cite it and that the attribution call did not override."""
    counts = [[0, 0] for _ in range(steps)]
    for v in verdicts:
        if dropped.get(v["criterion"], True) or not v["score"] or v["override"] is not None:
            continue
        for j in set(v["cited_steps"] or ()):
            if 1 <= j <= steps:
                counts[j - 1][v["score"] < 0] += 1
    return counts
