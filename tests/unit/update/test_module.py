"""GRPOModule: call order, exact gradients, guards. Rollouts are typed; forward, backward and optimizer are real."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.echo import EchoEnvironment, EchoEvaluator, TypedEngine
from support.factory import credit_of, credits_of, with_step_advantages
from support.models import relative
from support.module import Rewards, _Null, gradients, make_module, make_trainer, prepared, script
from support.policies import TINY

from callbacks.credit.uniform import UniformCredit
from callbacks.rollout import AgentRollout
from draco.core.errors import ConfigError, StageError, TrainingStopped
from draco.core.types import Credit, Group, Judgement, Task, TaskBatch
from draco.module import GRPOModule
from draco.policy.policy import Policy
from draco.rollout.loop import Limits
from draco.run.loader import EvalLoader, TaskLoader
from draco.stages import CreditStage, Stages
from draco.update.options import LossOptions, UpdateOptions


def run(
    policy: Callable[[], Policy],
    *,
    rewards: Callable[[Group], list[float]] = lambda g: [float(t.sample) for t in g.trajectories],
    environment: EchoEnvironment | None = None,
    steps: int = 1,
    credit: CreditStage | None = None,
    **options: Any,
) -> GRPOModule:
    environment = environment or EchoEnvironment()
    stages = [
        AgentRollout(environment, TypedEngine(script), Limits()),
        Rewards(rewards),
        credit or UniformCredit(),
    ]
    module = make_module(policy, stages, **options)
    loader = TaskLoader(environment.tasks("train"), steps=steps, tasks_per_step=2, group_size=3, seed=0)
    make_trainer(stages).fit(module, train_dataloaders=loader)
    return module


def brute_force(policy: Policy, credits: list[Credit], kl_coef: float) -> torch.Tensor:
    """One trajectory at a time, full logits, autograd through log_softmax, one division at the end."""
    total, tokens = torch.zeros(()), 0
    for credit in credits:
        for t, advantages in zip(credit.judgement.group.trajectories, credit.step_advantages, strict=True):
            ids = torch.tensor([t.token_ids])

            def logprobs(ids: torch.Tensor = ids) -> torch.Tensor:
                logits = policy.model(input_ids=ids, use_cache=False).logits[0, :-1]
                return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)

            current = logprobs()
            with torch.no_grad(), policy.reference():
                reference = logprobs()
            for i, j in enumerate(t.step_of):
                if j >= 0:
                    d = reference[i - 1] - current[i - 1]
                    ratio = (current[i - 1] - current[i - 1].detach()).exp()
                    total = total - advantages[j] * ratio + kl_coef * (d.exp() - d - 1)
                    tokens += 1
    parameters = [p for p in policy.parameters() if p.requires_grad]
    return torch.cat([g.flatten() / tokens for g in torch.autograd.grad(total, parameters)])


# --- order ---


def test_stages_run_in_program_order_and_stream(new_policy: Callable[[], Policy]) -> None:
    log: list[str] = []

    class LoggedRollout(AgentRollout):
        def generate(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
            for group in super().generate(policy, batch):
                log.append(f"rollout {group.index}")
                yield group

    class LoggedCredit(UniformCredit):
        def assign_one(self, judgement: Judgement) -> Credit:
            log.append(f"credit {judgement.group.index}")
            return super().assign_one(judgement)

    class LoggedModule(GRPOModule):
        def _backward(self, *args: Any) -> None:
            log.append("backward")
            super()._backward(*args)

        def _optimizer_step(self, *args: Any) -> float:
            log.append("step")
            return super()._optimizer_step(*args)

    environment = EchoEnvironment()
    stages = [  # the order of this list does not matter
        LoggedCredit(),
        Rewards(lambda g: [float(t.sample) for t in g.trajectories], log),
        LoggedRollout(environment, TypedEngine(script), Limits()),
    ]
    module = LoggedModule(new_policy, lambda p: torch.optim.SGD(p, lr=0.1), Stages.of(stages))
    loader = TaskLoader(environment.tasks("train"), steps=1, tasks_per_step=2, group_size=3, seed=0)
    make_trainer(stages).fit(module, train_dataloaders=loader)
    assert log == [
        "rollout 0", "judge 0", "credit 0",
        "rollout 1", "judge 1", "credit 1",
        "backward", "step",
    ]  # fmt: skip


def test_a_missing_or_second_stage_is_named() -> None:
    with pytest.raises(StageError, match=r"exactly one CreditStage .* found no; callbacks: _Null, Rewards"):
        Stages.of([_Null(), Rewards(lambda g: [])])
    with pytest.raises(StageError, match=r"found 2 \(UniformCredit, UniformCredit\)"):
        Stages.of([_Null(), Rewards(lambda g: []), UniformCredit(), UniformCredit()])


# --- gradients ---


def test_gradient_is_that_of_the_brute_force_loss(new_policy: Callable[[], Policy]) -> None:
    module = prepared(new_policy)
    credits = credits_of(module.policy)
    expected = brute_force(module.policy, credits, 0.01)
    assert relative(gradients(module, credits), expected) < 1e-5


def test_kl_is_against_the_adapter_off_reference(new_policy: Callable[[], Policy]) -> None:
    module = prepared(new_policy, loss=LossOptions(kl_coef=5.0))
    credits = credits_of(module.policy)
    assert relative(gradients(module, credits), brute_force(module.policy, credits, 5.0)) < 1e-5
    assert module.record is not None
    assert module.record.metrics["update/kl"] > 0
    module = prepared(lambda: Policy(TINY))  # a fresh adapter is the identity
    gradients(module, credits)
    assert module.record is not None
    assert module.record.metrics["update/kl"] == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("tokens", [1, 200, 10**6])
def test_gradient_does_not_depend_on_the_micro_batch_split(new_policy: Callable[[], Policy], tokens: int) -> None:
    whole = prepared(new_policy)
    credits = credits_of(whole.policy)
    expected = gradients(whole, credits)
    split = prepared(new_policy, update=UpdateOptions(micro_batch_tokens=tokens))
    assert relative(gradients(split, credits), expected) < 1e-6


def test_gradient_does_not_depend_on_arrival(new_policy: Callable[[], Policy]) -> None:
    batch = prepared(new_policy)
    credits = credits_of(batch.policy)
    expected = gradients(batch, credits)
    assert torch.equal(gradients(prepared(new_policy), credits[::-1]), expected)  # batch order: to the bit
    arrival = prepared(new_policy, update=UpdateOptions(order="arrival"))
    assert relative(gradients(arrival, credits[::-1]), expected) < 1e-6
    assert arrival.record is not None
    assert arrival.record.credits == batch.record.credits == credits  # as archive and metrics see them


def zeroed(credit: Credit) -> Credit:
    return replace(with_step_advantages(credit, 0.0), advantages=(0.0,) * len(credit.advantages), zero_std=True)


def test_zero_signal_groups_stay_or_go(new_policy: Callable[[], Policy]) -> None:
    keep = prepared(new_policy)
    credits = credits_of(keep.policy)
    mixed = [credits[0], zeroed(credits[1])]
    drop = prepared(new_policy, loss=LossOptions(zero_signal="drop"))
    alone = prepared(new_policy)
    assert torch.equal(gradients(drop, mixed), gradients(alone, credits[:1]))
    assert relative(gradients(keep, mixed), brute_force(keep.policy, mixed, 0.01)) < 1e-5


def test_skipped_groups_and_quarantined_members_change_nothing(new_policy: Callable[[], Policy]) -> None:
    module = prepared(new_policy)
    credits = credits_of(module.policy)
    expected = gradients(module, credits)
    empty = credit_of(Group(Task("x", "", "train", "s"), (), 9), [], 0.0, 0.0)
    assert torch.equal(gradients(prepared(new_policy), [empty, *credits]), expected)


# --- steps and guards ---


def weights(module: GRPOModule) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.trainable()])


def test_one_optimizer_step_a_batch_and_only_the_adapter_moves(new_policy: Callable[[], Policy]) -> None:
    module = run(new_policy, steps=2)
    before = new_policy()
    assert (module.batches_done, module.policy.version, module.global_step) == (2, 2, 2)
    for (name, a), (_, b) in zip(module.policy.named_parameters(), before.named_parameters(), strict=True):
        assert torch.equal(a, b) == ("lora_" not in name), name


def test_a_batch_without_tokens_counts_but_makes_no_step(new_policy: Callable[[], Policy]) -> None:
    class Faulty(EchoEnvironment):
        def open(self, task: Task, *, seed: int) -> Any:
            raise OSError("no disk")

    module = run(new_policy, rewards=lambda g: [], environment=Faulty(), steps=2)
    assert (module.batches_done, module.policy.version, module.global_step) == (2, 0, 0)
    assert module.record is not None
    assert module.record.metrics["rollout/quarantined"] == 6
    assert module.record.groups[0].trajectories[0].error == "open: OSError: no disk"


class Poison(UniformCredit):
    """NaN advantages from batch `start` on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def assign_one(self, judgement: Judgement) -> Credit:
        credit = super().assign_one(judgement)
        if judgement.group.step < self.start:
            return credit
        return with_step_advantages(credit, math.nan)


def test_a_nan_step_is_skipped_and_counted(new_policy: Callable[[], Policy]) -> None:
    module = run(new_policy, steps=2, credit=Poison(1))
    clean = run(new_policy, steps=1)
    assert torch.equal(weights(module), weights(clean))
    assert (module.batches_done, module.policy.version) == (2, 1)
    assert module.record is not None
    assert module.record.metrics["update/bad_steps"] == 1


def test_nan_steps_in_a_row_stop_the_run(new_policy: Callable[[], Policy]) -> None:
    with pytest.raises(TrainingStopped, match="2 optimizer steps in a row"):
        run(new_policy, steps=5, credit=Poison(0), update=UpdateOptions(max_bad_steps=2))


def test_validation_reads_the_evaluator_and_touches_no_weight(new_policy: Callable[[], Policy]) -> None:
    environment = EchoEnvironment()
    stages = [AgentRollout(environment, TypedEngine(script), Limits()), Rewards(lambda g: []), UniformCredit()]
    module = make_module(new_policy, stages, evaluator=EchoEvaluator())
    held_out = EvalLoader(environment.tasks("test"), n=2, temperature=1.0)
    make_trainer(stages).validate(module, dataloaders=held_out, verbose=False)
    assert [r.success for r in module.validation_records] == [True] * 4
    assert torch.equal(weights(module), torch.cat([p.flatten() for p in new_policy().parameters() if p.requires_grad]))


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match="zero_signal is 'maybe'"):
        LossOptions(zero_signal="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="order is 'random'"):
        UpdateOptions(order="random")  # type: ignore[arg-type]
