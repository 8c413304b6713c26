"""Generation engines. Each drives rollouts until they end; none knows about environments.

base.py          the interface
transformers.py  in the trainer's process
ragged.py        its forward pass over rows of different lengths
cache.py         its key/value cache where rows must have equal lengths
driver.py        episodes on the background loop, for the engines below
vllm/            vLLM servers, by token ids
api.py           any model that litellm reaches, by chat completions
"""

from draco.rollout.engines.base import Engine

__all__ = ["Engine"]
