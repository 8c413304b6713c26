"""`draco evaluate env=tau_banking`: a checkpoint on τ-bench, played by the user's own tau2."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draco.config.arguments import Command, option, prices_of, words
from draco.config.options import Count
from draco.core.errors import ConfigError
from draco.core.llm.money import Prices

if TYPE_CHECKING:
    from draco.study.tau import TauOptions

__all__ = ["COMMAND", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is played, by whom and against whom."""

    run: Path = words("run folder")
    env: str = option("tau_banking", "chooses this kind of evaluation")
    n: Count = option(3, "trials a task")
    checkpoint: str = option("last", "last, base, or a step number")
    tasks: Count | None = option(None, "the first so many tasks", shown="all")
    max_turns: Count | None = option(
        None, "agent turns; tau2's --max-steps, which counts every message, is twice that", shown="100"
    )
    tau2: str | None = option(None, "executable of tau2, in its own environment", shown="tau2 on PATH")
    results: Path | None = option(
        None,
        "read this results file instead of running anything; domain, retrieval, user and max_turns are then what it "
        "says, and unknown where neither it nor an option does",
    )
    domain: str | None = option(None, "another one (airline, retail, …) has no documents", shown="banking_knowledge")
    retrieval: str | None = option(None, "retrieval of documents", shown="alltools")
    user: str | None = option(None, "user simulator; its key comes from the environment", shown="openai/gpt-5.4")
    user_api_base: str | None = option(None, "address of the user simulator", shown="the provider's")
    api_base: str | None = option(None, "a server that runs already (OpenAI-compatible)", shown="vLLM is started")
    model: str = option("policy", "the model's name at api_base=")
    python: str = option(".venv-vllm/bin/python", "the interpreter that has vLLM")
    tool_parser: str = option("hermes", "vLLM's parser of tool calls")
    port: Count = option(8010, "port of the vLLM server, on the loopback interface")
    prices: Prices | None = option(None, "READ,WRITTEN in USD per million tokens of the agent", read=prices_of)
    user_prices: Prices | None = option(None, "the same of the user simulator", read=prices_of)


COMMAND = Command(
    "draco evaluate env=tau_banking",
    "a checkpoint on τ-bench, zero-shot",
    Options,
    """
    The checkpoint is served by vLLM on the loopback interface, the user's tau2 plays it, and the results are
    counted here: infrastructure errors and missing simulations are failures over tasks × n, and are shown.
    Written to the run folder, where the report reads it: evaluations/tau_banking-CHECKPOINT-nN.json, of another
    domain tau_DOMAIN-CHECKPOINT-nN.json.
    """,
    (
        "draco evaluate env=tau_banking run=runs/NAME n=3 tau2=/path/to/bin/tau2",
        "draco evaluate env=tau_banking run=runs/NAME results=results.json prices=1,4 user_prices=1,4",
    ),
)


def main(arguments: list[str]) -> None:
    """Run or read one evaluation."""
    given = COMMAND.parse(arguments)
    from draco.core.files import write_json
    from draco.study.tau import BANKING, TauOptions, parse_results, tau2_version

    run = given.run
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"run={run}: no run there (config.yaml not found)")
    folder = _checkpoint(run, given.checkpoint)
    name = "base" if folder is None else folder.name
    chosen = ("tau2", "domain", "retrieval", "user", "user_api_base", "max_turns")
    named: dict[str, Any] = {k: v for k in chosen if (v := getattr(given, k)) is not None}
    if given.domain not in (None, BANKING):
        named.setdefault("retrieval", None)
    tau = TauOptions(n=given.n, tasks=given.tasks, **named)
    settings = {"domain": tau.domain, "retrieval": tau.retrieval, "user": tau.user, "max_turns": tau.max_turns}
    if given.results is not None:
        file = given.results
        settings = _known(file, {k: v for k, v in settings.items() if getattr(given, k) is not None})
        # The tau2 at hand says nothing of a file that another one wrote.
        version = tau2_version(tau.tau2) if given.tau2 is not None else None
    else:
        file, version = _play(given, tau, folder, name), tau2_version(tau.tau2)
    content = parse_results(file, n=given.n, prices=given.prices, user_prices=given.user_prices)
    split = "tau_banking" if settings["domain"] == BANKING else f"tau_{settings['domain']}"
    out = run / "evaluations" / f"{split}-{name}-n{given.n}{f'-first{tau.tasks}' if tau.tasks else ''}.json"
    content["tau2"] = {"version": version, **content["tau2"]}
    write_json(out, {"run": str(run), "checkpoint": name, "split": split, **settings, **content})
    show(content)
    print(f"records: {out}")


def _known(file: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What the file says of how it was made, and what is given where it does not say; nothing else is written.

    Raises:
        ConfigError: file and options differ.
    """
    from draco.study.tau import BANKING, recorded_settings

    stated = recorded_settings(file)
    for name in given.keys() & stated.keys():
        if given[name] != stated[name]:
            raise ConfigError(f"{file} was made with {name}={stated[name]}, not {given[name]}; leave {name}= out")
    known = {"domain": BANKING, **given, **stated}
    return known if known["domain"] == BANKING else {**known, "retrieval": None}  # it has no documents


def _checkpoint(run: Path, which: str) -> Path | None:
    from draco.run import checkpoint

    if which == "base":
        return None
    if which == "last":
        return checkpoint.latest(run)
    folder = checkpoint.folder_of(run, int(which)) if which.isdigit() else None
    if folder is None or not folder.is_dir():
        raise ConfigError(f"checkpoint={which} is not there; use last, base or a step number")
    return folder


def _play(given: Options, tau: TauOptions, folder: Path | None, name: str) -> Path:
    from omegaconf import OmegaConf

    from draco.study.tau import run_tau2

    save_to = given.run / "tau2" / f"{tau.domain}-{name}-n{tau.n}"
    if given.api_base is not None:
        return run_tau2(tau, f"openai/{given.model}", given.api_base, save_to)
    from draco.study.tau_server import served

    with served(
        given.python,
        str(OmegaConf.load(given.run / "config.yaml").policy.path),
        None if folder is None else folder / "adapter",
        tool_parser=given.tool_parser,
        port=given.port,
        folder=given.run / "tau2",
    ) as agent:
        return run_tau2(tau, agent.model, agent.api_base, save_to, key=agent.key)


def show(content: dict[str, Any]) -> None:
    """Success, faults, turns, cost."""
    rates = "  ".join(f"p{k} {v:.1%}" for k, v in enumerate(content["tgc_pass_hat"], 1) if v is not None)
    print(f"{content['tasks']} tasks × {content['n']}: SR {rates}")
    print(f"counted as failed: {content['infrastructure_errors']} infrastructure errors, {content['missing']} missing")
    cost = content["cost_usd"]
    bill = "unknown (prices=, user_prices=)" if cost is None else f"${cost:.4g} (agent and user simulator)"
    print(f"turns {content['turns']:.1f}   cost of one pass: {bill}")
