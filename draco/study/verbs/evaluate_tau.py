"""`draco evaluate env=tau_banking`: a checkpoint on τ-bench, played by the user's own tau2."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draco.config.arguments import Command, option, prices_of, words
from draco.config.options import Count
from draco.core.errors import ConfigError
from draco.core.llm.money import Prices

if TYPE_CHECKING:
    from draco.core.llm.money import Usage
    from draco.study.tau import TauOptions

__all__ = ["COMMAND", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is played, by whom and against whom."""

    run: Path = words("run folder")
    env: str = option("tau_banking", "chooses this kind of evaluation")
    n: Count = option(3, "trials a task")
    checkpoints: str | None = option(
        None,
        "last; base (the untrained policy); step numbers, a,b; or lastN: the last N epoch ends (last3 is the paper's)",
        shown="last",
    )
    checkpoint: str | None = option(None, "the same as checkpoints=")
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
    retrieval: str | None = option(
        None, "retrieval of documents; alltools-qwen embeds at OpenRouter (OPENROUTER_API_KEY)", shown="alltools-qwen"
    )
    user: str | None = option(None, "user simulator; its key comes from the environment", shown="openai/gpt-5.4")
    user_api_base: str | None = option(None, "address of the user simulator", shown="the provider's")
    judge: str | None = option(
        None, "the model that decides assertions in words", shown="openai/gpt-5.4; of other domains tau2's own"
    )
    api_base: str | None = option(None, "a server that runs already (OpenAI-compatible)", shown="vLLM is started")
    model: str = option("policy", "the model's name at api_base=")
    python: str = option(".venv-vllm/bin/python", "the interpreter that has vLLM")
    tensor_parallel: Count = option(1, "GPUs of the server")
    max_len: Count | None = option(None, "tokens of a conversation", shown="yarn=, or what the model can")
    yarn: Count | None = option(
        None, "tokens that YaRN stretches the context to; the paper's for Qwen2.5: 131072", shown="the model's own"
    )
    tool_parser: str | None = option(None, "vLLM's parser of tool calls", shown="qwen3_coder or hermes, by the model")
    reasoning_parser: str | None = option(
        None, "vLLM's parser of reasoning, none without one", shown="qwen3 or none, by the model"
    )
    port: Count = option(8010, "port of the vLLM server, on the loopback interface")
    prices: Prices | None = option(None, "READ,WRITTEN in USD per million tokens of the agent", read=prices_of)
    user_prices: Prices | None = option(None, "the same of the user simulator", read=prices_of)
    judge_prices: Prices | None = option(
        None, "the same of the judge", shown="user_prices=, where both are one model", read=prices_of
    )


COMMAND = Command(
    "draco evaluate env=tau_banking",
    "checkpoints on τ-bench, zero-shot",
    Options,
    """
    One checkpoint after another is served by vLLM on the loopback interface and has to prove that it changes the base
    model's answers; the user's tau2 plays it, and the results are counted here: infrastructure errors and missing
    simulations are failures over tasks × n, and are shown. Written to the run folder, where the report reads it:
    evaluations/tau_banking-CHECKPOINT-nN.json, of another domain tau_DOMAIN-CHECKPOINT-nN.json.
    """,
    (
        "draco evaluate env=tau_banking run=runs/NAME n=3 checkpoints=last3 tau2=/path/to/bin/tau2",
        "draco evaluate env=tau_banking run=runs/QWEN25 checkpoints=last3 yarn=131072 tensor_parallel=8",
        "draco evaluate env=tau_banking run=runs/NAME results=results.json prices=1,4 user_prices=1,4",
    ),
)


def main(arguments: list[str]) -> None:
    """Run or read evaluations, one a checkpoint."""
    given = COMMAND.parse(arguments)
    from draco.run.checkpoint import chosen
    from draco.study.tau import BANKING, TauOptions, judge_log, judge_usage, tau2_version

    if not (given.run / "config.yaml").is_file():
        raise ConfigError(f"run={given.run}: no run there (config.yaml not found)")
    if given.checkpoint is not None and given.checkpoints is not None:
        raise ConfigError("checkpoint= and checkpoints= are the same; give one")
    folders = chosen(given.run, given.checkpoints or given.checkpoint or "last")
    named: dict[str, Any] = {
        k: v
        for k in ("tau2", "domain", "retrieval", "user", "user_api_base", "judge", "max_turns")
        if (v := getattr(given, k)) is not None
    }
    if given.domain not in (None, BANKING):
        named = {"retrieval": None, "judge": None, **named}
    tau = TauOptions(n=given.n, tasks=given.tasks, **named)
    settings = {
        "domain": tau.domain, "retrieval": tau.retrieval, "user": tau.user, "judge": tau.judge,
        "max_turns": tau.max_turns,
    }  # fmt: skip
    if given.results is not None:
        if len(folders) > 1:
            raise ConfigError(f"results= is one evaluation and {len(folders)} checkpoints are named; name the one")
        file = given.results
        settings = _known(file, {k: v for k, v in settings.items() if getattr(given, k) is not None})
        # The tau2 at hand says nothing of a file that another one wrote.
        version = tau2_version(tau.tau2) if given.tau2 is not None else None
        _write(given, tau, _name(folders[0]), file, settings, version, None)
        return
    version = tau2_version(tau.tau2)
    with _agents(given, folders) as agents:
        for folder in folders:
            name = _name(folder)
            save_to = given.run / "tau2" / f"{tau.domain}-{name}-n{tau.n}"
            file, how = agents(folder, tau, save_to)
            _write(given, tau, name, file, {**settings, **how}, version, judge_usage(judge_log(save_to)))


def _name(folder: Path | None) -> str:
    return "base" if folder is None else folder.name


def _write(
    given: Options, tau: TauOptions, name: str, file: Path, settings: dict[str, Any], version: str | None,
    judge: Usage | None,
) -> None:  # fmt: skip
    """Count a results file, keep the evaluation in the run folder and show it."""
    from draco.core.files import write_json
    from draco.study.tau import BANKING, parse_results

    judge_prices = given.judge_prices or (given.user_prices if tau.judge == tau.user else None)
    content = parse_results(
        file, n=given.n, prices=given.prices, user_prices=given.user_prices, judge_prices=judge_prices, judge=judge
    )
    split = "tau_banking" if settings["domain"] == BANKING else f"tau_{settings['domain']}"
    out = given.run / "evaluations" / f"{split}-{name}-n{given.n}{f'-first{tau.tasks}' if tau.tasks else ''}.json"
    content["tau2"] = {"version": version, **content["tau2"]}
    write_json(out, {"run": str(given.run), "checkpoint": name, "split": split, **settings, **content})
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


#: plays one checkpoint: the results file, and what is to be written about how it was served
Play = Callable[["Path | None", "TauOptions", Path], "tuple[Path, dict[str, Any]]"]


@contextmanager
def _agents(given: Options, folders: Sequence[Path | None]) -> Iterator[Play]:
    """A server for all checkpoints, the user's own or one that is started here."""
    from draco.study.tau import run_tau2

    if given.api_base is not None:
        if len(folders) > 1:
            raise ConfigError(f"api_base= serves one model and {len(folders)} checkpoints are named; name the one")
        base = given.api_base

        def elsewhere(folder: Path | None, tau: TauOptions, save_to: Path) -> tuple[Path, dict[str, Any]]:
            proven = None if folder is None else _require_effect(base, given.model)
            return run_tau2(tau, f"openai/{given.model}", base, save_to), {"adapter_proven": proven}

        yield elsewhere
        return
    from omegaconf import OmegaConf

    from draco.study.serving import ServeOptions, parsers, serving

    model = str(OmegaConf.load(given.run / "config.yaml").policy.path)
    tool, reasoning = parsers(_model_type(model))
    options = ServeOptions(
        given.python, given.port, given.tensor_parallel, given.max_len, given.yarn, given.tool_parser or tool,
        None if given.reasoning_parser == "none" else given.reasoning_parser or reasoning,
    )  # fmt: skip
    how = {k: getattr(options, k) for k in ("max_len", "yarn", "tool_parser", "reasoning_parser", "tensor_parallel")}
    adapters = [f / "adapter" for f in folders if f is not None]
    with serving(model, adapters, options, folder=given.run / "tau2", asked_by="env=tau_banking") as server:

        def here(folder: Path | None, tau: TauOptions, save_to: Path) -> tuple[Path, dict[str, Any]]:
            agent = server.give(None if folder is None else folder / "adapter")
            file = run_tau2(tau, agent.model, agent.api_base, save_to, key=agent.key)
            return file, {"adapter_proven": None if folder is None else True, "served": how}

        yield here


def _model_type(model: str) -> str:
    from transformers import AutoConfig

    from draco.core.files import resolve

    return str(AutoConfig.from_pretrained(resolve(model)).model_type)


def _require_effect(api_base: str, model: str) -> bool | None:
    """Whether a server of the user's own applies the adapter that it lists; None: it does not say.

    Raises:
        ConfigError: it answers as the base model does.
    """
    import os

    from draco.core.llm.adapters import applies_adapter

    proven = applies_adapter(api_base, model, os.environ.get("OPENAI_API_KEY", ""))
    if proven is False:
        raise ConfigError(
            f"{api_base} answers model={model} exactly as its base model: the server loaded the adapter and applies "
            "none of it (names that do not fit the served class? vllm#39369); leave api_base= out and draco serves it"
        )
    return proven


def show(content: dict[str, Any]) -> None:
    """Success, faults, turns, cost."""
    rates = "  ".join(f"p{k} {v:.1%}" for k, v in enumerate(content["tgc_pass_hat"], 1) if v is not None)
    print(f"{content['tasks']} tasks × {content['n']}: SR {rates}")
    print(f"counted as failed: {content['infrastructure_errors']} infrastructure errors, {content['missing']} missing")
    cost = content["cost_usd"]
    bill = "unknown (prices=, user_prices=)" if cost is None else f"${cost:.4g} (agent, user simulator and judge)"
    print(f"turns {content['turns']:.1f}   cost of one pass: {bill}")
