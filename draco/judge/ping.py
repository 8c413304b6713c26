"""One cheap call that shows whether a judge works: its key, its model, its JSON."""

from __future__ import annotations

from draco.core.errors import JudgeCallError, JudgeConfigError, JudgeReplyError
from draco.core.types import Criterion
from draco.judge.client import JudgeClient
from draco.judge.endpoints import JudgeEndpoint
from draco.judge.prompts import criteria_block, messages
from draco.judge.records import CallRecord
from draco.judge.replies import check_scores
from draco.judge.requests import JudgeRequest
from draco.judge.transcript import fence

__all__ = ["ping"]

_CRITERION = Criterion(
    "Says hello first", "The agent greets the user in its first turn.", "Pass if step 1 holds a greeting."
)
_TRANSCRIPT = "[system]\nYou are an agent.\n[user]\nGreet me.\n[step 1] action:\nHello!\n[transcript ends]\n"


async def ping(client: JudgeClient, endpoint: JudgeEndpoint | None = None) -> CallRecord:
    """Have one made-up turn scored by one criterion, without the cache; the verdict itself does not matter.

    Args:
        endpoint: another model of it; None: its own and its fallbacks.

    Returns:
        the record of the attempt that succeeded.

    Raises:
        JudgeConfigError: the provider refuses or is not there, or the model does not answer in the JSON asked for.
        TrainingStopped: a cap on spending is reached.
    """
    records: list[CallRecord] = []
    material = [fence(_TRANSCRIPT, "TRANSCRIPT", b"a made-up transcript"), criteria_block([_CRITERION], "Criteria")]
    request = JudgeRequest(
        phase="score",
        messages=messages("score", material, ()),
        check=lambda data: check_scores([_CRITERION], data),
        sink=records.append,
        task_id="preflight",
        cached=False,
        endpoint=endpoint,
    )
    try:
        await client.call(request)
    except JudgeReplyError as error:
        said = str(error).removeprefix("score: ")
        raise JudgeConfigError(
            f"{said}; the judge answers, but not in the JSON asked for: choose a stronger judge.model, or try "
            "judge.response_schema=on"
        ) from None
    except JudgeCallError as error:
        said = str(error).removeprefix("score: ")
        raise JudgeConfigError(f"{said}; is judge.api_base right, and is the judge up?") from None
    return records[-1]
