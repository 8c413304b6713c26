"""`draco plan`: what a run will need, before it is started."""

from __future__ import annotations

import dataclasses
import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draco.config.arguments import Command, option, passed_on
from draco.config.options import Count
from draco.core.errors import ConfigError
from draco.study.planner.hardware import GPUS, Assumptions

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["COMMAND", "main"]

ASSUMED = dataclasses.fields(Assumptions)


@dataclass(frozen=True, kw_only=True)
class OwnOptions:
    """The machines, and what is printed."""

    gpus: Count | None = option(None, "GPUs of all nodes together", shown="gpus_per_node, times trainer.num_nodes")
    gpus_per_node: Count = option(8, "GPUs of one node")
    gpu: str = option("h100-80gb", f"one of {', '.join(GPUS)}")
    judge_from: Path | None = option(None, "run folder whose archive gives the judge's calls and mean tokens")
    json: bool = option(False, "print one JSON object in place of tables")
    config: tuple[str, ...] = passed_on("options of draco train: GROUP=CHOICE (policy=…), SECTION.OPTION=VALUE")


#: with the assumptions, of which every one can be given
Options = dataclasses.make_dataclass(
    "Options",
    [(f.name, int | float, option(f.default, f"assumed: {f.metadata['about']}")) for f in ASSUMED],
    bases=(OwnOptions,), frozen=True, kw_only=True,
)  # fmt: skip

COMMAND: Command[Any] = Command(
    "draco plan",
    "memory a GPU, hours, judge calls and dollars of a run, before it starts",
    Options,
    """
    Nothing is loaded and nothing is sent: parameters are counted on the meta device. Exit status 1: no layout fits.
    """,
    (
        "draco plan experiment=appworld_qwen36_27b gpus=8 gpu=h100-80gb",
        "draco plan experiment=appworld_qwen36_27b gpus=16 gpus_per_node=8 json=true",
        "draco plan experiment=appworld_qwen36_27b judge_from=runs/NAME mfu=0.3 turns=20",
    ),
)


def main(arguments: list[str]) -> int:
    """Print the plan; 0 it fits, 1 it does not."""
    given = COMMAND.parse(arguments)
    assumptions = Assumptions(**{f.name: getattr(given, f.name) for f in ASSUMED})
    from omegaconf.errors import OmegaConfBaseException

    from draco.config.compose import compose_config
    from draco.run.launch import processes
    from draco.study.planner.plan import make_plan

    with COMMAND.beside_the_configuration():
        config = compose_config([*given.config, "run=plan"])
    try:
        plan = make_plan(
            config,
            gpus=given.gpus or given.gpus_per_node * processes(config)[1],
            gpu=given.gpu,
            assumptions=assumptions,
            archive=given.judge_from,
            gpus_per_node=given.gpus_per_node,
        )
    except (OmegaConfBaseException, FileNotFoundError) as error:
        raise ConfigError(str(error)) from error
    if given.json:
        print(json.dumps(plan, indent=1))
    else:
        from rich.console import Console

        show(plan, Console(width=120))
    return 0 if any(layout["fits"] for layout in plan["layouts"].values()) else 1


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
    from rich.table import Table

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
