"""The plan of a configuration: memory, time, the judge and notes, as one plain dictionary."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge
from omegaconf import DictConfig, OmegaConf

from draco.config.options import Count, Index, check_option
from draco.core.errors import ConfigError
from draco.core.llm.money import Prices, price_of
from draco.judge.options import prices_of
from draco.judge.views.size import needed_context
from draco.run.launch import sharded
from draco.study.planner.hardware import Assumptions, gpu_named
from draco.study.planner.judge import STATED, archive_calls, bill, calls_a_step, expected_calls, implied_tokens
from draco.study.planner.layout import TIMED, Layout, estimate, layouts
from draco.study.planner.model import ModelSize, build, model_config, size_of_model

__all__ = ["make_plan"]

#: the paper's judge, GPT-5.4, by litellm's packaged table of 2026-11
_GPT = Prices(2.5, 15.0, 0.25)
#: options of a run that the plan depends on
_CHECKED = {
    "limits.max_prompt_tokens": Count, "limits.max_response_tokens": Count, "limits.max_turns": Count,
    "update.micro_batch_tokens": Count, "steps": Index, "tasks_per_step": Count,
    "group_size": Annotated[int, Ge(2)], "policy.rank": Count,
}  # fmt: skip


def make_plan(
    config: DictConfig,
    *,
    gpus: int,
    gpu: str,
    assumptions: Assumptions,
    archive: Path | None = None,
    gpus_per_node: int = 8,
) -> dict[str, Any]:
    """Memory, time, judge and verdict.

    Args:
        config: composed run configuration.
        gpus: of all machines together.
        gpu: name in `draco.study.planner.hardware.GPUS`.
        assumptions: efficiencies and means.
        archive: run whose judge calls give the mean tokens of a call.
        gpus_per_node: of one machine, at most; fewer `gpus` are one machine.

    Raises:
        ConfigError: an unknown GPU or model, GPUs that fill no whole machines, an option out of its range.
    """
    for name, annotation in _CHECKED.items():
        check_option(name, OmegaConf.select(config, name), annotation)
    nodes = _nodes(gpus, gpus_per_node)
    kind, policy = gpu_named(gpu), config.policy
    shape = model_config(policy.path)
    size = size_of_model(build(shape, rank=policy.rank, targets=policy.targets, dtype=policy.dtype), shape, policy.rank)
    ways = layouts(gpus // nodes, nodes)
    return {
        "experiment": {
            "policy": policy.path,
            "gpus": gpus,
            "nodes": nodes,
            "gpu": gpu,
            "trainer": "fsdp" if sharded(config) else "ddp",
        },
        "model": {**asdict(size), "kv_bytes_a_token": size.kv_bytes()},
        "layouts": {layout.name: estimate(config, size, kind, layout, assumptions) for layout in ways},
        "judge": _judge(config, size, assumptions, archive),
        "assumptions": assumptions.as_dict(),
        "notes": _notes(size, nodes, ways),
    }


def _nodes(gpus: int, per_node: int) -> int:
    """Number of machines; each has the same number of GPUs."""
    check_option("gpus_per_node", per_node, Count)
    check_option("gpus", gpus, Count)
    if gpus > per_node and gpus % per_node:
        raise ConfigError(
            f"gpus={gpus}: expected at most gpus_per_node={per_node} (one node) or a multiple of it (whole nodes)"
        )
    return max(1, gpus // per_node)


def _notes(size: ModelSize, nodes: int, ways: list[Layout]) -> list[str]:
    """What the figures leave out."""
    found = []
    if size.parameters < TIMED:
        found.append(
            f"no speeds and hours: the assumptions are for models from {TIMED / 1e6:.0f} M parameters; a smaller one "
            "waits for kernel launches and the environment"
        )
    elif nodes > 1:
        found.append(
            "seconds, tokens/s and hours ignore the network between nodes; gathering shards over it takes longer"
        )
    if nodes > 1:
        starts = ", ".join(f"{layout.name} {layout.train}" for layout in ways)
        found.append(
            f"several nodes: on each, torchrun --nnodes {nodes} --nproc-per-node N ({starts}); scripts/slurm/ of "
            "the repository starts one process a GPU. GPU numbers are those of a node, alike on all"
        )
    return found


def _judge(config: DictConfig, size: ModelSize, a: Assumptions, archive: Path | None) -> dict[str, Any]:
    if "judge" not in config.rubric:
        return {"step": None, "run": None}
    rubric, groups, members = config.rubric, config.tasks_per_step, config.group_size
    own = "k" in rubric  # the policy judges
    voters = int(rubric.k) if own else max(len(config.judge.get("members") or []), 1)
    calls = str(rubric.judge.get("plan", "paper"))
    most = calls_a_step(
        groups, members, dynamic=config.rubric.name != "static", citations=config.credit.name == "step",
        lean=calls == "lean", voters=voters,
    )  # fmt: skip
    means = STATED if archive is None else archive_calls(archive)
    model = str(rubric.judge.get("model", ""))
    free = own or "scripted" in model
    price = Prices(0.0, 0.0) if free else prices_of(rubric.judge.get("prices")) or price_of(model)
    step = bill(expected_calls(most, means, groups, members), means, price)
    sums = {key: step[key] for key in ("calls", "tokens_in", "tokens_out", "tokens_cached", "usd")}
    limits, reply = config.limits, int(rubric.get("max_reply_tokens", 4096))
    context = needed_context(
        calls, members, limits.max_prompt_tokens, limits.max_response_tokens, limits.max_turns, reply
    )["merge"]
    paper = implied_tokens(_GPT, STATED, calls_a_step(16, 6, dynamic=True, citations=True))
    return {
        "model": model, "free": free, "priced": price is not None,
        "means_from": str(archive) if archive else "stated", "most_calls": sum(most.values()),
        "not_in_archive": sorted(most.keys() - means.keys()),
        "step": step, "run": {key: None if v is None else v * config.steps for key, v in sums.items()},
        "seconds_a_step": step["calls"] * a.judge_latency_s / a.judge_concurrency,
        "self_judge": {"merge_context": context, "policy_context": size.context, "fits": context <= size.context},
        "paper": paper | {"input_usd": _GPT.input, "output_usd": _GPT.output},
    }  # fmt: skip
