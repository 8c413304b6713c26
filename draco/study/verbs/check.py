"""`draco check`: does a model train exactly as it will be served?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from draco.config.arguments import Command, option, passed_on
from draco.core.errors import DracoError

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from draco.run.conformance import Verdict

__all__ = ["COMMAND", "main"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is printed."""

    json: bool = option(False, "print one JSON object in place of the table")
    config: tuple[str, ...] = passed_on("options of draco train: the model, as policy=… policy.KEY=…")


COMMAND = Command(
    "draco check",
    "check a model before it trains: packed, unpacked or refused, and why",
    Options,
    """
    The model is loaded as a run would load it. Its packed rows, its engine's rollouts and its gradients are
    compared with plain transformers and PEFT, on the model itself and, at lengths on both sides of every window
    and rope switch, on a small copy with random weights. The chat template is compared with its own rendering. A
    run makes the same check at the first load of a model. Nothing is trained. Exit status 0: packed (several
    trajectories share a row) or unpacked (one trajectory a row); 2: refused.
    """,
    (
        "draco check policy=smollm2",
        "draco check policy=hf policy.path=Qwen/Qwen2.5-0.5B-Instruct policy.dtype=float32",
        "draco check policy=hf policy.path=FOLDER policy.chat_template=FILE json=true",
    ),
)


def main(arguments: list[str]) -> int:
    """Print the table; 0 the model can train, 2 it is refused."""
    given = COMMAND.parse(arguments)
    from draco.config.compose import compose_config
    from draco.run.launch import place

    with COMMAND.beside_the_configuration():
        config = compose_config([*given.config, "run=check"])
    place(config)
    verdict = _verdict(config)
    if given.json:
        print(json.dumps(verdict.to_json(), indent=1))
    else:
        from rich.console import Console

        Console().print(verdict.table(f"policy.path={config.policy.path}"))
    return 2 if verdict.kind == "refused" else 0


def _verdict(config: DictConfig) -> Verdict:
    """Of the model that a configuration names; one that cannot be loaded is refused."""
    from draco.run.build import build
    from draco.run.conformance import Verdict, conform
    from draco.run.conformance.verdict import Finding
    from draco.run.launch import sharded

    parts = build(config, sharded=sharded(config))
    try:
        parts.module.configure_model()
    except DracoError as error:
        return Verdict("refused", str(error), False, (Finding("load", False, str(error)),))
    module = parts.module
    return conform(
        module.policy,
        packed=module.update_options.packing == "auto" and (module.packed or sharded(config)),
        engine=parts.engine.in_process,
        temperature=config.temperature,
        longest=config.limits.max_prompt_tokens + config.limits.max_response_tokens,
        fresh=True,
    )
