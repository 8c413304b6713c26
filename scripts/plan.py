#!/usr/bin/env python
"""What a run will need, before it is started: memory a GPU, hours, judge calls and dollars.

    python scripts/plan.py experiment=appworld_qwen36_27b trainer=fsdp_8gpu gpus=8 gpu=h100-80gb
    … --json                     one JSON object
    … judge_from=runs/NAME       judge calls a rollout and their mean tokens from that run's archive
    … mfu=0.3 turns=20           other assumptions (draco/plan/hardware.py)

Nothing is loaded and nothing is sent: parameters are counted on the meta device. Any option of train.py works.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_module
from hydra.errors import HydraException
from rich.console import Console
from rich.table import Table

from draco.errors import ConfigError, DracoError
from draco.plan.hardware import Assumptions
from draco.plan.report import make_plan


def main(arguments: list[str]) -> int:
    """Print the plan; 0 it fits, 1 it does not, 2 it cannot be made."""
    as_json = "--json" in arguments
    names = {f.name: f.type for f in dataclasses.fields(Assumptions)}
    given: dict[str, Any] = {"gpus": "8", "gpu": "h100-80gb", "judge_from": ""}
    assumed: dict[str, Any] = {}
    overrides: list[str] = []
    try:
        for argument in (a for a in arguments if a != "--json"):
            key, equals, value = argument.partition("=")
            if not equals:
                raise ConfigError(f"{argument!r}: expected key=value or --json")
            if key in given:
                given[key] = value
            elif key in names:
                assumed[key] = number(key, value)
            else:
                overrides.append(argument)
        with initialize_config_module("conf", version_base="1.3"):
            config = compose("train", [*overrides, "run=plan"])
        plan = make_plan(
            config, gpus=int(number("gpus", given["gpus"])), gpu=given["gpu"], assumptions=Assumptions(**assumed),
            archive=Path(given["judge_from"]) if given["judge_from"] else None,
        )  # fmt: skip
    except (DracoError, HydraException, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if as_json:
        print(json.dumps(plan, indent=1))
    else:
        show(plan, Console(width=120))
    return 0 if any(layout["fits"] for layout in plan["layouts"].values()) else 1


def number(name: str, text: str) -> float:
    """A positive number, or a ConfigError that names the option."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not value > 0:
        raise ConfigError(f"{name}={text}: expected a number above 0")
    return value


def show(plan: dict[str, Any], console: Console) -> None:
    """The plan as tables."""
    model, run = plan["model"], plan["experiment"]
    console.print(
        f"{run['policy']} ({model['model_type']}): {model['parameters'] / 1e9:.3f} B parameters, LoRA "
        f"{model['lora_parameters'] / 1e6:.1f} M in {model['lora_layers']} matrices, KV cache "
        f"{model['kv_bytes_a_token'] / 1024:.0f} KiB a token; {run['gpus']} × {run['gpu']}, {run['trainer']}"
    )
    table = Table(title="GB a GPU", title_justify="left")
    table.add_column("")
    for name in plan["layouts"]:
        table.add_column(name, justify="right")
    columns = list(plan["layouts"].values())
    for part in columns[0]["update_bytes"]:
        table.add_row(f"update: {part}", *(f"{c['update_bytes'][part] / 1e9:.1f}" for c in columns))
    for part in columns[0]["serve_bytes"]:
        table.add_row(f"vLLM: {part}", *(_gb(c["serve_bytes"][part]) for c in columns))
    table.add_row("trainer, during rollouts", *(_gb(c["resident_bytes"]) for c in columns))
    table.add_row("budget", *(f"{c['budget_bytes'] / 1e9:.1f}" for c in columns))
    table.add_section()
    table.add_row("fits", *("yes" if c["fits"] else "NO" for c in columns))
    for label, key in (("GPUs that train", "train_gpus"), ("GPUs that serve", "serve_gpus"), ("servers", "servers")):
        table.add_row(label, *(str(c[key]) for c in columns))
    table.add_row("tensor parallel", *(str(c["tensor_parallel"] or "–") for c in columns))
    for key in ("sequences_at_once", "rollout_s", "update_s", "step_s", "rollout_tokens_per_s", "update_tokens_per_s"):
        table.add_row(key, *("–" if c["speed"] is None else f"{c['speed'][key]:,.0f}" for c in columns))
    table.add_row("hours (without judging)", *("–" if c["hours"] is None else f"{c['hours']:.1f}" for c in columns))
    console.print(table)
    for name, layout in plan["layouts"].items():
        for advice in layout["advice"]:
            console.print(f"{name}: {advice}")
        if layout["settings"]:
            console.print(f"{name}, to type: {' '.join(map(shlex.quote, layout['settings']))}", soft_wrap=True)
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


def _gb(number: float | None) -> str:
    return "–" if number is None else f"{number / 1e9:.1f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
