"""Evaluate a run's policy, or any model behind an API, on splits: TGC and SGC as pass^1..n and pass@1..n, by
difficulty, turns, tokens, cost, terminations; mean ± std over checkpoints.

    python scripts/evaluate.py run=runs/NAME split=test_normal n=3
    python scripts/evaluate.py run=runs/NAME env=appworld split=test_normal,test_challenge n=3 checkpoints=last3
    python scripts/evaluate.py policy=litellm model=openai/gpt-5.4 env=appworld split=test_normal out=results/gpt n=3

Options (key=value):
    run          run folder
    env          the environment; with run= only a check that the run has that one. Its own options as env.KEY=VALUE
    limits.KEY   budgets of a rollout (default: the run's; policy=litellm: those of conf/train.yaml)
    split        split of the environment (several: a,b); default: the one the run was evaluated on
    n            independent runs a task (default 1)
    tasks        the first so many tasks; default all
    checkpoints  last (default), base (adapter off: the untrained policy), step numbers (a,b), or lastN: the last N
                 epoch ends (last3 is the paper's); checkpoint= is the same
    temperature  sampling temperature (default: the run's eval.temperature; null sends none to an API)
    seed         of sampling (default: the run's)
    prices       USD per million tokens of the policy: READ,WRITTEN or READ,READ_AGAIN,WRITTEN; gives the cost of a pass
                 (with policy=litellm in place of litellm's own table)
    policy       litellm: no run, the agent is model= behind an API, on the same harness
    model, api_base, concurrency   of policy=litellm
    out          folder of the results (default: the run's evaluations/). With policy=litellm every episode is
                 appended to SPLIT-api-nN.jsonl there as it ends; the same command goes on from it
"""

from __future__ import annotations

import logging
from collections import defaultdict
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.table import Table

from draco.config.arguments import prices_of, run_main
from draco.config.checks import whole
from draco.core.errors import ConfigError

OPTIONS = {
    "run", "env", "split", "n", "tasks", "checkpoint", "checkpoints", "temperature", "seed", "prices", "policy",
    "model", "api_base", "concurrency", "out",
}  # fmt: skip


def options(arguments: list[str]) -> dict[str, Any]:
    """Parse key=value arguments; env.KEY=VALUE and limits.KEY=VALUE are collected under `overrides`.

    Raises:
        ConfigError: an unknown option, or neither a run nor policy=litellm.
    """
    inner = [a for a in arguments if a.startswith(("env.", "limits."))]
    given = OmegaConf.to_container(OmegaConf.from_dotlist([a for a in arguments if a not in inner]))
    assert isinstance(given, dict)
    if wrong := sorted(str(k) for k in given.keys() - OPTIONS):
        raise ConfigError(f"unknown option {', '.join(wrong)}; expected {', '.join(sorted(OPTIONS))}")
    api = "policy" in given
    if api:
        if given["policy"] != "litellm" or "run" in given:
            raise ConfigError(
                "policy=litellm evaluates a model behind an API and takes no run=; a run has its own policy"
            )
        if missing := [k for k in ("model", "env", "out") if k not in given]:
            raise ConfigError(f"policy=litellm needs {', '.join(k + '=…' for k in missing)} too")
    elif "run" not in given:
        raise ConfigError("run=FOLDER is missing: the run to evaluate (or policy=litellm model=… env=… out=…)")
    others = {"checkpoint", "checkpoints", "seed"} if api else {"model", "api_base", "concurrency"}
    if unread := sorted(others & given.keys()):
        raise ConfigError(f"{unread[0]}= is for {'runs' if api else 'policy=litellm'} and would not be read here")
    if "checkpoint" in given and "checkpoints" in given:
        raise ConfigError("checkpoint= and checkpoints= are the same; give one")
    return {**{str(k): v for k, v in given.items()}, "overrides": inner}


def run_config(run: Path) -> DictConfig:
    """config.yaml of a run."""
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"run={run}: no run there (config.yaml not found)")
    config = OmegaConf.load(run / "config.yaml")
    assert isinstance(config, DictConfig)
    return config


def main(arguments: list[str]) -> None:
    """Evaluate, print tables, write `SPLIT-CHECKPOINT-nN.json` (`…-firstK.json` with tasks=K), one file over
    checkpoints, and leaderboard.json."""
    if "env=tau_banking" in arguments:
        import evaluate_tau  # its options: scripts/evaluate_tau.py

        evaluate_tau.main(arguments)
        return
    given = options(arguments)
    from draco.core.files import write_json
    from draco.env.success import leaderboard, over_checkpoints  # torch loads here

    for name in ("n", "tasks"):
        whole(name, given.get(name), 1, optional=True)
    api = given.get("policy") == "litellm"
    n = given.get("n") or 1
    # A part of the tasks has a name of its own: it must not take the place of all.
    size = f"n{n}" + (f"-first{given['tasks']}" if given.get("tasks") else "")
    results, folder = _api(given, n) if api else _run(given, n)
    console = Console()
    by_split: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for result in results:
        file = folder / f"{result['split']}-{result['checkpoint']}-{size}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, result)
        show(result, console)
        print(f"records: {file}")
        by_split[result["split"]].append(result)
    overall: dict[str, dict[str, Any]] = {}
    for split, parts in by_split.items():
        overall[split] = parts[0]
        if len(parts) > 1:
            overall[split] = over_checkpoints(parts)
            name = str(given.get("checkpoints", given.get("checkpoint"))).replace(",", "+")
            write_json(folder / f"{split}-{name}-{size}.json", overall[split])
            show_spread(overall[split], console)
    write_json(folder / "leaderboard.json", leaderboard(overall))
    print(f"leaderboard: {folder / 'leaderboard.json'}")


def _run(given: dict[str, Any], n: int) -> tuple[Any, Path]:
    run = Path(str(given["run"]))
    config = run_config(run)
    from draco.config.choices import merge_known
    from draco.study.evaluate import evaluate_checkpoints

    if given.get("env", config.env.name) != config.env.name:
        raise ConfigError(
            f"env={given['env']}, but {run} was trained on env={config.env.name}: its prompt and actions differ"
        )
    merge_known(config, given["overrides"])
    splits = str(given.get("split", config.eval.split)).split(",")
    which = str(given.get("checkpoints", given.get("checkpoint", "last")))
    if "temperature" in given:
        config.eval.temperature = given["temperature"]
    config.seed = given.get("seed", config.seed)
    config.eval.split, config.eval.n, config.eval.tasks = splits[0], n, given.get("tasks")
    folder = Path(str(given["out"])) if "out" in given else run / "evaluations"
    return evaluate_checkpoints(config, run, which, splits, prices_of(given.get("prices"))), folder


def api_config(given: dict[str, Any]) -> DictConfig:
    """What a model behind an API is evaluated with: the environment, and the budgets of policies of any size.

    Raises:
        ConfigError: no such environment or option.
    """
    from draco.config.compose import compose_config

    # Without policy=hf the default policy's budgets would hold, which are those of a toy.
    config = compose_config([f"env={given['env']}", "policy=hf", *given["overrides"]])
    if "tokenizer" in config.env.environment:
        config.env.environment.tokenizer = config.env.environment.tokenizer_gguf = None  # nobody's but the model's own
    if "verbose_prompt" in config.env:
        config.env.verbose_prompt = True
    return config


def _api(given: dict[str, Any], n: int) -> tuple[Any, Path]:
    from draco.rollout.engines.api import ApiEngine
    from draco.study.evaluate_api import evaluate_api

    config, out = api_config(given), Path(str(given["out"]))
    engine = ApiEngine(
        str(given["model"]),
        temperature=given.get("temperature", 1.0),
        api_base=given.get("api_base"),
        concurrency=int(given.get("concurrency", 16)),
    )
    results = evaluate_api(
        engine,
        config,
        str(given.get("split", config.eval.split)).split(","),
        n=n,
        tasks=given.get("tasks"),
        out=out,
        options=[o for o in given["overrides"] if o.startswith("env.")],
        prices=prices_of(given.get("prices")),
    )
    return results, out


def show(result: dict[str, Any], console: Console) -> None:
    """One table a split and checkpoint."""
    who = result["checkpoint"] if result["checkpoint"] != "api" else result["agent"]
    table = Table(title=f"{result['split']}, {result['tasks']} tasks × {result['n']} runs, {who}")
    for name in (
        "",
        *(f"pass^{k}" for k in range(1, result["n"] + 1)),
        *(f"pass@{k}" for k in range(1, result["n"] + 1)),
    ):
        table.add_column(name, justify="right")
    for name in ("tgc", "sgc"):
        values = [*result[f"{name}_pass_hat"], *result[f"{name}_pass_at"]]
        table.add_row(name.upper(), *("–" if v is None else f"{v:.1%}" for v in values))
    console.print(table)
    if result["scaffold"]:
        console.print(f"agent: {result['scaffold']}", highlight=False)
    for name in ("tgc", "sgc"):
        levels = result[f"{name}_by_difficulty"].items()
        text = "  ".join(f"level {k}: {'–' if v is None else f'{v:.1%}'}" for k, v in levels)
        console.print(f"{name.upper()} by difficulty  {text}", highlight=False)
    ends = "  ".join(f"{k} {v:.1%}" for k, v in result["terminations"].items())
    console.print(f"turns {result['turns']:.1f}   ended: {ends}", highlight=False)
    tokens = f"tokens a rollout: {result['input_tokens']:.0f} read, {result['step_tokens']:.0f} written"
    cost = "unknown (prices=)" if result["cost_usd"] is None else f"${result['cost_usd']:.2f}"
    console.print(f"{tokens}   cost of one pass: {cost}", highlight=False)
    if result["unevaluated"] or result["quarantined"]:
        console.print(
            f"unevaluated {result['unevaluated']} (in no mean)   quarantined {result['quarantined']} (count as failed)"
        )


def show_spread(result: dict[str, Any], console: Console) -> None:
    """Mean ± std over checkpoints."""

    def cell(value: dict[str, float | None], form: str = "{:.1%}") -> str:
        if value["mean"] is None:
            return "–"
        return form.format(value["mean"]) + ("" if value["std"] is None else f" ± {form.format(value['std'])}")

    names = ", ".join(result["checkpoints"])
    table = Table(title=f"{result['split']}, mean ± std over {len(result['checkpoints'])} checkpoints ({names})")
    for column in ("", *(f"pass^{k}" for k in range(1, result["n"] + 1))):
        table.add_column(column, justify="right")
    for name in ("tgc", "sgc"):
        table.add_row(name.upper(), *(cell(v) for v in result[f"{name}_pass_hat"]))
    console.print(table)
    for name in ("tgc", "sgc"):
        levels = "  ".join(f"level {k}: {cell(v)}" for k, v in result[f"{name}_by_difficulty"].items())
        console.print(f"{name.upper()} by difficulty  {levels}", highlight=False)
    ends = "  ".join(f"{k} {cell(v)}" for k, v in result["terminations"].items())
    console.print(f"turns {cell(result['turns'], '{:.1f}')}   ended: {ends}", highlight=False)
    tokens = f"{cell(result['input_tokens'], '{:.0f}')} read, {cell(result['step_tokens'], '{:.0f}')} written"
    cost = "unknown (prices=)" if result["cost_usd"]["mean"] is None else cell(result["cost_usd"], "${:.2f}")
    console.print(f"tokens a rollout: {tokens}   cost of one pass: {cost}", highlight=False)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    run_main(main)
