"""The model `draco-scripted/desk` as litellm calls it."""

from __future__ import annotations

import json
from typing import Any

from litellm.llms.custom_llm import CustomLLM
from litellm.types.utils import ModelResponse, Usage

from draco.env.desk.judge.reading import read_prompt
from draco.env.desk.judge.replies import reply

__all__ = ["DeskJudge"]


class DeskJudge(CustomLLM):
    """Answers at once; there is nothing to wait for."""

    def completion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """Answer one call."""
        return _answer(kwargs["messages"], kwargs["model_response"])

    async def acompletion(self, *args: Any, **kwargs: Any) -> ModelResponse:
        """Answer one call."""
        return _answer(kwargs["messages"], kwargs["model_response"])


def _answer(messages: list[dict[str, Any]], response: ModelResponse) -> ModelResponse:
    # The first user message is the prompt. A corrective second request repeats it.
    text = next(m["content"] for m in messages if m["role"] == "user")
    content = json.dumps(reply(read_prompt(text)), ensure_ascii=False)
    choice: Any = response.choices[0]
    choice.message.content = content
    choice.finish_reason = "stop"
    # No tokenizer is involved; four characters a token is the usual rule of thumb.
    tokens_in, tokens_out = sum(len(m["content"]) for m in messages) // 4, len(content) // 4
    usage = Usage(prompt_tokens=tokens_in, completion_tokens=tokens_out, total_tokens=tokens_in + tokens_out)
    response.usage = usage  # type: ignore[attr-defined]
    response._hidden_params["response_cost"] = 0.0  # free, and litellm need not look for a price
    return response
