"""GRPOModule: call order, exact gradients, guards. Rollouts are typed; forward, backward and optimizer are real."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from conftest import EchoEnvironment, EchoEvaluator, TypedEngine, rollout_of
from lightning.pytorch import Trainer

from callbacks.credit.uniform import UniformCredit
from callbacks.rollout import AgentRollout
from draco.core.errors import ConfigError, StageError, TrainingStopped
from draco.core.types import Credit, Group, Judgement, Task, TaskBatch
from draco.module import GRPOModule, LossOptions, StepRecord, UpdateOptions
from draco.policy.policy import Policy
from draco.rollout.rollout import Limits, Rollout
from draco.run.loader import EvalLoader, TaskLoader
from draco.stages import CreditStage, RolloutStage, RubricStage, find_stage
from draco.update.gradients import Totals

DONE = "<code>done</code>"


class Rewards(RubricStage):
    """Rewards by sample number; groups named in `skip` are lost."""

    gives_citations = False

    def __init__(self, rewards: Callable[[Group], list[float]], log: list[str] | None = None) -> None:
        self.rewards, self.journal = rewards, log if log is not None else []

    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        for group in groups:
            self.journal.append(f"judge {group.index}")
            live = group.live()
            yield Judgement(live, (), (), (), tuple(self.rewards(live)))


def make_trainer(callbacks: list[Any], **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu", callbacks=callbacks, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, max_epochs=1, **options,
    )  # fmt: skip


def script(rollout: Rollout) -> list[str]:
    turns = [f"<code>{'a' * (rollout.sample + 1)}</code>", "<code>b</code>"]
    return [*turns[: rollout.sample + 1], DONE]


def make_module(policy: Callable[[], Policy], **options: Any) -> GRPOModule:
    return GRPOModule(policy, lambda p: torch.optim.SGD(p, lr=0.1), **options)


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
    module = make_module(policy, **options)
    stages = [
        AgentRollout(environment, TypedEngine(script), Limits()),
        Rewards(rewards),
        credit or UniformCredit(),
    ]
    loader = TaskLoader(environment.tasks("train"), steps=steps, tasks_per_step=2, group_size=3, seed=0)
    make_trainer(stages).fit(module, train_dataloaders=loader)
    return module


def gradients(module: GRPOModule, credits: list[Credit]) -> torch.Tensor:
    """Flat gradient of the divided loss, before clipping."""
    module.record = StepRecord(0)
    for parameter in module.trainable():
        parameter.grad = None
    grabbed: list[torch.Tensor] = []

    def step(part: Totals) -> float:
        denominator = module.loss_options.denominator(part.sums["tokens"], part.sums["trajectories"])
        grabbed.append(torch.cat([p.grad.flatten() / denominator for p in module.trainable() if p.grad is not None]))
        return 0.0

    module._optimizer_step = step  # type: ignore[method-assign,assignment]
    module.update(credits)
    return grabbed[0]


class _Null(RolloutStage):
    def generate(self, policy: Policy, batch: TaskBatch) -> Iterator[Group]:
        return iter(())


def prepared(policy: Callable[[], Policy], **options: Any) -> GRPOModule:
    """A module ready for `update` outside a trainer."""
    module = make_module(policy, **options)
    module.configure_model()
    module.rollout, module.rubric, module.credit = _Null(), Rewards(lambda g: []), UniformCredit()
    module.manual_backward = lambda loss: loss.backward()  # type: ignore[method-assign,assignment]
    return module


def credits_of(policy: Policy, groups: int = 3, members: int = 3) -> list[Credit]:
    """Typed groups with step credit that differs over steps."""
    out = []
    for index in range(groups):
        trajectories = [
            rollout_of(policy.chat, ["<code>" + "xyz"[: 1 + (index + s) % 3] + "</code>"] * (1 + s) + [DONE], sample=s)
            for s in range(members)
        ]
        group = Group(Task(f"t{index}", "", "train", "s"), tuple(r.trajectory() for r in trajectories), index)
        advantages = tuple(float(s - 1) for s in range(members))
        steps = tuple(
            tuple(a * (1 + j) / 2 for j in range(len(t.steps)))
            for a, t in zip(advantages, group.trajectories, strict=True)
        )
        judgement = Judgement(group, (), (), (), advantages)
        out.append(Credit(judgement, advantages, steps, ((),) * members, ("uniform",) * members))
    return out


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


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


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
    module = LoggedModule(new_policy, lambda p: torch.optim.SGD(p, lr=0.1))
    loader = TaskLoader(environment.tasks("train"), steps=1, tasks_per_step=2, group_size=3, seed=0)
    make_trainer(stages).fit(module, train_dataloaders=loader)
    assert log == [
        "rollout 0", "judge 0", "credit 0",
        "rollout 1", "judge 1", "credit 1",
        "backward", "step",
    ]  # fmt: skip


def test_a_missing_or_second_stage_is_named() -> None:
    with pytest.raises(StageError, match=r"exactly one CreditStage .* found no; callbacks: Rewards"):
        find_stage([Rewards(lambda g: [])], CreditStage)  # type: ignore[type-abstract]
    with pytest.raises(StageError, match=r"found 2 \(UniformCredit, UniformCredit\)"):
        find_stage([UniformCredit(), UniformCredit()], CreditStage)  # type: ignore[type-abstract]


def test_the_trainer_refuses_before_any_rollout(new_policy: Callable[[], Policy]) -> None:
    environment = EchoEnvironment()
    module = make_module(new_policy)
    loader = TaskLoader(environment.tasks("train"), steps=1, tasks_per_step=2, group_size=3, seed=0)
    with pytest.raises(StageError, match="RubricStage"):
        make_trainer([AgentRollout(environment, TypedEngine(script), Limits()), UniformCredit()]).fit(module, loader)
    assert environment.opened == []


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
    module = prepared(lambda: Policy("pkg://draco.policy.tiny"))  # a fresh adapter is the identity
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
    members = len(credit.advantages)
    steps = tuple(tuple(0.0 for _ in a) for a in credit.step_advantages)
    return Credit(credit.judgement, (0.0,) * members, steps, credit.qualities, credit.reasons, zero_std=True)


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
    empty = Credit(Judgement(Group(Task("x", "", "train", "s"), (), 9), (), (), (), ()), (), (), (), ())
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
        steps = tuple(tuple(math.nan for _ in a) for a in credit.step_advantages)
        return Credit(judgement, credit.advantages, steps, credit.qualities, credit.reasons)


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
    module = make_module(new_policy, evaluator=EchoEvaluator())
    stages = [AgentRollout(environment, TypedEngine(script), Limits()), Rewards(lambda g: []), UniformCredit()]
    held_out = EvalLoader(environment.tasks("test"), n=2, temperature=1.0)
    make_trainer(stages).validate(module, dataloaders=held_out, verbose=False)
    assert [r.success for r in module.validation_records] == [True] * 4
    assert torch.equal(weights(module), torch.cat([p.flatten() for p in new_policy().parameters() if p.requires_grad]))


def test_bad_options_are_named() -> None:
    with pytest.raises(ConfigError, match="zero_signal is 'maybe'"):
        LossOptions(zero_signal="maybe")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="order is 'random'"):
        UpdateOptions(order="random")  # type: ignore[arg-type]
