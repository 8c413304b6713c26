"""Tokens per second of the rollout engines against re-prefilling `generate` every turn, on the same 12-turn episodes.

    python scripts/bench_rollout.py [--quick] [--episodes N] [--model FOLDER] [--no-vllm]

Every episode has 12 turns of up to 24 sampled tokens; whatever is sampled is an action, and every action gets the same
observation of 120 tokens (a short page of tool output): some 1,700 tokens an episode.
All episodes run together. Three ways of sampling them:

    generate       at every turn the whole history is prefilled again, left-padded; `generate` adds the turn's tokens
    transformers   engine=transformers: one key/value cache for the whole episode
    vllm           engine=vllm on this machine, where .venv-vllm exists (scripts/setup_vllm.sh); null elsewhere

Figures are sampled tokens over wall time after a warm-up; `generate` must sample as many tokens a turn as the
transformers engine did. The last line is JSON: `speedup_transformers`, `speedup_vllm` (against generate) and
`logprob_mean_abs_diff` (of the sampled tokens, against one full forward pass of the trainer; the worse engine counts).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from draco.core.types import Message, Task, Trajectory
from draco.env.base import ActionFormat, ActionSpan, Episode, Reply
from draco.policy.policy import Policy
from draco.rollout.engines import Engine
from draco.rollout.engines.transformers import TransformersEngine
from draco.rollout.engines.vllm import Launch, VllmEngine
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout, sampling_seed

TURNS = 12
PYTHON = Path(".venv-vllm/bin/python")


class Anything(ActionFormat):
    """Whatever is sampled is one action."""

    def parse(self, text: str) -> tuple[ActionSpan, ...]:
        return (ActionSpan(0, len(text), text),)


class Talk(Episode):
    """Answers every action with the same text and never ends."""

    format = Anything("anything", open="", close="")

    def __init__(self, task: Task, observation: str) -> None:
        self.opening = (Message("system", "Talk."), Message("user", task.instruction))
        self.observation = observation

    def step(self, actions: Sequence[str]) -> Reply:
        return Reply((self.observation,))

    def end_state(self) -> str:
        return ""


def rollouts(policy: Policy, episodes: int, turn_tokens: int, observation_tokens: int, purpose: str) -> list[Rollout]:
    """Fresh episodes; the same ones for the same purpose."""
    piece = policy.chat.encode_text("page 1: ana 31, bo 27; ")
    ids = (piece * (observation_tokens // len(piece) + 1))[:observation_tokens]
    observation = policy.chat.decode(ids)
    limits = Limits(max_turns=TURNS, max_turn_tokens=turn_tokens, max_response_tokens=10**6)
    rows = []
    for i in range(episodes):
        task = Task(f"t{i}", f"Talk to {i}.", "train", f"s{i}")
        seed = sampling_seed(0, purpose, 0, task.id, 0)
        rows.append(
            Rollout(
                Talk(task, observation), policy.chat, limits, task=task, sample=0, seed=seed, policy_version=0,
                group_index=i,
            )
        )  # fmt: skip
    return rows


def sampled(trajectories: Iterable[Trajectory]) -> int:
    """Tokens that the policy sampled."""
    return sum(sum(t.step_tokens) for t in trajectories)


def engine_speed(engine: Engine, policy: Policy, rows: list[Rollout]) -> tuple[float, list[Trajectory]]:
    """Sampled tokens a second, and the trajectories."""
    started = time.perf_counter()
    for _ in engine.run(policy, rows, temperature=1.0):
        pass
    seconds = time.perf_counter() - started
    done = [r.trajectory() for r in rows]
    if lost := [t.error for t in done if t.termination.quarantined]:
        raise SystemExit(f"error: {len(lost)} episodes failed: {lost[0]}")
    return sampled(done) / seconds, done


@torch.inference_mode()
def generate_speed(policy: Policy, done: list[Trajectory]) -> float:
    """The same episodes turn by turn, histories as they were, each prefilled anew."""
    model, pad = policy.model, int(policy.tokenizer.pad_token_id or 0)
    seconds, count = 0.0, 0
    with policy.sampling():
        for turn in range(max(len(t.steps) for t in done)):
            rows = [t for t in done if turn < len(t.steps)]
            spans = [t.steps[turn].span for t in rows]
            new = max(b - a for a, b in spans)
            started = time.perf_counter()
            width = max(a for a, _ in spans)
            ids = torch.full((len(rows), width), pad)
            mask = torch.zeros_like(ids)
            for i, (t, (start, _)) in enumerate(zip(rows, spans, strict=True)):
                ids[i, width - start :] = torch.tensor(t.token_ids[:start])
                mask[i, width - start :] = 1
            model.generate(  # type: ignore[no-untyped-call]
                input_ids=ids.to(policy.device), attention_mask=mask.to(policy.device), do_sample=True, temperature=1.0,
                top_k=0, top_p=1.0, max_new_tokens=new, min_new_tokens=new, pad_token_id=pad,
            )  # fmt: skip
            seconds += time.perf_counter() - started
            count += sum(b - a for a, b in spans)
    return count / seconds


@torch.no_grad()
def difference(policy: Policy, done: list[Trajectory]) -> float:
    """Mean |Δ log-prob| of the sampled tokens against a full forward pass."""
    gaps: list[float] = []
    for t in done:
        ids = torch.tensor([t.token_ids], device=policy.device)
        logits = policy.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        ours = logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1).tolist()
        gaps += [abs(ours[i - 1] - t.logprobs[i]) for i, j in enumerate(t.step_of) if j >= 0]
    return sum(gaps) / len(gaps)


def main(arguments: list[str]) -> dict[str, float | None]:
    """Run, print a line an engine and the JSON."""
    parser = argparse.ArgumentParser(description="Tokens per second of the rollout engines.")
    parser.add_argument("--quick", action="store_true", help="8 episodes, one repeat")
    parser.add_argument("--episodes", type=int, default=None)
    parser.add_argument("--turn-tokens", type=int, default=24)
    parser.add_argument("--observation-tokens", type=int, default=120)
    parser.add_argument("--model", default="pkg://draco.policy.tiny")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--no-vllm", action="store_true")
    given = parser.parse_args(arguments)
    episodes, repeats = given.episodes or (8 if given.quick else 32), 1 if given.quick else 3
    torch.manual_seed(0)
    policy = Policy(given.model, dtype=given.dtype)
    policy.model.eval()

    def fresh(purpose: str, count: int = episodes) -> list[Rollout]:
        return rollouts(policy, count, given.turn_tokens, given.observation_tokens, purpose)

    engine = TransformersEngine()
    _, warm = engine_speed(engine, policy, fresh("warm", 2))
    generate_speed(policy, warm)
    speeds: dict[str, list[float]] = {"generate": [], "transformers": [], "vllm": []}
    differences = []
    for repeat in range(repeats):
        speed, done = engine_speed(engine, policy, fresh(f"r{repeat}"))
        speeds["transformers"].append(speed)
        speeds["generate"].append(generate_speed(policy, done))
        differences.append(difference(policy, done))
    if PYTHON.is_file() and not given.no_vllm:
        length = max(len(t.token_ids) for t in done)
        launch = Launch(dtype=given.dtype)
        served = VllmEngine(
            launch=launch, python=str(PYTHON), max_prompt_tokens=length, max_response_tokens=length // 2
        )
        with tempfile.TemporaryDirectory() as folder:
            try:
                served.open(policy, Path(folder), temperature=1.0)
                engine_speed(served, policy, fresh("warm", 2))
                for repeat in range(repeats):
                    speed, done = engine_speed(served, policy, fresh(f"r{repeat}"))
                    speeds["vllm"].append(speed)
                    differences.append(difference(policy, done))
            finally:
                served.close()
    best = {name: max(values) for name, values in speeds.items() if values}
    for name, value in best.items():
        print(f"{name:13} {value:8.0f} sampled tokens/s  ({episodes} episodes of {TURNS} turns, best of {repeats})")
    result = {
        "speedup_transformers": round(best["transformers"] / best["generate"], 2),
        "speedup_vllm": round(best["vllm"] / best["generate"], 2) if "vllm" in best else None,
        "logprob_mean_abs_diff": max(differences),
    }
    print(json.dumps(result))
    return result


if __name__ == "__main__":
    main(sys.argv[1:])
