"""The committed tiny policy: files, tokenizer, chat template, size of actions, and that it loads and speaks."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

import draco.policy.tiny
from draco.env.desk.agent import Agent
from draco.env.desk.environment import DeskEpisode
from draco.env.desk.scenarios import gold_task, pools, task_ids

HOME = Path(draco.policy.tiny.__file__).parent
FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(HOME)


@cache
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(HOME).eval()


def test_the_package_data_is_there_and_small() -> None:
    assert all((HOME / name).is_file() for name in FILES)
    assert sum(path.stat().st_size for path in HOME.iterdir() if path.is_file()) <= 5 * 2**20


def test_the_shape_is_one_that_servers_take() -> None:
    config = json.loads((HOME / "config.json").read_text())
    assert config["head_dim"] == 32
    assert config["vocab_size"] == len(tokenizer())
    assert config["vocab_size"] % 64 == 0
    assert config["max_position_embeddings"] >= 1024
    assert 500_000 < model().num_parameters() < 1_200_000
    assert model().dtype == torch.float32
    assert config["eos_token_id"] == tokenizer().convert_tokens_to_ids("<|end|>") == tokenizer().eos_token_id
    assert tokenizer().pad_token_id not in (None, tokenizer().eos_token_id)


@settings(max_examples=300, deadline=None)
@given(st.one_of(st.text(), st.text("<|/code>pay.{}\"': \nkamo0123456789;")))
def test_any_text_comes_back(text: str) -> None:
    assert tokenizer().decode(tokenizer().encode(text)) == text


@given(st.lists(st.sampled_from(["kalu", " of ", "; next page ", '")</code>', "é", "漢", "\n", "  ", "Ġ"])))
def test_pieces_decode_one_by_one(pieces: list[str]) -> None:
    text = "".join(pieces)
    ids = tokenizer().encode(text)
    for stop in range(len(ids) + 1):
        assert text.startswith(tokenizer().decode(ids[:stop]).rstrip("�"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=20), min_size=1, max_size=5))
def test_the_template_only_appends(contents: list[str]) -> None:
    roles = ["system", "user", "assistant", "user", "assistant"]
    messages = [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]

    def render(count: int, prompt: bool = False) -> str:
        return str(tokenizer().apply_chat_template(messages[:count], tokenize=False, add_generation_prompt=prompt))

    for count in range(1, len(messages)):
        assert render(count + 1).startswith(render(count))
        if roles[count] == "assistant":
            assert render(count + 1).startswith(render(count, prompt=True))


def test_actions_and_episodes_are_short() -> None:
    lengths = []
    for task_id in task_ids("test_normal"):
        gold = gold_task(task_id)
        episode, agent, observed = DeskEpisode(gold), Agent(gold, {}, Random(0)), []
        total = sum(len(tokenizer().encode(m.content)) + 2 for m in episode.opening)
        while not agent.done:
            turn = agent.turn(observed)
            actions = episode.format.parse(turn)
            observed = list(episode.step([action.body for action in actions]).observations)
            assert len(tokenizer().encode(turn)) <= 10 * len(actions)
            total += len(tokenizer().encode(turn)) + len(tokenizer().encode("\n".join(observed))) + 4
        lengths.append(total)
    assert 120 <= sum(lengths) / len(lengths) <= 260


def test_names_and_numbers_are_one_token_everywhere() -> None:
    for split in ("train", "dev", "test_normal", "test_challenge"):
        for name in pools(split)[0]:
            assert len(tokenizer().encode(name)) == 1
            assert len(tokenizer().encode(f'<code>apis.contacts.find(name="{name}")</code>')) == 3
    assert all(len(tokenizer().encode(str(number))) == 1 for number in range(10, 100))


@pytest.mark.parametrize("task_id", ["test_normal_000_1", "test_normal_008_1"])
def test_it_speaks_the_call_syntax(task_id: str) -> None:
    episode = DeskEpisode(gold_task(task_id))
    prompt = tokenizer().apply_chat_template(
        [{"role": m.role, "content": m.content} for m in episode.opening],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=False,
    )
    said = model().generate(prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24)
    actions = episode.format.parse(tokenizer().decode(said[0, prompt.shape[1] :]))
    reply = episode.step([actions[0].body])
    assert not reply.observations[0].startswith("error")
