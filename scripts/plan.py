#!/usr/bin/env python
"""What a run will need, before it is started: memory a GPU, hours, judge calls and dollars.

    python scripts/plan.py experiment=appworld_qwen36_27b trainer=fsdp_8gpu gpus=8 gpu=h100-80gb
    … --json                     one JSON object
    … judge_from=runs/NAME       judge calls a rollout and their mean tokens from that run's archive
    … gpus=16 gpus_per_node=8    two nodes; fewer GPUs than gpus_per_node are one node
    … mfu=0.3 turns=20           other assumptions (--help lists them)

Nothing is loaded and nothing is sent: parameters are counted on the meta device. Any option of train.py works.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.table import Table

from draco.config.arguments import split
from draco.config.compose import compose_config
from draco.core.errors import ConfigError, DracoError
from draco.run.launch import processes
from draco.study.planner.hardware import GPUS, Assumptions
from draco.study.planner.report import make_plan

#: of this script; every other option is one of train.py
OPTIONS = {
    "gpus": "GPUs of all nodes together (default: gpus_per_node, times trainer.num_nodes)",
    "gpus_per_node": "GPUs of one node (default 8)",
    "gpu": f"one of {', '.join(GPUS)} (default h100-80gb)",
    "judge_from": "run folder whose archive gives the judge's calls and tokens",
}
ASSUMED = {f.name: f for f in dataclasses.fields(Assumptions)}


def usage() -> str:
    """What --help prints."""
    lines = [(__doc__ or "").rstrip(), "", "Options:"]
    lines += [f"    {name:18} {about}" for name, about in OPTIONS.items()]
    lines += ["", "Assumptions, of which every one can be given:"]
    lines += [f"    {f'{name}={f.default:g}':22} {f.metadata['about']}" for name, f in ASSUMED.items()]
    lines += [
        "",
        "Everything else goes to the configuration, as in train.py: GROUP=CHOICE (experiment=…, policy=…) or",
        "SECTION.OPTION=VALUE (limits.max_turns=30). `python train.py --help` lists groups and choices.",
    ]
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the plan; 0 it fits, 1 it does not, 2 it cannot be made."""
    if {"--help", "-h"} & set(arguments):
        print(usage())
        return 0
    as_json = "--json" in arguments
    try:
        given, overrides = split([a for a in arguments if a != "--json"], [*OPTIONS, *ASSUMED])
        assumptions = Assumptions(**{k: number(k, v) for k, v in given.items() if k in ASSUMED})
        config = composed(overrides)
        per_node = number("gpus_per_node", given.get("gpus_per_node", "8"))
        gpus = number("gpus", given["gpus"]) if "gpus" in given else per_node * processes(config)[1]
        plan = make_plan(
            config, gpus=gpus, gpu=given.get("gpu", "h100-80gb"), assumptions=assumptions,
            archive=Path(given["judge_from"]) if given.get("judge_from") else None, gpus_per_node=per_node,
        )  # fmt: skip
    except (DracoError, OmegaConfBaseException, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(plan, indent=1))
    else:
        show(plan, Console(width=120))
    return 0 if any(layout["fits"] for layout in plan["layouts"].values()) else 1


def composed(overrides: list[str]) -> DictConfig:
    """The configuration of a run.

    Raises:
        ConfigError: it does not compose; one line with the names that would.
    """
    try:
        return compose_config([*overrides, "run=plan"])
    except ConfigError as error:
        text = str(error)
        if ": no such option; " in text:
            own = [*OPTIONS, *ASSUMED]
            key = text.split("'")[1]
            near = difflib.get_close_matches(key, own, n=1, cutoff=0.6)
            meant = f" (did you mean {near[0]}?)" if near else ""
            text += f". Options and assumptions of this script{meant}: {', '.join(own)}; --help says more"
        raise ConfigError(text) from None


def number(name: str, text: str) -> Any:
    """An integer or a number; its range is checked where it is used.

    Raises:
        ConfigError: neither.
    """
    try:
        return int(text)
    except ValueError:
        pass
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text}: expected a number") from None


#: what the table calls them
SPEEDS = {
    "sequences_at_once": "sequences at once",
    "rollout_s": "rollouts, s a step",
    "update_s": "update, s a step",
    "step_s": "both, s a step",
    "rollout_tokens_per_s": "rollouts, tokens/s",
    "update_tokens_per_s": "update, tokens/s",
}


def show(plan: dict[str, Any], console: Console) -> None:
    """The plan as tables."""
    model, run = plan["model"], plan["experiment"]
    console.print(
        f"{run['policy']} ({model['model_type']}): {_count(model['parameters'])} parameters, LoRA "
        f"{_count(model['lora_parameters'])} in {model['lora_layers']} matrices, KV cache "
        f"{model['kv_bytes_a_token'] / 1024:.0f} KiB a token; {run['gpus']} × {run['gpu']}"
        f"{' on ' + str(run['nodes']) + ' nodes' if run['nodes'] > 1 else ''}, {run['trainer']}"
    )
    table = Table(title="Memory a GPU", title_justify="left")
    table.add_column("")
    for name in plan["layouts"]:
        table.add_column(name, justify="right")
    columns = list(plan["layouts"].values())
    for part in columns[0]["update_bytes"]:
        table.add_row(f"update: {part.replace('_', ' ')}", *(_size(c["update_bytes"][part]) for c in columns))
    for part in columns[0]["serve_bytes"]:
        table.add_row(
            f"vLLM: {'KV cache' if part == 'kv_cache' else part}", *(_size(c["serve_bytes"][part]) for c in columns)
        )
    table.add_row("trainer, during rollouts", *(_size(c["resident_bytes"]) for c in columns))
    table.add_row("budget", *(_size(c["budget_bytes"]) for c in columns))
    table.add_section()
    table.add_row("fits", *("yes" if c["fits"] else "NO" for c in columns))
    for label, key in (("GPUs that train", "train_gpus"), ("GPUs that serve", "serve_gpus"), ("servers", "servers")):
        table.add_row(label, *(str(c[key]) for c in columns))
    table.add_row("tensor parallel", *(str(c["tensor_parallel"] or "–") for c in columns))
    if any(c["speed"] for c in columns):
        for key, words in SPEEDS.items():
            table.add_row(words, *("–" if c["speed"] is None else f"{c['speed'][key]:,.0f}" for c in columns))
        table.add_row("hours (without judging)", *("–" if c["hours"] is None else f"{c['hours']:.1f}" for c in columns))
    console.print(table)
    for name, layout in plan["layouts"].items():
        for advice in layout["advice"]:
            console.print(f"{name}: {advice}")
        if layout["settings"]:
            console.print(f"{name}, to type: {' '.join(map(shlex.quote, layout['settings']))}", soft_wrap=True)
    for note in plan["notes"]:
        console.print(note)
    console.print("assumed: " + " ".join(f"{k}={v:g}" for k, v in plan["assumptions"].items()))
    if plan["judge"]["step"]:
        show_judge(plan["judge"], console)


def show_judge(judge: dict[str, Any], console: Console) -> None:
    """Calls, tokens and dollars."""
    step, total, paper, own = judge["step"], judge["run"], judge["paper"], judge["self_judge"]
    if judge["free"]:
        usd = "no bill"
    elif total["usd"] is None:
        usd = "unknown price: give judge.prices"
    else:
        usd = f"${step['usd']:.2f} a step, ${total['usd']:,.0f} a run"
    stated = judge["means_from"] == "stated"
    most = "at most " if stated else f"of {judge['most_calls']:.0f} at most, "
    console.print(
        f"judge {judge['model'] or '(judge.model is not set)'}: {most}{step['calls']:.0f} calls a step, "
        f"{total['calls']:,.0f} a run; "
        f"{step['tokens_in'] / 1e6:.2f} M tokens in and {step['tokens_out'] / 1e6:.2f} M out a step; {usd}; "
        f"{judge['seconds_a_step']:.0f} s a step, if nothing else went on. Means: {judge['means_from']}"
        + (f", but stated for {', '.join(judge['not_in_archive'])}" if judge["not_in_archive"] else "")
    )
    console.print(
        f"the paper's $1607 for 100 steps is ${paper['usd_a_call']:.4f} a call; at ${paper['input_usd']:g} in and "
        f"${paper['output_usd']:g} out a million tokens that is {paper['tokens_a_call']:,.0f} tokens a call "
        f"({paper['tokens_in']:,.0f} in, {paper['tokens_out']:,.0f} out)"
    )
    console.print(
        f"self-judge: the merge call needs up to {own['merge_context']:,} tokens of context, the policy has "
        f"{own['policy_context']:,}: {'fits' if own['fits'] else 'does NOT fit'}"
    )


def _size(number: float | None) -> str:
    """Bytes in GB, below 0.1 GB in MB."""
    if number is None:
        return "–"
    if not number:
        return "0"
    return f"{number / 1e6:.1f} MB" if number < 0.1e9 else f"{number / 1e9:.1f} GB"


def _count(number: int) -> str:
    return f"{number / 1e9:.3f} B" if number >= 1e9 else f"{number / 1e6:.1f} M"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
