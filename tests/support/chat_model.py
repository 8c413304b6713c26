"""A tiny chat model with a tokenizer for any text, and an engine in whose hands it acts and judges like the scripted
agent and the scripted judge. Only the sampling is faked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any, ClassVar

from support.echo import type_out

from draco.core.types import Termination
from draco.env.desk.agent import Agent
from draco.env.desk.judge.reading import read_prompt
from draco.env.desk.judge.replies import reply
from draco.env.desk.scenarios import gold_task
from draco.rollout.engines import Engine
from draco.rollout.rollout import Rollout

__all__ = ["Chatty", "save_chat_model"]

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)


def save_chat_model(folder: Path) -> Path:
    """A random model of one layer over bytes, with a chat template that knows `enable_thinking`."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    whole = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    whole.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=whole, eos_token="<|im_end|>", pad_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=400_000,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder


class Chatty(Engine):
    """Acts with faults, and judges after a thought."""

    judged: ClassVar[list[str]] = []  #: prompts of judge calls, as the policy read them

    def __init__(self, **options: Any) -> None:
        """Takes the options of any engine and needs none."""

    def run(self, policy: object, rollouts: Sequence[Rollout], *, temperature: float) -> Iterator[Rollout]:
        for rollout in rollouts:
            if rollout.task.split == "judge":
                self.judged.append(rollout.chat.decode(rollout.token_ids[: rollout.prompt_tokens]))
                thought = "let me see</think>" if rollout.chat.opened else ""
                type_out(rollout, [thought + json.dumps(reply(read_prompt(rollout.messages[1].content)))])
            else:
                self._act(rollout)
            yield rollout

    def _act(self, rollout: Rollout) -> None:
        rates = {"wrong_amount": 0.4, "stops_early": 0.3, "forgets_confirmation": 0.4}
        agent = Agent(gold_task(rollout.task.id), rates, Random(rollout.seed))
        (end,) = rollout.chat.end_ids
        observed: list[str] = []
        while rollout.termination is None:
            if agent.done:
                rollout.end(Termination.GAVE_UP)
                return
            text, observed_now = agent.turn(observed), []
            for part in re.findall(r".*?</code>|.+$", text, re.DOTALL):  # a turn ends with its first block of code
                seen = len(rollout.messages)
                for token in [*rollout.chat.encode_text(part), end]:
                    if rollout.push(token, -0.5):
                        rollout.finish_turn()
                        break
                observed_now += [m.content for m in rollout.messages[seen:] if m.role != "assistant"]
                if rollout.termination is not None:
                    return
            observed = observed_now
