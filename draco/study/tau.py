"""τ-bench Banking: the user's own `tau2` as a subprocess, its results read and counted here.

tau2 is never imported, and nothing of it reaches training. Its own metrics leave out runs that ended in an
infrastructure error (malformed tool calls, empty replies and context overflows among them), which flatters weak
policies. Here such runs, and missing runs, count as failures over tasks × n, and their number stands beside the score.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draco.core.errors import ConfigError, EnvironmentFault
from draco.core.files import read_lines
from draco.core.llm.money import Prices, Usage
from draco.core.types import Termination
from draco.env.records import EvalRecord
from draco.env.success import summarise
from draco.study import tau_judge

__all__ = [
    "BANKING",
    "ENDS",
    "TauOptions",
    "judge_log",
    "judge_usage",
    "parse_results",
    "recorded_settings",
    "run_tau2",
    "tau2_command",
    "tau2_version",
]

BANKING = "banking_knowledge"  #: the domain of τ-bench Banking
_CONCURRENCY = 8  #: conversations at a time

#: tau2's `termination_reason` → ours. Faults of its user simulator or its machinery are not the agent's
ENDS = {
    "user_stop": Termination.SUBMITTED, "agent_stop": Termination.SUBMITTED, "max_steps": Termination.TURN_LIMIT,
    "too_many_errors": Termination.GAVE_UP, "agent_error": Termination.NO_ACTION,
    "infrastructure_error": Termination.ENVIRONMENT_ERROR, "user_error": Termination.ENVIRONMENT_ERROR,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TauOptions:
    """How tau2 is run."""

    tau2: str = "tau2"  #: executable, of its own virtual environment
    domain: str = BANKING
    retrieval: str | None = "alltools-qwen"  #: Qwen embeddings (Appendix D); None: a domain without documents
    user: str = "openai/gpt-5.4"  #: litellm's name of the user simulator
    judge: str | None = "openai/gpt-5.4"  #: the same of the model that decides assertions in words; None: tau2's own
    user_api_base: str | None = None
    n: int = 3
    max_turns: int = 100  #: agent turns; tau2 counts every message, of which a turn has two: its own and the answer
    tasks: int | None = None  #: the first so many; None = all


def tau2_command(options: TauOptions, model: str, api_base: str, save_to: Path) -> list[str]:
    """Command line of one evaluation; `model` is litellm's name. No key is in it: tau2 keeps its arguments."""
    command = [
        *launcher(options.tau2, options.judge, judge_log(save_to)), "run", "--domain", options.domain,
        "--agent-llm", model,
        "--agent-llm-args", json.dumps({"api_base": api_base, "temperature": 1.0}), "--user-llm", options.user,
        "--user-llm-args", json.dumps({"api_base": options.user_api_base} if options.user_api_base else {}),
        "--num-trials", str(options.n), "--max-steps", str(2 * options.max_turns),
        "--max-concurrency", str(_CONCURRENCY), "--save-to", str(save_to),
    ]  # fmt: skip
    command += ["--retrieval-config", options.retrieval] if options.retrieval else []
    return command + (["--num-tasks", str(options.tasks)] if options.tasks else [])


def launcher(executable: str, judge: str | None, log: Path) -> list[str]:
    """How tau2 is started: by its own Python, so that the judge inside it is `judge` and what it uses is logged.

    tau2 names that judge in a constant and records no cost of it. Without `judge`, or where the executable has no
    Python beside it, tau2 is started as it is and has its own judge.
    """
    python = _python(executable)
    return (
        [executable]
        if python is None or judge is None
        else [str(python), str(Path(tau_judge.__file__)), judge, str(log)]
    )


def judge_log(save_to: Path) -> Path:
    """Where the tokens of tau2's judge go: one JSON line a call."""
    return save_to.with_name(f"{save_to.name}-judge.jsonl")


def judge_usage(log: Path) -> Usage | None:
    """Tokens of tau2's judge; None where they were not logged."""
    if not log.is_file():
        return None
    rows = read_lines(log)
    return Usage(*(sum(int(row.get(k) or 0) for row in rows) for k in ("prompt_tokens", "completion_tokens")))


def _python(executable: str) -> Path | None:
    """The interpreter of the environment that an executable belongs to."""
    found = shutil.which(executable)
    python = Path(found).absolute().parent / "python" if found else None
    return python if python is not None and python.is_file() else None


def run_tau2(options: TauOptions, model: str, api_base: str, save_to: Path, *, key: str | None = None) -> Path:
    """Run tau2 and return its results file. `key` is that of the server behind ``hosted_vllm/…`` models.

    Raises:
        ConfigError: no such executable, or results of an earlier run are in the way.
        EnvironmentFault: it failed, or left no results; the message ends with its last lines.
    """
    if shutil.which(options.tau2) is None:
        raise ConfigError(
            f"tau2={options.tau2} is no executable; install tau2-bench with its extras [knowledge,gym] into its own "
            "environment (Python 3.12 or 3.13) and pass tau2=/path/to/bin/tau2"
        )
    if found := _results(save_to):
        raise ConfigError(f"{found} is there already; tau2 would go on with it: move it away, or read it with results=")
    save_to.parent.mkdir(parents=True, exist_ok=True)
    environment = {"OPENAI_API_KEY": "none", **os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    if key:
        environment["HOSTED_VLLM_API_KEY"] = key
    done = subprocess.run(
        tau2_command(options, model, api_base, save_to.resolve()), env=environment, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    file = _results(save_to)
    if done.returncode or file is None:
        last = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        left = "no results" if file is None else f"partial results in {file} (results= counts them, the rest as failed)"
        raise EnvironmentFault(f"tau2 ended with status {done.returncode} and left {left}:\n{last}")
    return file


def tau2_version(executable: str) -> str | None:
    """Name and version of the distribution that an executable belongs to; None where its environment does not say.

    Results hold a commit only, and it is that of the working directory, whatever project lies there.
    """
    python = _python(executable)
    if python is None:
        return None
    code = (
        "from importlib.metadata import packages_distributions as p, version as v\n"
        "print(*sorted(n + ' ' + v(n) for n in set(p().get('tau2', ()))), sep=', ')"
    )
    done = subprocess.run([str(python), "-I", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def _results(save_to: Path) -> Path | None:
    """Where tau2 versions put what `--save-to` names."""
    places = (save_to / "results.json", save_to.with_name(save_to.name + ".json"), save_to)
    return next((p for p in places if p.is_file()), None)


def parse_results(
    file: Path, *, n: int, prices: Prices | None = None, user_prices: Prices | None = None,
    judge_prices: Prices | None = None, judge: Usage | None = None,
) -> dict[str, Any]:  # fmt: skip
    """An evaluation of a results file, in the shape of every other.

    Args:
        file: results.json of tau2.
        n: trials a task that were asked for; a trial that is not there has failed.
        prices: of the agent's tokens (tau2 does not tell apart what is read again).
            tau2 knows no price of a local model and writes 0.
        user_prices, judge_prices: the same of the user simulator and of the judge.
        judge: tokens of the judge, see `judge_usage`; None: unknown, and in no cost.

    Raises:
        ConfigError: not such a file; the message names the entry and the field.
    """
    content, info = _read(file)
    simulations = content["simulations"]
    if info.get("num_trials", n) != n:
        raise ConfigError(f"{file} was run with {info['num_trials']} trials a task; pass n={info['num_trials']}")
    tasks = [str(t["id"]) for t in content.get("tasks") or () if isinstance(t, Mapping) and "id" in t]
    runs: dict[str, list[EvalRecord]] = {t: [] for t in tasks}
    usage: dict[str, list[int]] = {"agent": [0, 0], "user": [0, 0]}
    errors = 0
    for i, simulation in enumerate(simulations):
        record = _record(simulation, f"{file}, simulation {i}", usage)
        errors += record.termination == "environment_error"
        runs.setdefault(record.task_id, []).append(record)
    extra = {t: len(r) for t, r in runs.items() if len(r) > n}
    if extra:
        raise ConfigError(
            f"{file}: {len(extra)} tasks have more than n={n} simulations; pass the n that it was run with"
        )
    missing = sum(n - len(r) for r in runs.values())
    records = [
        record
        for task, found in runs.items()
        for record in (*_numbered(found), *(_missing(task, s) for s in range(len(found), n)))
    ]
    agent_usd, user_usd = (
        None if price is None else price.cost(Usage(*usage[who]))
        for who, price in (("agent", prices), ("user", user_prices))
    )
    judge_usd = judge_prices.cost(judge) if judge is not None and judge_prices is not None else None
    parts = [agent_usd, user_usd, *([judge_usd] if judge is not None and judge.tokens_in + judge.tokens_out else [])]
    return {
        **summarise(records),
        "infrastructure_errors": errors,
        "missing": missing,
        "cost_usd": None if None in parts or not n else sum(p for p in parts if p is not None) / n,
        "agent_cost_usd": agent_usd,
        "user_cost_usd": user_usd,
        "judge_cost_usd": judge_usd,
        "judge_tokens": None if judge is None else [judge.tokens_in, judge.tokens_out],
        "tau2": {k: info[k] for k in ("version", "num_trials", "max_steps", "seed") if k in info},
        "records": [r.as_dict() for r in records],
    }


def recorded_settings(file: Path) -> dict[str, Any]:
    """How a results file says that it was made: of domain, retrieval, user and max_turns those that it states.

    Raises:
        ConfigError: not such a file.
    """
    _, info = _read(file)
    environment, user = info.get("environment_info"), info.get("user_info")
    steps = info.get("max_steps")
    stated = {
        "domain": environment.get("domain_name") if isinstance(environment, Mapping) else None,
        "retrieval": info.get("retrieval_config"),
        "user": user.get("llm") if isinstance(user, Mapping) else None,
        "max_turns": steps // 2 if isinstance(steps, int) else None,
    }
    known = {k: v for k, v in stated.items() if isinstance(v, str | int)}
    if not re.fullmatch(r"[\w-]+", str(known.get("domain", BANKING))):  # files are named after it
        raise ConfigError(f"{file}: field 'info.environment_info.domain_name' is {known['domain']!r}, expected a name")
    return known


def _read(file: Path) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """A results file and its `info`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no results file of tau2: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("simulations"), list):
        raise ConfigError(f"{file}: expected a list under 'simulations'; is it a results file of tau2?")
    info = content.get("info")
    return content, info if isinstance(info, Mapping) else {}


def _record(simulation: Any, where: str, usage: Mapping[str, list[int]]) -> EvalRecord:
    if not isinstance(simulation, Mapping) or not isinstance(simulation.get("task_id"), str | int):
        raise ConfigError(f"{where}: field 'task_id' is missing")
    reason = str(simulation.get("termination_reason") or "").rpartition(".")[2].lower()
    reward = (simulation.get("reward_info") or {}).get("reward")
    if reward is not None and not isinstance(reward, int | float):
        raise ConfigError(f"{where}: field 'reward_info.reward': expected a number, got {reward!r}")
    turns = written = 0
    messages = simulation.get("messages") or ()
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"{where}: field 'messages'[{i}]: expected an object, got {type(message).__name__}")
        who = {"assistant": "agent", "user": "user"}.get(str(message.get("role")))
        spent = message.get("usage") or {}
        if who == "agent" and (i or spent):  # tau2 itself says the greeting that opens a conversation
            turns += 1
            written += int(spent.get("completion_tokens") or 0)
        if who:
            usage[who][0] += int(spent.get("prompt_tokens") or 0)
            usage[who][1] += int(spent.get("completion_tokens") or 0)
    end = ENDS.get(reason)
    failed = end is Termination.ENVIRONMENT_ERROR
    task = str(simulation["task_id"])
    return EvalRecord(
        task_id=task,
        scenario_id=task,
        difficulty=0,
        sample=int(simulation.get("trial") or 0),
        success=not failed and reward is not None and reward >= 1.0,
        termination=str(end or reason or Termination.UNKNOWN),
        turns=turns,
        step_tokens=written,
        error="quarantined: infrastructure_error" if failed else "" if reason else "no termination reason",
    )


def _numbered(found: Sequence[EvalRecord]) -> list[EvalRecord]:
    """Trials 0, 1, … whatever tau2 called them, so that no two of a task coincide."""
    return [replace(r, sample=i) for i, r in enumerate(sorted(found, key=lambda r: r.sample))]


def _missing(task: str, sample: int) -> EvalRecord:
    return EvalRecord(
        task, task, 0, sample, False, "environment_error", 0, 0, error="quarantined: no simulation in the results"
    )
