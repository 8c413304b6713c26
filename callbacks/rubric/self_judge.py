"""Self-judge: the policy with its current adapter is the judge of its own rollouts (Section 4.3, Appendix A.1).

    v_k = +1 if all k scoring calls say +1; −1 if any says −1; else 0          k = 3, thinking on
    R_i = (p_i − f_i) / (p_i + f_i) over the criteria that survive

Why: no second model and no bill. A judge of its own work is lenient; scoring three times, where a criterion passes only
if all three pass it, makes up for that. The attribution call sees the justification of the first scoring call. Ablated
variant: k=1, thinking off.

Where calls are answered: at `api_base` by the model `model` (`{version}` in it is the policy's version) if they are
set; else by the rollout engine's endpoint (`Engine.judge_endpoint`, looked up for every batch) if it has one; else in
process, on the trainer's thread, after the rollouts of the batch. Checkpoints save what every judged rubric saves.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from draco.config.options import Count, NonNegative, checked
from draco.core.errors import ConfigError
from draco.core.types import Group, Judgement
from draco.judge import local
from draco.judge.client import JudgeClient
from draco.judge.endpoints import JudgeEndpoint
from draco.judge.records import CallRecord
from draco.judge.stage import JudgedRubric
from draco.judge.views.size import needed_context
from draco.judge.votes import Panel, Voter
from draco.stages import RunContext

if TYPE_CHECKING:
    from draco.policy.policy import Policy
    from draco.rollout.engines.base import Engine

__all__ = ["SelfJudgeRubric"]

_TOO_SMALL = "draco.policy.tiny"
_UNHURRIED_S = 86_400.0  #: time-out of a call in process, which waits for its batch


@checked("rubric")
class SelfJudgeRubric(JudgedRubric):
    """Criteria are proposed for every group, and judged, by the policy."""

    asks_policy = True

    def __init__(
        self,
        judge: JudgeClient,
        policy: str = "",
        k: Count = 3,
        thinking: bool = True,
        temperature: NonNegative = 1.0,
        max_reply_tokens: Count = 4096,
        context: Count | None = None,
        api_base: str | None = None,
        model: str | None = None,
        group_size: int = 6,
        max_prompt_tokens: int = 4096,
        max_response_tokens: int = 24576,
        max_turns: int = 50,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Set up the stage.

        Args:
            judge: makes the calls; its model is set for every batch.
            policy: path of the policy; some policies cannot judge.
            k: scoring calls for each trajectory; a criterion passes only if all of them pass it.
            thinking: reason before the reply, if the policy's chat template has `enable_thinking`.
            temperature: of replies in process; an endpoint gets the temperature of `judge`.
            max_reply_tokens: limit of one reply, reasoning included.
            context: longest prompt and reply, in tokens, that the policy is served with; None: the model's maximum.
            api_base, model: an OpenAI-compatible server with the current adapter, and its name there.
            group_size, max_prompt_tokens, max_response_tokens, max_turns: of the run, to check the size of calls.
            seed: of the run.
            options: see `JudgedRubric`.

        Raises:
            ConfigError: the policy cannot judge, or an option is out of range.
        """
        if _TOO_SMALL in policy:
            raise ConfigError(
                "rubric=self_judge with policy=tiny: a policy of 1M parameters that knows 600 words cannot write "
                "criteria or JSON; use policy=hf policy.path=MODEL, or rubric=dynamic with judge=scripted"
            )
        if bool(api_base) != bool(model):
            raise ConfigError("rubric.api_base and rubric.model name an endpoint together; set both or none")
        panel = Panel(tuple(Voter(repeat=repeat) for repeat in range(k)), "unanimous", first_justifies=True)
        super().__init__(judge, panel=panel, **options)
        self.k, self.thinking, self.temperature, self.seed = k, thinking, temperature, seed
        self.max_reply_tokens, self.context = max_reply_tokens, context
        self.api_base, self.model = api_base, model
        self._sizes = (group_size, max_prompt_tokens, max_response_tokens, max_turns, max_reply_tokens)
        self._policy: Policy | None = None
        self._engine: Engine | None = None
        self._ready, self._in_process = False, False

    def criteria(self, group: Group) -> None:
        """None: the judge writes criteria for every group."""
        return

    def open(self, context: RunContext) -> None:
        super().open(context)
        self._engine = context.engine

    def ready(self, policy: Policy) -> None:
        """Check that the largest calls fit. Called after the engine has started and before the first rollout.

        Raises:
            ConfigError: they do not fit.
        """
        super().ready(policy)
        assert self._engine is not None, "rubric=self_judge needs the engine of an open run"
        self._policy = policy
        self._chat = policy.chat.one_turn(enable_thinking=self.thinking)
        served = None if self.api_base else self._engine.context
        self._context = (
            self.context or served or int(getattr(policy.model.config, "max_position_embeddings", 0) or 2**31)
        )
        plan = self.pipeline.view.name
        needs = needed_context(plan, *self._sizes)
        call = max(needs, key=lambda name: needs[name])
        if needs[call] > self._context:
            way = "judge.plan=lean, a smaller group_size, " if plan == "paper" and call == "merge" else ""
            raise ConfigError(
                f"rubric=self_judge: the {call} call of judge.plan={plan} may need {needs[call]} tokens and the policy "
                f"is served with {self._context}; set {way}smaller limits, or serve more (engine.launch.max_len; "
                "rubric.context says what an endpoint of your own serves)"
            )

    def ping(self) -> CallRecord | None:
        """One cheap call to the endpoint; None without one. Before the policy is loaded, there is one only if the
        name of its model is fixed.

        Raises:
            JudgeConfigError: the endpoint does not work.
        """
        if self.api_base and self.model and (self._policy is not None or "{version}" not in self.model):
            self.pipeline.endpoint = self._endpoint_at(self.api_base, self._name(), "")
            return super().ping()
        if self._ready and not self._in_process:  # during a run, after failed calls
            return super().ping()
        self.client.load()
        return None

    def judge(self, groups: Iterable[Group]) -> Iterator[Judgement]:
        """Yield one judgement for each group; see `JudgedRubric.judge`."""
        self._ready = False  # the adapter may have changed since the last batch
        return super().judge(groups)

    def before_group(self, group: Group) -> None:
        """Once in each batch, direct the calls to the current adapter, which the servers have by now."""
        if self._ready:
            return
        assert self._policy is not None, "the run is not open"
        self._ready, self._step = True, group.step
        salt = local.adapter_hash(self._policy)
        served = self._served()
        self._in_process = served is None
        self.pipeline.salt = salt
        self.pipeline.endpoint = (
            self.client.endpoint(f"{local.PROVIDER}/{salt}", timeout_s=_UNHURRIED_S)
            if served is None
            else self._endpoint_at(*served)
        )

    def _endpoint_at(self, base: str, name: str, key: str) -> JudgeEndpoint:
        """The endpoint of a served policy."""
        arguments = {
            "max_tokens": self.max_reply_tokens,
            "extra_body": {"chat_template_kwargs": {"enable_thinking": self.thinking}},
        }
        return self.client.endpoint(name, api_base=base, api_key=key or None, section="rubric", arguments=arguments)

    def _name(self) -> str:
        assert self.model is not None
        return self.model.replace("{version}", str(self._policy.version if self._policy is not None else 0))

    def _served(self) -> tuple[str, str, str] | None:
        """Address, name for litellm and key of the served policy; None: in process."""
        if self.api_base and self.model:
            return self.api_base, self._name(), ""
        assert self._engine is not None, "the run is not open"
        served = self._engine.judge_endpoint()
        if served is None:
            return None
        base, name, key = served
        return base, f"hosted_vllm/{name}", key

    def attend(self, pending: Iterable[Future[Judgement]]) -> None:
        """Answer the calls of all groups on this thread until they are judged."""
        pending = list(pending)
        if not pending or not self._in_process:
            return
        assert self._policy is not None
        assert self._engine is not None
        self.busy.restart()  # until now the calls waited for rollouts and this thread
        answering = local.Answering(
            self._engine,
            self._policy,
            self._chat,
            self.temperature,
            self.max_reply_tokens,
            self._context,
            self.seed,
            self._step,
        )
        local.serve(answering, lambda: all(future.done() for future in pending))
