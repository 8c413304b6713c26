"""The policy as its own judge: the in-process provider, k unanimous calls, what is refused beforehand."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest
from support.desk_rollouts import play
from support.echo import type_out
from support.factory import group
from support.fake_judge import FakeJudge, client

from callbacks.rubric.self_judge import SelfJudgeRubric
from draco.config.compose import compose_config
from draco.core.errors import ConfigError, TrainingStopped
from draco.core.types import Group, Message
from draco.env.desk.environment import DeskEnvironment
from draco.env.desk.evaluator import FAULTS
from draco.env.desk.judge.reading import read_prompt
from draco.env.desk.judge.replies import reply
from draco.judge import local
from draco.judge.client import JudgeClient
from draco.judge.stage import Busy
from draco.judge.views.size import needed_context
from draco.policy.chat import ChatFormat
from draco.policy.policy import Policy
from draco.rollout.engines import Engine
from draco.rollout.engines.transformers import TransformersEngine
from draco.rollout.rollout import Rollout
from draco.stages import RunContext


def policy_client(**options: Any) -> JudgeClient:
    defaults: dict[str, Any] = {"max_retries": 0, "timeout_s": 60.0, "response_schema": "off", "concurrency": 256}
    return JudgeClient("draco-policy/current", provider="draco.judge.local:register", **(defaults | options))


class ScriptedEngine(Engine):
    """An engine whose policy answers as the scripted judge does; the n-th score call of a prompt may be doctored."""

    def __init__(self, doctor: Any = None) -> None:
        self.doctor, self.asked, self.seeds = doctor, [], []  # type: ignore[var-annotated]

    def run(self, policy: object, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        for rollout in rollouts:
            prompt = read_prompt(rollout.messages[1].content)
            answer = reply(prompt)
            nth = self.asked.count(rollout.messages[1].content)
            self.asked.append(rollout.messages[1].content)
            self.seeds.append(rollout.seed)
            if self.doctor:
                answer = self.doctor(prompt, answer, nth)
            type_out(rollout, ["<think>let me see</think>" + json.dumps(answer)])
            yield rollout


@pytest.fixture
def brain(policy: Policy, chat: ChatFormat, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the stage needs of a policy. Its tokenizer spells any text in characters, so that the tiny one will do."""

    class Letters:
        eos_token_id, chat_template = 0, "x"

        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> str:
            turns = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
            return turns + ("assistant: " if options.get("add_generation_prompt") else "")

        def __call__(self, text: str, **options: Any) -> Any:
            return SimpleNamespace(input_ids=[ord(c) + 1 for c in text])

        def decode(self, ids: Sequence[int], **options: Any) -> str:
            return "".join(chr(i - 1) for i in ids)

    model = SimpleNamespace(config=SimpleNamespace(max_position_embeddings=10**7))
    return SimpleNamespace(chat=ChatFormat(Letters()), model=model, version=3, adapter_state=policy.adapter_state)


def stage(brain: Any, engine: Any, **options: Any) -> SelfJudgeRubric:
    made = SelfJudgeRubric(policy_client(plan=options.pop("plan", "paper")), max_reply_tokens=100_000, **options)
    made.open(RunContext(engine=engine))
    made.ready(brain)
    return made


def desk_group(samples: Sequence[int] = (0, 1, 2)) -> Group:
    """Samples 0 and 1 are alike to the letter."""
    task = DeskEnvironment().tasks("train")[0]
    return group((play(task, s, dict.fromkeys(FAULTS, 0.2))[0] for s in samples), step=5)


@pytest.mark.parametrize(("plan", "phases"), [("paper", 1 + 3 + 1 + 9 + 3), ("lean", 1 + 3 + 1 + 9)])
def test_all_calls_go_to_the_policy_and_scores_are_asked_k_times(brain: Any, plan: str, phases: int) -> None:
    engine = ScriptedEngine()
    made = stage(brain, engine, plan=plan)
    try:
        (judged,) = made.judge([desk_group()])
    finally:
        made.close()
    assert judged.failures == ()
    assert any(v.score < 0 for row in judged.verdicts for v in row)
    assert len(engine.asked) == phases
    assert len(set(engine.seeds)) == phases  # equal prompts have different random streams
    records = made.take().calls
    assert {r.model for r in records} == {f"draco-policy/{local.adapter_hash(brain)}"}
    assert judged.metrics["judge/vote_agreement"] == 1.0
    assert judged.metrics["judge/cost_usd"] == 0.0


def test_the_time_in_which_calls_wait_for_the_last_rollout_is_none_of_judging(brain: Any) -> None:
    """One second a reply, after rollouts of a hundred."""
    now = 0.0

    def a_second(prompt: Any, answer: Any, nth: int) -> Any:
        nonlocal now
        now += 1.0
        return answer

    def rollouts() -> Iterator[Group]:
        nonlocal now
        yield desk_group()
        now = 100.0

    engine = ScriptedEngine(a_second)
    made = stage(brain, engine)
    made.busy = Busy(lambda: now)
    try:
        list(made.judge(rollouts()))
        assert made.take().metrics["time/judge_s"] == len(engine.asked)
    finally:
        made.close()


def test_a_criterion_passes_only_if_all_k_calls_pass_it(brain: Any) -> None:
    """One dissenting call of three turns every pass into a fail."""

    def doctor(prompt: Any, answer: Any, nth: int) -> Any:
        if prompt.phase == "score" and nth == 1:
            answer = {"verdicts": [v | {"score": -1, "justification": "dissent"} for v in answer["verdicts"]]}
        return answer

    made = stage(brain, ScriptedEngine(doctor))
    try:
        (judged,) = made.judge([desk_group((0, 2, 3))])  # no two alike: each has three votes of its own
    finally:
        made.close()
    verdicts = [v for row in judged.verdicts for v in row]
    assert verdicts
    assert {v.score for v in verdicts} == {-1}
    assert judged.metrics["judge/vote_agreement"] < 1.0


def test_the_random_stream_of_a_call_is_its_own_in_whatever_order_calls_arrive(brain: Any) -> None:
    """Equal prompts: two attempts, two votes each."""
    said = (Message("system", "judge"), Message("user", "# Call: reduce"))

    def streams(order: Sequence[int]) -> list[int]:
        engine, seen = ScriptedEngine(), Counter[str]()
        answering = local.Answering(engine, brain, brain.chat, 1.0, 100, 10**6, seed=7, step=2)
        for at in order:
            answering.answer([local.Ask(said, ("task", at // 2, at % 2))], seen)
        return [engine.seeds[order.index(at)] for at in range(4)]

    assert streams((3, 1, 0, 2)) == streams((0, 1, 2, 3))
    assert len(set(streams((0, 1, 2, 3)))) == 4


def test_a_policy_that_writes_no_json_stops_the_run_and_scores_nothing(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The real engine and a real, unable policy."""
    made = SelfJudgeRubric(policy_client(), max_reply_tokens=8, max_prompt_tokens=64, max_response_tokens=64, k=1)
    made.context = 60_000
    made.open(RunContext(engine=TransformersEngine()))
    made.ready(policy)
    small = group(2, step=0)

    def short(phase: str, material: object, caveats: object, *, lean: bool) -> list[dict[str, str]]:
        return [{"role": "system", "content": "judge"}, {"role": "user", "content": f"# Call: {phase}"}]

    monkeypatch.setattr("draco.judge.pipeline.messages", short)
    try:
        with pytest.raises(TrainingStopped, match="lost their judgement"):
            list(made.judge([small]))
    finally:
        made.close()
    assert {r.outcome for r in made.take().calls} == {"reask", "reply_error"}


def test_a_fault_of_the_engine_is_raised_and_fails_its_calls() -> None:
    class Broken:
        def answer(self, batch: Sequence[local.Ask], seen: Any) -> None:
            raise RuntimeError("out of memory")

    ask = local.Ask(())
    local.asks.put(ask)
    with pytest.raises(RuntimeError, match="out of memory"):
        local.serve(Broken(), lambda: False)  # type: ignore[arg-type]
    assert "out of memory" in str(ask.answer.exception(0))


def test_cancelled_calls_are_passed_over() -> None:
    ask = local.Ask(())
    ask.answer.cancel()
    local.asks.put(ask)
    local.serve(SimpleNamespace(answer=None), local.asks.empty)  # type: ignore[arg-type]


def test_an_endpoint_gets_the_calls_under_the_adapters_name(brain: Any) -> None:
    """A rollout engine that serves the adapter, and one named by hand."""
    fake = FakeJudge()
    client(fake)
    served = iter([("http://127.0.0.1:9/v1", "policy-v3", "key-12345678"), ("http://127.0.0.1:9/v1", "policy-v4", "")])
    serving = SimpleNamespace(judge_endpoint=lambda: next(served), context=None)
    made = SelfJudgeRubric(policy_client(), max_reply_tokens=64)
    made.open(RunContext(engine=serving))  # type: ignore[arg-type]
    made.ready(brain)
    made.before_group(group(2))
    chosen = made.pipeline.endpoint
    assert chosen is not None
    assert chosen.model == "hosted_vllm/policy-v3"
    assert made.pipeline.salt == local.adapter_hash(brain)
    assert chosen.api_key == "key-12345678"
    assert made.client.redact("a key-12345678") == "a [redacted]"
    made.attend([Future()])  # nothing to answer here
    made.before_group(group(2))  # of the same batch
    assert made.pipeline.endpoint is chosen
    made.judge([])  # the next one: whoever serves the policy is asked anew
    made.before_group(group(2))
    assert made.pipeline.endpoint is not None
    assert made.pipeline.endpoint.model == "hosted_vllm/policy-v4"
    named = SelfJudgeRubric(policy_client(), max_reply_tokens=64, api_base="http://x/v1", model="fake-judge/p{version}")
    named.open(RunContext(engine=serving))  # type: ignore[arg-type]
    named.ready(brain)
    (judged,) = named.judge([group(2)])
    named.close()
    assert len(judged.rewards) == 2
    assert {r.model for r in named.take().calls} == {"fake-judge/p3"}
    assert fake.arguments[0]["api_base"] == "http://x/v1"
    assert fake.phases().count("score") == 6


def test_what_cannot_fit_is_refused_before_training(brain: Any) -> None:
    assert needed_context("paper", 6, 4096, 24576, 50, 4096)["merge"] == 6 * 28672 + 6000 + 4096
    assert needed_context("lean", 6, 4096, 24576, 50, 4096)["merge"] < 100_000
    brain.model.config.max_position_embeddings = 131_072

    def judging(served: int | None, rubric: SelfJudgeRubric) -> None:
        rubric.open(RunContext(engine=SimpleNamespace(context=served)))  # type: ignore[arg-type]
        rubric.ready(brain)

    with pytest.raises(ConfigError, match=r"merge call of judge.plan=paper may need .* judge.plan=lean"):
        judging(None, SelfJudgeRubric(policy_client()))
    judging(None, SelfJudgeRubric(policy_client(plan="lean")))
    with pytest.raises(ConfigError, match=r"served with 32768; .*engine.launch.max_len"):
        judging(32_768, SelfJudgeRubric(policy_client(plan="lean")))
    elsewhere = SelfJudgeRubric(policy_client(plan="lean"), api_base="http://x/v1", model="hosted_vllm/p")
    judging(32_768, elsewhere)
    brain.model.config.max_position_embeddings = 16_384
    with pytest.raises(ConfigError, match="smaller limits"):
        judging(None, SelfJudgeRubric(policy_client(plan="lean")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": "pkg://draco.policy.tiny"}, "policy=tiny"),
        ({"k": 0}, "integer ≥ 1"),
        ({"api_base": "http://x"}, "both or none"),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SelfJudgeRubric(policy_client(), **options)


def test_the_tiny_policy_is_refused_by_name_and_the_option_composes() -> None:
    from draco.config.compose import instantiate_group

    with pytest.raises(ConfigError, match="policy=tiny"):
        instantiate_group(compose_config(["rubric=self_judge"]).rubric)
    made = instantiate_group(compose_config(["rubric=self_judge", "policy=smollm2", "judge.plan=lean"]).rubric)
    assert (made.k, made.thinking, made.pipeline.view.name) == (3, True, "lean")


def test_the_adapters_hash(policy: Policy, brain: Any) -> None:
    assert local.adapter_hash(policy) == local.adapter_hash(brain)
    changed = {k: v + 1 for k, v in policy.adapter_state().items()}
    assert local.adapter_hash(SimpleNamespace(adapter_state=lambda: changed)) != local.adapter_hash(policy)  # type: ignore[arg-type]
