"""Token-exact chat: what the template adds around a sampled turn, found once by rendering a dummy conversation.

The prompt of turn t+1 is the exact token list so far plus the tokens that the template adds for the new message.
Sampled tokens are never decoded and encoded again, so training uses exactly the ids of the rollout. History is only
appended to: text that a template would strip from earlier turns (thinking) stays.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from draco.core.errors import TemplateError
from draco.core.types import Message

__all__ = ["ChatFormat"]

_THINK, _THOUGHT = "<think>", "</think>"
_TURN, _OBSERVATION = "zq1TURNzq", "zq2OBSzq"  # never in a template, never changed by one


class ChatFormat:
    """Encodes prompts, observations and turn glue for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer with a chat template.
        one_turn: every conversation ends with its first sampled turn, so nothing is ever appended.
        kwargs: extra template arguments, e.g. ``enable_thinking``.

    Raises:
        TemplateError: no template, or it rewrites earlier messages when one is appended.
    """

    def __init__(self, tokenizer: Any, *, one_turn: bool = False, **kwargs: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateError(
                "the tokenizer has no chat template; use an instruct model or point `policy.chat_template` to a file"
            )
        self.tokenizer = tokenizer
        self._kwargs = kwargs
        # A fast tokenizer stores the options of a call in itself, so threads must take turns.
        self._lock = threading.Lock()
        dialogue = [
            {"role": "system", "content": "zq0SYSzq"},
            {"role": "user", "content": "zq0ASKzq"},
            {"role": "assistant", "content": _TURN},
        ]
        self.end_ids = frozenset(self._end_ids())
        self.encode_text = lru_cache(maxsize=65536)(self._encode_untrusted)
        opening = self._render(dialogue[:2], generation=True)
        #: set when the generation prompt ends with an open thinking tag: every turn then begins inside its thinking
        self.opened = _THINK if opening.rstrip().endswith(_THINK) else ""
        self._glue_tail: tuple[int, ...] = ()
        self._glue_after: tuple[int, ...] = ()
        if one_turn:
            return
        closed = self._render(dialogue, generation=False)
        extended = self._render([*dialogue, {"role": "user", "content": _OBSERVATION}], generation=True)
        if not (closed.startswith(opening) and extended.startswith(closed) and _OBSERVATION in extended):
            raise TemplateError(
                "the chat template rewrites earlier messages when one is appended, so training ids could differ from "
                "sampled ids; use a template for which render(m[:k+1]) starts with render(m[:k])"
            )
        tail = closed[closed.index(_TURN) + len(_TURN) :]
        before, after = extended[len(closed) :].split(_OBSERVATION)
        self._glue_tail = self._encode(tail + before)
        self._glue_after = self._encode(after)

    def one_turn(self, **kwargs: Any) -> ChatFormat:
        """The format for questions with a single answer: other template arguments, and any template will do.

        Raises:
            TemplateError: the template cannot render a question with them.
        """
        return ChatFormat(self.tokenizer, one_turn=True, **self._kwargs | kwargs)

    def _render(self, messages: list[dict[str, str]], *, generation: bool) -> str:
        try:
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=generation, **self._kwargs
            )
        except Exception as error:
            roles = [m["role"] for m in messages]
            raise TemplateError(f"the chat template cannot render the roles {roles}: {error}") from error
        return str(text)

    def _end_ids(self) -> set[int]:
        ids = self.tokenizer.eos_token_id
        found = set(ids) if isinstance(ids, list | tuple) else {ids}
        found.discard(None)
        if not found:
            raise TemplateError("the tokenizer has no end token (`eos_token`), so a turn could never end")
        return found

    def _encode(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        with self._lock:
            return tuple(self.tokenizer(text, add_special_tokens=False).input_ids)

    def _encode_untrusted(self, text: str) -> tuple[int, ...]:
        # An observation that spells `<|im_end|>` must not become the control token.
        if not text:
            return ()
        with self._lock:
            return tuple(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids)

    def prompt_ids(self, opening: Sequence[Message]) -> tuple[int, ...]:
        """Token ids of the opening messages, generation prompt included."""
        return self._encode(self._render([{"role": m.role, "content": m.content} for m in opening], generation=True))

    def rendered_ids(self, messages: Sequence[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of the template's own rendering of a whole conversation, generation prompt included.

        Rollouts never use it; checks compare theirs with it.
        """
        return self._encode(self._render(list(messages), generation=True))

    def glue(self, observation: str, last_id: int | None) -> tuple[int, ...]:
        """Tokens between the end of a sampled turn and the start of the next.

        Args:
            observation: the environment's text, untrusted.
            last_id: the last sampled token; if it is the end token that the template would add, it is not repeated.
        """
        tail = self._glue_tail
        if tail and tail[0] == last_id:
            tail = tail[1:]
        return (*tail, *self.encode_text(observation), *self._glue_after)

    def said(self, turn: str) -> str:
        """The text of a turn after its last thinking block; empty if thinking has not ended."""
        text = self.opened + turn
        closed = text.rfind(_THOUGHT)
        if text.rfind(_THINK) > closed:
            return ""
        return text if closed < 0 else text[closed + len(_THOUGHT) :]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of sampled tokens, control tokens included."""
        with self._lock:
            return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    @lru_cache(maxsize=64)  # noqa: B019 - one ChatFormat a process
    def may_finish(self, stop: tuple[str, ...]) -> frozenset[int]:
        """Token ids whose text has the last character of a stop string: a turn is decoded only after one of these."""
        last = {s[-1] for s in stop}
        vocabulary = range(len(self.tokenizer))
        texts = self.tokenizer.batch_decode([[i] for i in vocabulary], clean_up_tokenization_spaces=False)
        return frozenset(i for i, text in zip(vocabulary, texts, strict=True) if last & set(text))
