"""`draco evaluate`: a run's checkpoints, or any model behind an API, on held-out tasks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from draco.config.arguments import Command, option, passed_on, prices_of, words
from draco.config.options import Count, Index, NonNegative
from draco.core.errors import ConfigError
from draco.core.llm.money import Prices
from draco.core.table import Table

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import Console

__all__ = ["COMMAND", "main"]

_RATES = ("tgc", "sgc")


@dataclass(frozen=True, kw_only=True)
class Options:
    """Who is evaluated, and on what."""

    run: Path | None = words("run folder", optional=True)
    env: str | None = option(None, "the environment; of a run only a check that it has that one", shown="the run's")
    split: tuple[str, ...] | None = option(None, "splits of the environment, a,b", shown="the run's eval.split")
    n: Count = option(1, "independent runs a task")
    tasks: Count | None = option(None, "the first so many tasks", shown="all")
    checkpoints: str | None = option(
        None,
        "last; base (adapter off: the untrained policy); step numbers, a,b; or lastN: the last N epoch ends (last3 is "
        "the paper's)",
        shown="last",
    )
    checkpoint: str | None = option(None, "the same as checkpoints=")
    temperature: NonNegative | None | Literal["default"] = option(
        "default", "of sampling; null sends none to an API", shown="the run's eval.temperature; of an API 1.0"
    )
    seed: Index | None = option(None, "of sampling", shown="the run's")
    prices: Prices | None = option(
        None,
        "USD per million tokens of the policy, READ,WRITTEN or READ,READ_AGAIN,WRITTEN; gives the cost of a pass",
        shown="unknown; of an API litellm's table",
        read=prices_of,
    )
    out: Path | None = option(None, "folder of the results", shown="RUN/evaluations")
    policy: str | None = option(None, "litellm: no run, the agent is model= behind an API, on the same harness")
    model: str | None = option(None, "of policy=litellm: litellm's name, PROVIDER/MODEL")
    api_base: str | None = option(None, "of policy=litellm: its address", shown="the provider's")
    concurrency: Count | None = option(None, "of policy=litellm: episodes at a time", shown="16")
    passed: tuple[str, ...] = passed_on("options of the environment, and budgets of a rollout", "env.", "limits.")


COMMAND = Command(
    "draco evaluate",
    "evaluate checkpoints, or a model behind an API, on held-out tasks",
    Options,
    """
    Prints TGC and SGC as pass^1..n and pass@1..n, by difficulty, turns, tokens, cost and terminations; mean ±
    std over checkpoints. Writes SPLIT-CHECKPOINT-nN.json (…-firstK.json with tasks=K) and leaderboard.json.
    With policy=litellm every episode is appended to SPLIT-api-nN.jsonl as it ends; the same command goes on
    from it.

    env=tau_banking plays τ-bench and has options of its own: draco evaluate env=tau_banking --help.
    """,
    (
        "draco evaluate runs/NAME split=test_normal n=3",
        "draco evaluate runs/NAME split=test_normal,test_challenge n=3 checkpoints=last3",
        "draco evaluate policy=litellm model=openai/gpt-5.4 env=appworld split=test_normal out=results/gpt n=3",
    ),
)


def help_of(arguments: list[str]) -> str:
    """τ-bench has options of its own."""
    if "env=tau_banking" in arguments:
        from draco.study.verbs import evaluate_tau

        return evaluate_tau.COMMAND.help()
    return COMMAND.help()


def main(arguments: list[str]) -> None:
    """Evaluate, print tables, write the results."""
    if "env=tau_banking" in arguments:
        from draco.study.verbs import evaluate_tau

        evaluate_tau.main(arguments)
        return
    given = options(arguments)
    from rich.console import Console

    from draco.core.files import write_json
    from draco.env.success import leaderboard, over_checkpoints  # torch loads here

    # A part of the tasks has a name of its own: it must not take the place of all.
    size = f"n{given.n}" + (f"-first{given.tasks}" if given.tasks else "")
    results, folder = _run(given) if given.policy is None else _api(given)
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
            name = (given.checkpoints or given.checkpoint or "last").replace(",", "+")
            write_json(folder / f"{split}-{name}-{size}.json", overall[split])
            show(overall[split], console)
    write_json(folder / "leaderboard.json", leaderboard(overall))
    print(f"leaderboard: {folder / 'leaderboard.json'}")


def options(arguments: list[str]) -> Options:
    """The options, checked against each other.

    Raises:
        ConfigError: neither a run nor policy=litellm, or an option that would not be read.
    """
    given = COMMAND.parse(arguments)
    api = given.policy is not None
    if api and (given.policy != "litellm" or given.run is not None):
        raise ConfigError("policy=litellm evaluates a model behind an API and takes no run=; a run has its own policy")
    if api and (missing := [k for k in ("model", "env", "out") if getattr(given, k) is None]):
        raise ConfigError(f"policy=litellm needs {', '.join(k + '=…' for k in missing)} too")
    if not api and given.run is None:
        raise ConfigError("run=FOLDER is missing: the run to evaluate (or policy=litellm model=… env=… out=…)")
    others = ("checkpoint", "checkpoints", "seed") if api else ("api_base", "concurrency", "model")
    if unread := [name for name in others if getattr(given, name) is not None]:
        raise ConfigError(f"{unread[0]}= is for {'runs' if api else 'policy=litellm'} and would not be read here")
    if given.checkpoint is not None and given.checkpoints is not None:
        raise ConfigError("checkpoint= and checkpoints= are the same; give one")
    return given


def _run(given: Options) -> tuple[Iterator[dict[str, Any]], Path]:
    assert given.run is not None
    from draco.config.compose import stored_config

    config = stored_config(given.run)
    from draco.config.choices import merge_known
    from draco.study.evaluate import evaluate_checkpoints

    if given.env not in (None, config.env.name):
        raise ConfigError(
            f"env={given.env}, but {given.run} was trained on env={config.env.name}: its prompt and actions differ"
        )
    merge_known(config, given.passed)
    splits = given.split or (config.eval.split,)
    which = given.checkpoints or given.checkpoint or "last"
    if given.temperature != "default":
        config.eval.temperature = given.temperature
    config.seed = config.seed if given.seed is None else given.seed
    config.eval.split, config.eval.n, config.eval.tasks = splits[0], given.n, given.tasks
    return evaluate_checkpoints(config, given.run, which, splits, given.prices), given.out or given.run / "evaluations"


def api_config(given: Options) -> DictConfig:
    """What a model behind an API is evaluated with: the environment, and the budgets of policies of any size.

    Raises:
        ConfigError: no such environment or option.
    """
    from draco.config.compose import compose_config

    # Without policy=hf the default policy's budgets would hold, which are those of a toy.
    config = compose_config([f"env={given.env}", "policy=hf", *given.passed])
    if "tokenizer" in config.env.environment:
        config.env.environment.tokenizer = config.env.environment.tokenizer_gguf = None  # nobody's but the model's own
    if "verbose_prompt" in config.env:
        config.env.verbose_prompt = True
    return config


def _api(given: Options) -> tuple[Iterator[dict[str, Any]], Path]:
    from draco.rollout.engines.api import ApiEngine
    from draco.study.evaluate_api import evaluate_api

    assert given.out is not None
    config = api_config(given)
    engine = ApiEngine(
        str(given.model),
        temperature=1.0 if given.temperature == "default" else given.temperature,
        api_base=given.api_base,
        concurrency=given.concurrency or 16,
    )
    results = evaluate_api(
        engine,
        config,
        given.split or (config.eval.split,),
        n=given.n,
        tasks=given.tasks,
        out=given.out,
        options=[o for o in given.passed if o.startswith("env.")],
        prices=given.prices,
    )
    return results, given.out


def show(result: dict[str, Any], console: Console) -> None:
    """One table a split and checkpoint, or its mean ± std over checkpoints."""
    passes = {"pass^": "pass_hat"}
    several = "checkpoints" in result
    if several:
        over = result["checkpoints"]
        title = f"{result['split']}, mean ± std over {len(over)} checkpoints ({', '.join(over)})"
    else:
        passes["pass@"] = "pass_at"
        who = result["checkpoint"] if result["checkpoint"] != "api" else result["agent"]
        title = f"{result['split']}, {result['tasks']} tasks × {result['n']} runs, {who}"
    columns = ("", *(f"{sign}{k}" for sign in passes for k in range(1, result["n"] + 1)))
    rows = [(name.upper(), *(_cell(v) for key in passes.values() for v in result[f"{name}_{key}"])) for name in _RATES]
    console.print(Table("success", title, columns, tuple(rows)).terminal())
    if not several and result["scaffold"]:
        console.print(f"agent: {result['scaffold']}", highlight=False)
    for name in _RATES:
        levels = "  ".join(f"level {k}: {_cell(v)}" for k, v in result[f"{name}_by_difficulty"].items())
        console.print(f"{name.upper()} by difficulty  {levels}", highlight=False)
    ends = "  ".join(f"{k} {_cell(v)}" for k, v in result["terminations"].items())
    console.print(f"turns {_cell(result['turns'], '{:.1f}')}   ended: {ends}", highlight=False)
    read, written = (_cell(result[key], "{:.0f}") for key in ("input_tokens", "step_tokens"))
    cost = _cell(result["cost_usd"], "${:.2f}", "unknown (prices=)")
    console.print(f"tokens a rollout: {read} read, {written} written   cost of one pass: {cost}", highlight=False)
    if not several and (result["unevaluated"] or result["quarantined"]):
        console.print(
            f"unevaluated {result['unevaluated']} (in no mean)   quarantined {result['quarantined']} (count as failed)"
        )


def _cell(value: float | dict[str, float | None] | None, form: str = "{:.1%}", unknown: str = "–") -> str:
    """A number, or its mean ± std over checkpoints."""
    mean, std = (value["mean"], value["std"]) if isinstance(value, dict) else (value, None)
    if mean is None:
        return unknown
    return form.format(mean) + ("" if std is None else f" ± {form.format(std)}")
