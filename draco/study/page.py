"""report.html: one file a run, with everything in it: summary, curves and the credit viewer.

The page opens from the disk and asks no network for anything (its content security policy forbids it). The archive's
groups lie in it as one compressed, base64-encoded block each; the page decodes the block of the group that is looked
at. Texts of the policy, of tools and of the judge are data in these blocks and reach the page as text nodes only.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from draco.core import files as durable
from draco.run.archive import read_calls, read_table
from draco.run.numbers import StepNumbers, total
from draco.study.pieces import TokenPieces
from draco.study.runs import Run

__all__ = ["render_page", "write_page"]

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
    durable.write_text(run.path / "report.html", content)
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
    """Lines of summary.json that are one value; null is said, not left out."""
    shown = []
    for key, value in run.summary.items():
        if isinstance(value, str | int | float) or value is None:
            shown.append(
                (key, "not measured" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
            )
    return shown


def _tiles(run: Run) -> list[tuple[str, str]]:
    """The few figures of a run that a reader wants first: (value, name); what was not measured is left out."""
    get = run.summary.get

    def known(key: str) -> bool:
        return isinstance(get(key), int | float)

    def share(key: str) -> str:
        return f"{100 * float(run.summary[key]):.1f}%" if known(key) else "–"

    tiles = []
    for name, one in (("tasks solved (TGC)", "success"), ("scenarios solved (SGC)", "sgc")):
        if known(f"final_{one}"):
            tiles.append((f"{share(f'base_{one}')} → {share(f'final_{one}')}", f"{name}, before → after"))
    if known("rubric_pass_rate"):
        tiles.append((share("rubric_pass_rate"), "rubric passed, mean over training"))
    if known("inert_share"):
        tiles.append((share("inert_share"), "inert: verdicts unanimous"))
    if known("judge_calls"):
        cost = get("judge_cost_usd")
        bill = "price unknown" if cost is None else "free" if cost == 0 else f"${cost:.2f}"
        tiles.append((f"{get('judge_calls'):,}", f"judge calls, {bill}"))
    if known("steps"):
        tiles.append((f"{get('steps'):,}", "training steps"))
    return tiles


def _counted_tiles(numbers: Sequence[StepNumbers]) -> list[tuple[str, str]]:
    """The same of trajectories that were judged without a run: counted from the archive."""
    judged, rollouts = sum(n.members for n in numbers), sum(n.rollouts for n in numbers)
    tiles = [(f"{judged:,} of {rollouts:,}", "trajectories judged")] if rollouts else []
    if (rate := total(n.verdicts for n in numbers).pass_rate) is not None:
        tiles.append((f"{100 * rate:.1f}%", "rubric passed"))
    known = [n for n in numbers if n.inert is not None and n.members]
    if known:
        share = sum(n.inert or 0 for n in known) / sum(n.members for n in known)
        tiles.append((f"{100 * share:.1f}%", "inert: verdicts unanimous"))
    return tiles


def _evaluations(run: Run) -> list[dict[str, Any]]:
    keys = ("tgc", "sgc", "turns", "cost_usd", "quarantined", "unevaluated")
    return [
        {"split": e.split, "checkpoint": e.checkpoint, "n": e.n, **{k: e.figure(k) for k in keys}}
        for e in run.evaluations
    ]


def _curves(run: Run, numbers: Sequence[StepNumbers]) -> list[dict[str, Any]]:
    """Every metric as {name, x, y, first}; success on training tasks from train_success.csv beside them."""
    names = sorted({k for row in run.metrics for k in row if k != "step" and not k.startswith("summary/")})
    curves = []
    for name in names:
        points = [(row["step"], row[name]) for row in run.metrics if name in row and abs(row[name]) < float("inf")]
        curves.append({"name": name, "x": [x for x, _ in points], "y": [y for _, y in points], "first": name in CURVES})
    if not names and numbers:  # judged from a file: there are no metrics, but the archive has rewards
        known = [s for s in numbers if s.verdicts.pass_rate is not None]
        curves.append({"name": "rubric/pass_rate", "x": [s.step + 1 for s in known],
                       "y": [s.verdicts.pass_rate for s in known], "first": True})  # fmt: skip
    if run.train_success:
        shares = {s + 1: good / known for s, (good, known) in run.train_success.items() if known}
        curves.append(
            {"name": "success on training tasks", "x": list(shares), "y": list(shares.values()), "first": True}
        )
    order = {name: i for i, name in enumerate(CURVES)}
    return sorted(curves, key=lambda c: (order.get(c["name"], len(order)), c["name"]))


def group_blocks(
    run: Run, step: int, pieces: TokenPieces, max_text: int
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """What the page shows of every group of a step: (line for the picker, block)."""
    tables: dict[str, dict[int, list[dict[str, Any]]]] = {}
    for name in ("trajectories", "criteria", "verdicts", "credits", "failures"):
        by_group: dict[int, list[dict[str, Any]]] = {}
        for row in read_table(run.path, name, [step]).to_pylist():
            by_group.setdefault(row["group"], []).append(row)
        tables[name] = by_group
    try:
        calls = read_calls(run.path, [step])
    except FileNotFoundError:
        calls = []
    groups = sorted(tables["trajectories"] or tables["credits"])
    return [
        _group(g, {name: rows.get(g, []) for name, rows in tables.items()}, calls, pieces, max_text) for g in groups
    ]


def _group(
    group: int,
    rows: Mapping[str, list[dict[str, Any]]],
    calls: Sequence[Mapping[str, Any]],
    pieces: TokenPieces,
    max_text: int,
) -> tuple[dict[str, Any], dict[str, Any]]:
    def cut(text: str | None) -> str:
        text = text or ""
        left = len(text) - max_text
        return text if left <= 0 else f"{text[:max_text]}\n[{left} more characters are in the archive]"

    credits = {r["sample"]: r for r in rows["credits"]}
    failures = {r["sample"]: f"{r['phase']}: {r['reason']}" for r in rows["failures"]}
    dropped = {r["criterion"]: r["dropped"] for r in rows["criteria"]}
    verdicts = {(v["criterion"], v["sample"]): v for v in rows["verdicts"]}
    rollouts = []
    for t in rows["trajectories"]:
        credit = credits.get(t["sample"])
        counts = _counts([v for v in rows["verdicts"] if v["sample"] == t["sample"]], dropped, len(t["steps"]))
        steps = []
        for j, s in enumerate(t["steps"]):
            steps.append({
                "act": cut(s["action"]), "obs": cut(s["observation"]), "turn": s["turn"], "n": s["stop"] - s["start"],
                "a": credit["step_advantages"][j] if credit else None,
                "q": credit["qualities"][j] if credit and credit["qualities"] else None,
                "pf": counts[j],
                "tok": t["token_ids"][s["start"] : s["stop"]],
                "lp": [round(x, 3) for x in t["logprobs"][s["start"] : s["stop"]]],
            })  # fmt: skip
        rollouts.append({
            "sample": t["sample"], "end": t["termination"], "error": cut(t["error"]), "steps": steps,
            "r": credit["reward"] if credit else None, "A": credit["advantage"] if credit else None,
            "reason": credit["reason"] if credit else "", "flat": bool(credit and credit["zero_std"]),
            "lost": failures.get(t["sample"], ""),
        })  # fmt: skip
    first = rows["trajectories"][0] if rows["trajectories"] else {}
    opening = []
    for message in first.get("messages", ()):
        if message["role"] == "assistant":
            break
        opening.append([message["role"], cut(message["content"])])
    samples = [r["sample"] for r in rollouts]
    mine = [c for c in calls if c["task_id"] == first.get("task_id")]
    block = {
        "task": first.get("task_id", ""),
        "opening": opening,
        "rollouts": rollouts,
        "pieces": pieces.of({i for r in rollouts for s in r["steps"] for i in s["tok"]}),
        "criteria": [
            {"title": c["title"], "text": c["description"], "how": c["evaluator_instruction"], "source": c["source"],
             "out": c["dropped"], "evidence": c["evidence"]}
            for c in rows["criteria"]
        ],
        "verdicts": [
            [_verdict(verdicts.get((c["criterion"], s)), cut) for s in samples] for c in rows["criteria"]
        ],
        "calls": [
            {"phase": c["phase"], "sample": c["sample"], "attempt": c["attempt"], "outcome": c["outcome"],
             "error": cut(c["error"]), "model": c["served_model"] or c["model"], "in": c["tokens_in"],
             "out": c["tokens_out"], "cached": c["tokens_cached"], "usd": c["cost_usd"],
             "s": round(c["latency_s"], 3), "reply": cut(c["reply"])}
            for c in mine
        ],
    }  # fmt: skip
    rewards = [r["r"] for r in rollouts if r["r"] is not None]
    head = {
        "task": first.get("task_id", ""), "group": group, "g": len(rollouts), "judged": len(rewards),
        "mean": sum(rewards) / len(rewards) if rewards else None, "flat": any(r["flat"] for r in rollouts),
        "moved": sum(r["reason"] == "credited" for r in rollouts),
    }  # fmt: skip
    return head, block


def _verdict(v: Mapping[str, Any] | None, cut: Any) -> list[Any] | None:
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
