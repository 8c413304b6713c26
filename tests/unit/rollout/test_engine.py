"""The in-process engine against plain, uncached, one-at-a-time generation."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.echo import EchoEnvironment, EchoEpisode
from support.sampling import LIMITS, recomputed

from draco.core.errors import ConfigError
from draco.core.types import Termination, Trajectory
from draco.env.desk import DeskEnvironment
from draco.policy.policy import Policy
from draco.rollout.engines.cache import slab_cache
from draco.rollout.engines.ragged import decodes_ragged
from draco.rollout.engines.transformers import TransformersEngine, sample
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout, sampling_seed


def rollouts(policy: Policy, count: int, split: str = "dev", limits: Limits = LIMITS) -> list[Rollout]:
    environment = DeskEnvironment()
    return [
        Rollout(
            environment.open(task, seed=0), policy.chat, limits, task=task, sample=0,
            seed=sampling_seed(0, "t", 0, task.id, 0), policy_version=0,
        )
        for task in environment.tasks(split)[:count]
    ]  # fmt: skip


def finish(policy: Policy, rows: list[Rollout], temperature: float = 1.0, **options: Any) -> list[Trajectory]:
    ended = list(TransformersEngine(**options).run(policy, rows, temperature=temperature))
    assert {id(r) for r in ended} == {id(r) for r in rows}
    return [r.trajectory() for r in rows]


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_full_forward_pass(policy: Policy, temperature: float) -> None:
    for t in finish(policy, rollouts(policy, 6), temperature):
        expected = recomputed(policy, t, temperature)
        for i, j in enumerate(t.step_of):
            if j >= 0:
                assert t.logprobs[i] == pytest.approx(float(expected[i - 1]), abs=2e-5)


def test_greedy_tokens_are_those_of_uncached_decoding(policy: Policy) -> None:
    for t in finish(policy, rollouts(policy, 3), 0.0):
        ids = torch.tensor([t.token_ids])
        with torch.no_grad():
            best = policy.model(input_ids=ids, use_cache=False).logits[0].argmax(-1)
        assert all(t.token_ids[i] == int(best[i - 1]) for i, j in enumerate(t.step_of) if j >= 0)


def test_a_trajectory_does_not_depend_on_its_batch(policy: Policy) -> None:
    together = finish(policy, rollouts(policy, 8))
    alone = [finish(policy, [row])[0] for row in rollouts(policy, 8)]
    chunks = finish(policy, rollouts(policy, 8), max_batch=3)
    assert [t.token_ids for t in together] == [t.token_ids for t in alone] == [t.token_ids for t in chunks]


def test_rows_end_at_different_times_and_prompts_differ_in_length(policy: Policy) -> None:
    done = finish(policy, rollouts(policy, 8))
    assert len({len(t.token_ids) for t in done}) > 1
    assert len({t.prompt_tokens for t in done}) > 1


def test_environment_threads_change_nothing(policy: Policy) -> None:
    plain, threaded = finish(policy, rollouts(policy, 6)), finish(policy, rollouts(policy, 6), env_threads=3)
    assert [t.token_ids for t in plain] == [t.token_ids for t in threaded]


class _Nan:
    """NaN logits for the first of several rows, from the third call on. It is no module: rows advance in lockstep."""

    def __init__(self, policy: Policy) -> None:
        self.policy, self.calls = policy, 0
        self.config, self.training = policy.model.config, False

    def __call__(self, **kwargs: Any) -> Any:
        self.calls += 1
        out = self.policy.model(**kwargs)
        if self.calls > 2 and len(out.logits) > 1:
            out.logits[0] = math.nan
        return out

    def eval(self) -> None: ...
    def train(self, mode: bool) -> None: ...


def test_non_finite_logits_are_an_engine_error_of_that_row_alone(policy: Policy) -> None:
    class Stub:
        model, device, chat = _Nan(policy), policy.device, policy.chat
        sampling = policy.sampling

    rows = rollouts(policy, 2)
    list(TransformersEngine().run(Stub(), rows, temperature=1.0))  # type: ignore[arg-type]
    kinds = [r.termination for r in rows]
    assert kinds[0] is Termination.ENGINE_ERROR
    assert "non-finite" in rows[0].trajectory().error
    assert kinds[1] is not Termination.ENGINE_ERROR


def test_a_poisoned_row_does_not_poison_the_next_one_in_its_place(policy: Policy) -> None:
    def rows() -> list[Rollout]:
        by_length = sorted(rollouts(policy, 8), key=lambda r: -r.prompt_tokens)
        return [by_length[0], by_length[1], by_length[-1]]

    expected = finish(policy, rows())[1:]
    passes: list[int] = []

    def poison(module: Any, arguments: Any, output: torch.Tensor) -> torch.Tensor:
        """NaN for the first row's prompt: its keys and values are NaN in every layer but the first."""
        passes.append(1)
        if len(passes) > 1:
            return output
        return torch.cat([output[:, :prompt] * math.nan, output[:, prompt:]], dim=1)

    done = rows()
    prompt = done[0].prompt_tokens
    assert prompt > done[2].prompt_tokens, "the third row leaves something of the first one in its place"
    assert decodes_ragged(policy.model)
    handle = policy.model.get_base_model().model.layers[0].register_forward_hook(poison)
    try:
        list(TransformersEngine(max_batch=2).run(policy, done, temperature=1.0))
    finally:
        handle.remove()
    assert done[0].termination is Termination.ENGINE_ERROR
    assert [r.trajectory().token_ids for r in done[1:]] == [t.token_ids for t in expected]


@pytest.mark.parametrize("options", [{"max_chunk_tokens": 1}, {"max_chunk_tokens": 7}, {"max_batch": 2}])
def test_neither_chunks_nor_places_change_a_trajectory(policy: Policy, options: dict[str, int]) -> None:
    plain, other = finish(policy, rollouts(policy, 6)), finish(policy, rollouts(policy, 6), **options)
    assert [t.token_ids for t in plain] == [t.token_ids for t in other]
    for a, b in zip(plain, other, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=5e-5)


def test_lockstep_samples_what_the_ragged_rows_do(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    ragged = finish(policy, rollouts(policy, 6))
    monkeypatch.setattr("draco.rollout.engines.transformers.decodes_ragged", lambda model: False)
    assert [t.token_ids for t in finish(policy, rollouts(policy, 6))] == [t.token_ids for t in ragged]


def test_no_token_is_fed_twice_and_none_is_padding(policy: Policy) -> None:
    fed: list[int] = []
    handle = policy.model.get_input_embeddings().register_forward_hook(lambda m, i, o: fed.append(i[0].numel()))
    try:
        done = finish(policy, rollouts(policy, 5))
    finally:
        handle.remove()
    fed_at_least = sum(len(t.token_ids) - 1 for t in done)  # the last sampled token is never fed; nor is a last glue
    assert fed_at_least - 5 * 200 < sum(fed) <= fed_at_least


def test_the_model_trains_with_its_own_attention_between_two_rollouts(policy: Policy) -> None:
    before = policy.model.get_base_model().config._attn_implementation
    policy.model.train()
    rows = rollouts(policy, 3)
    for _ in TransformersEngine().run(policy, rows, temperature=1.0):
        assert policy.model.get_base_model().config._attn_implementation == before
        assert policy.model.training
    policy.model.eval()


def test_deadline_ends_a_row_in_the_middle_of_a_turn(policy: Policy) -> None:
    task = EchoEnvironment().tasks("train")[0]
    row = Rollout(
        EchoEpisode(task), policy.chat, Limits(deadline_s=1e-6), task=task, sample=0, seed=1, policy_version=0
    )
    (t,) = finish(policy, [row])
    assert t.termination is Termination.DEADLINE
    assert all(j < len(t.steps) for j in t.step_of)


@pytest.mark.parametrize("ragged", [True, False])
def test_waiting_for_a_place_takes_nothing_of_the_deadline(
    policy: Policy, monkeypatch: pytest.MonkeyPatch, ragged: bool
) -> None:
    clock = [0.0]  # a pass takes a second: of two rows one after the other, each ends well within its own deadline
    monkeypatch.setattr("draco.rollout.loop.time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr("draco.rollout.engines.transformers.decodes_ragged", lambda model: ragged)
    ticks = policy.model.register_forward_hook(lambda *_: clock.__setitem__(0, clock[0] + 1))
    alone: list[float] = []
    try:
        for row in rollouts(policy, 3):
            alone.append(-clock[0])
            finish(policy, [row])
            alone[-1] += clock[0]
        limits = replace(LIMITS, deadline_s=max(alone) + 1)
        done = finish(policy, rollouts(policy, 3, limits=limits), max_batch=1)
    finally:
        ticks.remove()
    assert sum(alone) > limits.deadline_s + 1
    assert Termination.DEADLINE not in [t.termination for t in done]


def test_slab_cache_grows_and_selects(policy: Policy) -> None:
    torch.manual_seed(0)
    ids = torch.randint(0, 200, (3, 600))
    with torch.no_grad():
        full = policy.model(input_ids=ids[[0, 2]], use_cache=False).logits
        cache = slab_cache(policy.model.config)
        policy.model(input_ids=ids[:, :10], past_key_values=cache, use_cache=True)
        cache.reorder_cache(torch.tensor([0, 2]))
        out = [policy.model(input_ids=ids[[0, 2], 10:400], past_key_values=cache, use_cache=True).logits]
        for i in range(400, 600):
            out.append(policy.model(input_ids=ids[[0, 2], i : i + 1], past_key_values=cache, use_cache=True).logits)
    assert cache.get_seq_length() == 600
    torch.testing.assert_close(torch.cat(out, 1), full[:, 10:], atol=1e-4, rtol=1e-4)


def test_sampling_is_the_inverse_cdf() -> None:
    logits = torch.tensor([[0.1, 0.2, 0.7]]).log().repeat(5, 1)
    tokens, logprobs = sample(logits, [0.0, 0.09, 0.11, 0.31, 0.999999], 1.0)
    assert tokens == [0, 0, 1, 2, 2]
    assert logprobs == pytest.approx([math.log(p) for p in (0.1, 0.1, 0.2, 0.7, 0.7)], abs=1e-6)


def test_sampling_follows_the_distribution() -> None:
    generator = torch.Generator().manual_seed(0)
    uniforms = torch.rand(20000, generator=generator, dtype=torch.float64).tolist()
    logits = torch.tensor([[1.0, 0.0, -1.0]]).repeat(20000, 1)
    tokens, _ = sample(logits, uniforms, 0.5)
    expected = (torch.tensor([1.0, 0.0, -1.0]) / 0.5).softmax(0)
    shares = torch.bincount(torch.tensor(tokens), minlength=3) / 20000
    torch.testing.assert_close(shares, expected, atol=0.01, rtol=0)


def test_zero_probability_tokens_are_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0]]).repeat(3, 1)
    assert sample(logits, [0.0, 0.5, 1 - 1e-16], 1.0)[0] == [1, 3, 3]


def test_bad_options() -> None:
    with pytest.raises(ConfigError, match="max_batch is 0"):
        TransformersEngine(max_batch=0)
    with pytest.raises(ConfigError, match="max_chunk_tokens is 0"):
        TransformersEngine(max_chunk_tokens=0)
