"""`preflight=true`: try everything that a run needs once, at small scale, and print a table with the projected bill.

Nothing is left in the run folder.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from draco.core.distributed import alone, check_shared, main_only, rank, world_size
from draco.core.errors import ConfigError, DracoError
from draco.core.types import Group, Message, Step, Task, Termination, Trajectory
from draco.judge.bill import bill, projected
from draco.judge.records import CallRecord
from draco.judge.stage import JudgedRubric
from draco.policy.policy import Policy
from draco.run.build import Parts, build
from draco.run.conformance import conform
from draco.run.disk import check_disk
from draco.run.folder import check_free
from draco.run.loader import TaskLoader
from draco.stages import RubricStage

__all__ = ["preflight"]

T = TypeVar("T")

_NOT_TRIED = "not tried: something above failed"
_STEPS = 3  #: of the made-up rollouts that the judge is tried on


@dataclass(slots=True)
class _Table:
    """Results, in the order of the checks."""

    #: name of a check, passed (None: not tried), detail
    rows: list[tuple[str, bool | None, str]] = field(default_factory=list)

    @contextlib.contextmanager
    def check(self, name: str) -> Iterator[list[str]]:
        """A check: the body appends its details to the list. An exception becomes a failed row."""
        said: list[str] = []
        try:
            yield said
        except _Skip:
            self.rows.append((name, None, _NOT_TRIED))
        except DracoError as error:
            self.rows.append((name, False, str(error)))
        except Exception as error:  # a library may raise anything
            self.rows.append((name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"))
        else:
            self.rows.append((name, True, "; ".join(said)))

    def show(self, console: Console) -> None:
        """Print."""
        table = Table(title="preflight", title_justify="left")
        for column in ("check", "", "found"):
            table.add_column(column, overflow="fold")  # show paths in full
        for name, passed, detail in self.rows:
            mark = "[green]ok[/]" if passed else "[yellow]–[/]" if passed is None else "[red]FAILED[/]"
            table.add_row(name, mark, detail.replace("[", "\\["))
        console.print(table)


class _Skip(Exception):
    """Something that a check needs is missing, because an earlier check failed."""


def _need(found: T | None) -> T:
    if found is None:
        raise _Skip
    return found


def preflight(config: DictConfig, run: Path) -> None:
    """Try everything and print a table.

    Args:
        config: of the run.
        run: its folder.

    Raises:
        ConfigError: a check failed.
    """
    scratch = run / "preflight.tmp"
    if rank():
        with contextlib.suppress(DracoError):  # raised on all ranks; rank 0 shows it in its table
            _folder(config, run, scratch)
        return
    table = _Table()
    try:
        with table.check("run folder") as said:
            said.append(_folder(config, run, scratch))
        with alone():
            _try_parts(table, config, run, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    table.show(Console())
    if failed := [name for name, passed, _ in table.rows if passed is False]:
        raise ConfigError(f"preflight: {', '.join(failed)} failed; see the table above")


def _try_parts(table: _Table, config: DictConfig, run: Path, scratch: Path) -> None:
    """Check the parts of a run in the order in which it needs them."""
    parts: Parts | None = None
    with table.check("configuration") as said:
        parts = build(config)
        parts.open(scratch)
        said.append(f"rubric={config.rubric.name} credit={config.credit.name} env={config.env.name}")
    if parts is None:
        for name in ("environment", "engine", "judge", "policy and chat template", "tasks", "disk", "adapter"):
            table.rows.append((name, None, _NOT_TRIED))
    else:
        with closing(parts):
            _try_stages(table, parts, run, scratch)
    with table.check("GPU kernels") as said:
        said.append(_kernels())


def _try_stages(table: _Table, parts: Parts, run: Path, scratch: Path) -> None:
    config, rubric = parts.config, parts.stages.rubric
    longest = config.limits.max_prompt_tokens + config.limits.max_response_tokens
    policy: Policy | None = None
    loader: TaskLoader | None = None
    calls: list[CallRecord] = []
    with table.check("environment") as said:
        said.append(_environment(parts, config.env.train_split))
    with table.check("engine") as said:
        parts.engine.check()
        said.append(f"{type(parts.engine).__name__}: what it needs is there (servers are tried by a run)")
    if not rubric.asks_policy:
        with table.check("judge") as said:
            calls = _judge(parts, said)
    with table.check("policy and chat template") as said:
        parts.module.configure_model()
        policy = parts.module.policy
        verdict = conform(
            policy, packed=parts.module.packed, engine=parts.engine.in_process, temperature=config.temperature,
            longest=longest,
        )  # fmt: skip
        if verdict.kind == "refused":
            raise ConfigError(f"{config.policy.path} would not train as it is served: {verdict.reason}")
        said.append(f"{config.policy.path}; the template appends without rewriting; rows {verdict.line()}")
    with table.check("tasks") as said:
        _need(policy)
        loader, held_out = parts.load_tasks()
        said.append(f"{len(loader.tasks)} to train on, {sum(len(b.tasks) for b in held_out)} of {config.eval.split}")
    with table.check("disk") as said:
        disk = check_disk(run, _need(policy), _need(loader), config.checkpoint, longest, refuse=True)
        said.append(disk.removeprefix("disk: "))
    with table.check("adapter") as said:
        said.append(_adapter(_need(policy), scratch))
    if rubric.asks_policy:
        with table.check("judge") as said:
            _need(policy)
            parts.ready()  # its engine answers
            calls = _judge(parts, said)
            said.append(f"{calls[0].model} answers all calls" if calls else "nothing was asked")
    if calls and loader is not None:
        _bill(table, config, rubric, calls, loader)


def _folder(config: DictConfig, run: Path, scratch: Path) -> str:
    """Rank 0 can write to the run folder, and every process sees it."""

    def make() -> None:
        if not config.resume:
            check_free(run, overwrite=config.overwrite)
        scratch.mkdir(parents=True, exist_ok=True)

    main_only(make)
    check_shared(run)
    return f"{run} is writable, seen by {world_size()} process(es)"


def _environment(parts: Parts, split: str) -> str:
    environment, evaluator = parts.environment, parts.evaluator
    environment.check()
    task = environment.tasks(split)[0]
    episode = environment.open(task, seed=0)
    try:
        state = episode.end_state()
    finally:
        episode.close()
    said = f"opened {task.id}"
    if evaluator is None:
        return f"{said}; no evaluator"
    outcome = evaluator.evaluate(task, state)
    if outcome.success is None:
        raise ConfigError(f"the evaluator of env={environment.name} failed: {outcome.error or 'no result'}")
    return f"{said}; its evaluator works"


def _judge(parts: Parts, said: list[str]) -> list[CallRecord]:
    """Make one cheap call, then every kind of call on a made-up group of two rollouts."""
    rubric, config = parts.stages.rubric, parts.config
    if not isinstance(rubric, JudgedRubric):
        said.append(f"rubric={config.rubric.name} asks none")
        return []
    if (first := rubric.ping()) is not None:
        said.append(f"{first.model} answers in JSON, {first.latency_s:.2g} s")
        if first.served_model not in ("", first.model):
            said.append(f"served as {first.served_model}")
    (judgement,) = rubric.judge([_made_up(parts.environment, config.env.train_split)])
    calls = [c for c in rubric.take().calls if c.tokens_in]  # attempts without an answer have no tokens
    if judgement.failures:
        last = judgement.failures[-1]
        raise ConfigError(f"{len(judgement.failures)} of 2 judgements failed, in {last.phase}: {last.reason}")
    return calls


def _made_up(environment: Any, split: str) -> Group:
    """A group of two short rollouts of a real task; their steps are made up."""
    task: Task = environment.tasks(split)[0]
    opening = environment.opening(task)
    members = []
    for sample in range(2):
        steps = tuple(
            Step(j, (0, 0), f"I look at item {j} of list {sample}.", "nothing there", j) for j in range(1, _STEPS + 1)
        )
        members.append(
            Trajectory(
                task, sample, (*opening, Message("assistant", steps[0].action)), (), (), (), steps,
                Termination.SUBMITTED, 0, 0, 0,
            )
        )  # fmt: skip
    return Group(task, tuple(members))


def _adapter(policy: Policy, scratch: Path) -> str:
    """Change the adapter: the output must change, stay equal after save and load, and come back at the end."""
    if torch.cuda.is_available():
        policy.to("cuda")
    ids = torch.tensor([policy.chat.encode_text("a quick look before a long run")], device=policy.device)
    weights = {n: p for n, p in policy.named_parameters() if p.requires_grad}
    before = {n: p.detach().clone() for n, p in weights.items()}

    def logits() -> torch.Tensor:
        out: torch.Tensor = policy.model(input_ids=ids).logits.float()
        return out

    with torch.no_grad(), policy.sampling():
        plain = logits()
        try:
            for parameter in weights.values():
                parameter.add_(0.02)
            changed = logits()
            policy.save_adapter(scratch / "adapter")
            for parameter in weights.values():
                parameter.zero_()
            policy.load_adapter(scratch / "adapter")
            again = logits()
        finally:
            for name, parameter in weights.items():
                parameter.copy_(before[name])
        restored = logits()
    if torch.equal(plain, changed):
        raise ConfigError("a changed adapter does not change the model's output: policy.targets names no used layer")
    if not torch.equal(changed, again) or not torch.equal(plain, restored):
        raise ConfigError("the model's output differs after its adapter was saved and loaded")
    return f"{sum(p.numel() for p in weights.values()):,} parameters; takes effect, saves and loads"


def _kernels() -> str:
    if not torch.cuda.is_available():
        return "no GPU: the CPU trains"
    x = torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    if x.grad is None or not bool(torch.isfinite(x.grad).all()):
        raise ConfigError("attention in bfloat16 gives no finite gradient on this GPU")
    return f"{torch.cuda.get_device_name()}: bfloat16 attention forward and backward"


def _bill(table: _Table, config: DictConfig, rubric: RubricStage, calls: list[CallRecord], loader: TaskLoader) -> None:
    """Add a row for each kind of call, and one with the most that the run may cost."""
    assert isinstance(rubric, JudgedRubric)
    with table.check("projected bill") as said:
        limits = (config.limits.max_prompt_tokens, config.limits.max_response_tokens, config.limits.max_turns)
        lines = list(projected(calls, config.group_size, limits, rubric.client.transport.price))
        for phase in dict.fromkeys(line.phase for line in lines):
            one = next(c for c in calls if c.phase == phase)
            paid = "unknown price" if one.cost_usd is None else f"{one.cost_usd:.4g} USD"
            table.rows.append(
                (f"  call: {phase}", True, f"{one.tokens_in} tokens in, {one.tokens_out} out, {paid}, {one.outcome}")
            )
        groups = (loader.steps - loader.position) * config.tasks_per_step
        each = bill(lines)
        tokens = (each["tokens_in"] + each["tokens_out"]) * groups
        price = "price unknown (set judge.prices)" if each["usd"] is None else f"{each['usd'] * groups:,.2f} USD"
        said.append(
            f"{groups} groups × {each['calls']:.0f} calls, rollouts as long as limits allow, no prefix cache, no "
            f"retries: at most {tokens / 1e6:,.3g} million tokens, {price}"
        )
