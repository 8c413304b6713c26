"""τ-bench Banking, zero-shot: `python scripts/evaluate.py env=tau_banking run=runs/NAME n=3 tau2=/path/to/bin/tau2`.

The checkpoint is served by vLLM on the loopback interface, behind a key. The user's tau2 plays it, and the results are
counted here: infrastructure errors and missing simulations are failures over tasks × n, and are shown. Writes
`evaluations/tau_banking-CHECKPOINT-nN.json` into the run folder, which scripts/report.py reads.

Options (key=value):
    run         run folder
    n           trials a task (default 3)
    checkpoint  last (default), base, or a step number
    tau2        executable of tau2 (its own environment)
    results     read this results file instead of running anything; domain, retrieval, user and max_turns are then
                what it says, and unknown where neither it nor an option does
    api_base, model   a server that runs already (OpenAI-compatible), and the model's name there; otherwise
    python, tool_parser, port   the interpreter that has vLLM (default .venv-vllm/bin/python), its parser (default
                hermes), and the port (default 8010)
    user, user_api_base   the user simulator (default openai/gpt-5.4); its key comes from the environment
    domain, retrieval     default banking_knowledge, alltools. Another domain (airline, retail, …) has no documents
                and no retrieval; its file is tau_DOMAIN-CHECKPOINT-nN.json
    tasks       the first so many tasks
    max_turns   agent turns (default 100; tau2's --max-steps is twice that: it counts every message)
    prices, user_prices   READ,WRITTEN in USD per million tokens of the agent and of the user simulator
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from draco.config.arguments import parse, prices_of, whole
from draco.core.errors import ConfigError
from draco.core.files import write_json
from draco.run import checkpoint
from draco.study.tau import BANKING, TauOptions, parse_results, recorded_settings, run_tau2, tau2_version
from draco.study.tau_server import served

OPTIONS = {
    "env", "run", "n", "checkpoint", "tau2", "results", "api_base", "model", "python", "tool_parser", "port", "user",
    "user_api_base", "domain", "retrieval", "tasks", "max_turns", "prices", "user_prices",
}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Run or read one evaluation."""
    _, given = parse(arguments, OPTIONS)
    if "run" not in given:
        raise ConfigError("run=FOLDER is missing: the run to evaluate")
    run = Path(given["run"])
    if not (run / "config.yaml").is_file():
        raise ConfigError(f"run={run}: no run there (config.yaml not found)")
    n = whole(given, "n", 3, least=1)
    which = given.get("checkpoint", "last")
    folder = _checkpoint(run, which)
    name = "base" if folder is None else folder.name
    named: dict[str, Any] = {
        k: given[k] for k in ("tau2", "domain", "retrieval", "user", "user_api_base") if k in given
    }
    if given.get("domain", BANKING) != BANKING:
        named.setdefault("retrieval", None)
    tau = TauOptions(
        n=n,
        max_turns=whole(given, "max_turns", 100, least=1),
        tasks=whole(given, "tasks", 1, least=1) if "tasks" in given else None,
        **named,
    )
    settings = {"domain": tau.domain, "retrieval": tau.retrieval, "user": tau.user, "max_turns": tau.max_turns}
    if "results" in given:
        file = Path(given["results"])
        settings = _known(file, {k: v for k, v in settings.items() if k in given})
        # The tau2 at hand says nothing of a file that another one wrote.
        version = tau2_version(tau.tau2) if "tau2" in given else None
    else:
        file, version = _play(run, given, tau, folder, name), tau2_version(tau.tau2)
    prices, user_prices = prices_of(given.get("prices")), prices_of(given.get("user_prices"), "user_prices")
    content = parse_results(file, n=n, prices=prices, user_prices=user_prices)
    split = "tau_banking" if settings["domain"] == BANKING else f"tau_{settings['domain']}"
    out = run / "evaluations" / f"{split}-{name}-n{n}{f'-first{tau.tasks}' if tau.tasks else ''}.json"
    content["tau2"] = {"version": version, **content["tau2"]}
    write_json(out, {"run": str(run), "checkpoint": name, "split": split, **settings, **content})
    show(content)
    print(f"records: {out}")


def _known(file: Path, given: dict[str, Any]) -> dict[str, Any]:
    """What the file says of how it was made, and what is given where it does not say; nothing else is written.

    Raises:
        ConfigError: file and options differ.
    """
    stated = recorded_settings(file)
    for name in given.keys() & stated.keys():
        if given[name] != stated[name]:
            raise ConfigError(f"{file} was made with {name}={stated[name]}, not {given[name]}; leave {name}= out")
    known = {"domain": BANKING, **given, **stated}
    return known if known["domain"] == BANKING else {**known, "retrieval": None}  # it has no documents


def _checkpoint(run: Path, which: str) -> Path | None:
    if which == "base":
        return None
    if which == "last":
        return checkpoint.latest(run)
    folder = checkpoint.folder_of(run, int(which)) if which.isdigit() else None
    if folder is None or not folder.is_dir():
        raise ConfigError(f"checkpoint={which} is not there; use last, base or a step number")
    return folder


def _play(run: Path, given: dict[str, str], tau: TauOptions, folder: Path | None, name: str) -> Path:
    save_to = run / "tau2" / f"{tau.domain}-{name}-n{tau.n}"
    if "api_base" in given:
        return run_tau2(tau, f"openai/{given.get('model', 'policy')}", given["api_base"], save_to)
    with served(
        given.get("python", ".venv-vllm/bin/python"),
        str(OmegaConf.load(run / "config.yaml").policy.path),
        None if folder is None else folder / "adapter",
        tool_parser=given.get("tool_parser", "hermes"),
        port=whole(given, "port", 8010, least=1),
        folder=run / "tau2",
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
