"""Token-exactness over the chat templates of real models: rollout ids are training ids, whatever is said.

The templates come from packages that ship them (TRL's `chat_templates`, the weights of SmolLM2), read here and never
copied. Tokens are those of the tiny policy with each template's control tokens added.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.chat_templates import CASES, MERGED, template
from support.echo import EchoEpisode

from draco.core.errors import TemplateError
from draco.core.types import Task, Termination
from draco.policy.chat import ChatFormat
from draco.rollout.loop import Limits
from draco.rollout.rollout import Rollout

#: of these the templates that put no thinking tags of their own into past turns
PLAIN = ("qwen2.5", "qwen3 instruct", "llama 3", "llama 3.1", "smollm2")


@cache
def chat_of(case: str) -> ChatFormat:
    from transformers import AutoTokenizer

    name, control, arguments = CASES[case]
    tokenizer = AutoTokenizer.from_pretrained(str(files("draco.policy") / "tiny"))
    tokenizer.add_special_tokens({"additional_special_tokens": list(control)})
    tokenizer.add_tokens([MERGED])
    tokenizer.eos_token, tokenizer.bos_token = control[-1], control[0]
    tokenizer.chat_template = template(name)
    return ChatFormat(tokenizer, **arguments)


words = st.text("abc .,:\n<>/é", max_size=10)
turns = st.builds(
    lambda thought, mention, text, code, closing: (thought, mention, text, code, closing),
    st.none() | words, st.booleans(), words, words, st.sampled_from(["</code>", MERGED]),
)  # fmt: skip


def spoken(chat: ChatFormat, turn: tuple[str | None, bool, str, str, str]) -> str:
    """Text of one turn: maybe thinking, maybe with code in the thoughts, then a code block."""
    thought, mention, text, code, closing = turn
    text, code = text.replace("<", ""), code.replace("<", "")
    idea = None if thought is None else thought.replace("<", "") + ("<code>no</code> " if mention else "")
    if chat.opened:
        return f"{idea or ''}</think>{text}<code>{code}{closing}"
    return f"{text}<code>{code}{closing}" if idea is None else f"<think>{idea}</think>{text}<code>{code}{closing}"


@pytest.mark.parametrize("case", CASES)
@settings(deadline=None, max_examples=12, phases=[Phase.explicit, Phase.generate])  # shrinking takes minutes
@given(conversation=st.lists(turns, min_size=1, max_size=4), by_end_token=st.booleans())
def test_rollout_ids_are_training_ids(case: str, conversation: list[Any], by_end_token: bool) -> None:
    chat = chat_of(case)
    (end,) = chat.end_ids
    task = Task("t", "say it", "train", "s")
    episode = EchoEpisode(task)
    rollout = Rollout(episode, chat, Limits(), task=task, sample=0, seed=1, policy_version=0)
    sampled: list[list[int]] = []
    texts: list[str] = []
    for i, turn in enumerate([*conversation, (None, False, "", "done", "</code>")]):
        text = spoken(chat, turn)
        if by_end_token and i == 0:
            text = "".join(text.partition("</think>")[:2]) if chat.opened else "hm"  # no block: the end token ends it
        before = list(rollout.token_ids)
        tokens = [*chat.encode_text(text), end]
        for token in tokens:
            if rollout.push(token, -0.5):
                break
        sampled.append(tokens[: len(rollout.token_ids) - len(before)])
        texts.append(text)
        assert rollout.token_ids == before + sampled[-1]  # the history is never touched
        rollout.finish_turn()
        assert rollout.token_ids[: len(before) + len(sampled[-1])] == before + sampled[-1]
    assert rollout.termination is Termination.SUBMITTED
    t = rollout.trajectory()
    # Every turn went on to its own block, past code in thoughts, and ended with the token that closed it.
    for tokens, text in zip(sampled, texts, strict=True):
        assert chat.decode(tokens).removesuffix(chat.decode([end])) == text
    # Steps are exactly what was sampled; the rest is in no step.
    assert [list(t.token_ids[a:b]) for a, b in (s.span for s in t.steps)] == sampled
    gaps = [
        list(t.token_ids[stop:start])
        for stop, start in zip(
            [s.span[1] for s in t.steps], [*(s.span[0] for s in t.steps[1:]), len(t.token_ids)], strict=True
        )
    ]
    assert gaps[-1] == []
    for tokens, gap, message in zip(sampled[:-1], gaps[:-1], _observations(t), strict=True):
        assert gap == list(chat.glue(message, tokens[-1]))
        assert (tokens[-1] == end) != (gap[0] == end)  # the template's end token is there once
    assert [i for i, j in enumerate(t.step_of) if j >= 0] == [i for s in t.steps for i in range(*s.span)]
    assert "no" not in episode.log  # what was only thought of was not run


def _observations(t: Any) -> list[str]:
    return [m.content for m in t.messages[2:] if m.role == "user"][: len(t.steps) - 1]


@pytest.mark.parametrize("case", PLAIN)
def test_plain_turns_read_as_the_template_renders_them(case: str) -> None:
    """Where nothing is thought, the tokens spell what the template makes of the whole conversation."""
    chat = chat_of(case)
    task = Task("t", "say it", "train", "s")
    rollout = Rollout(EchoEpisode(task), chat, Limits(), task=task, sample=0, seed=1, policy_version=0)
    for text in ("<code>a</code>", "b <code>c</code>"):
        for token in [*chat.encode_text(text), *chat.end_ids]:
            if rollout.push(token, -0.5):
                break
        rollout.finish_turn()
    rendered = chat.tokenizer.apply_chat_template(
        [{"role": m.role, "content": m.content} for m in rollout.messages],
        tokenize=False,
        add_generation_prompt=True,
        **CASES[case][2],
    )
    assert chat.decode(rollout.token_ids) == rendered


@pytest.mark.parametrize(
    ("name", "arguments"), [("qwen3", {}), ("qwen3_6", {}), ("qwen3_6", {"enable_thinking": False})]
)
def test_templates_that_strip_past_thinking_are_refused(name: str, arguments: dict[str, Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(files("draco.policy") / "tiny"))
    tokenizer.chat_template = template(name)
    with pytest.raises(TemplateError, match="rewrites earlier messages"):
        ChatFormat(tokenizer, **arguments)
