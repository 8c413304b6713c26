"""Where the judge's models are, as the configuration names them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from draco.core.errors import JudgeCallError, JudgeConfigError
from draco.core.llm.faults import Fault
from draco.core.llm.transport import Endpoint

__all__ = ["JudgeEndpoint"]

_WHAT_TO_DO = {
    "auth": "set the provider's key (for example OPENAI_API_KEY) or {base}",
    "not_found": "check {model} and {base}",
    "bad_request": "check {model} and its parameters; judge.temperature=null sends no temperature, "
    "judge.response_schema=off sends no schema",
}
#: options that list endpoints
_LISTS = ("judge.members", "judge.fallbacks")


@dataclass(frozen=True, slots=True)
class JudgeEndpoint(Endpoint):
    """A model that judges.

    Raises:
        JudgeConfigError: a server of one's own without an address.
    """

    #: of the configuration that names it, for error texts; or the option that lists it
    section: str = field(default="judge", compare=False)

    def __post_init__(self) -> None:
        if self.needs_address:
            raise JudgeConfigError(
                f"{self.option} names {self.model}, a server of your own, without its address: set {self.base_option}, "
                "for example http://127.0.0.1:8000/v1"
            )

    @property
    def option(self) -> str:
        """Where its model's name is set."""
        return self.section if self.section in _LISTS else f"{self.section}.model"

    @property
    def base_option(self) -> str:
        """Where its address is set."""
        return f"api_base in {self.section}" if self.section in _LISTS else f"{self.section}.api_base"

    @classmethod
    def listed(cls, given: str | Mapping[str, Any], option: str, near: JudgeEndpoint | None = None) -> JudgeEndpoint:
        """From an entry of `option`, a list.

        Args:
            given: a model's name, or a mapping of the fields.
            option: names the list.
            near: where the model is, with its key, unless the entry names an address: a key goes to no other one.

        Raises:
            JudgeConfigError: neither a name nor such a mapping, or without a needed address.
        """
        try:
            fields = {"model": given} if isinstance(given, str) else {str(k): v for k, v in given.items()}
            if near is not None and fields.get("api_base") is None:
                fields |= {"api_base": near.api_base, "api_key": fields.get("api_key") or near.api_key}
            made = cls(**{"section": option, **fields})
            if isinstance(made.model, str) and made.model:
                return made
        except (TypeError, AttributeError):
            pass
        raise JudgeConfigError(
            f"{option} must be a list of model names or of mappings {{model, api_base, api_key, timeout_s}}"
        )

    def error(self, fault: Fault) -> JudgeCallError | JudgeConfigError:
        """The error for a fault that will not pass."""
        if fault.kind in _WHAT_TO_DO:
            advice = _WHAT_TO_DO[fault.kind].format(model=self.option, base=self.base_option)
            return JudgeConfigError(f"{self.model}: {str(fault).rstrip('.')}; {advice}")
        if fault.kind in ("too_long", "refused"):
            return JudgeCallError(f"{self.model} refused this prompt ({fault.kind}): {fault}")
        return JudgeCallError(f"{self.model}: {fault}")
