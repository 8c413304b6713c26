"""Rollouts through vLLM's OpenAI-compatible servers: token ids in, token ids and log-probs out, adapters by name.

    engine.py    the engine: keeps servers on the policy's weights and drives episodes
    client.py    one server over HTTP
    routing.py   which server a trajectory goes to
    adapters.py  versions of the adapter on disk
    probe.py     what a server must answer before rollouts use it
    launch.py    servers that belong to the run; guard.py ends them with it

vLLM is never imported: it lives in an environment of its own (`scripts/setup_vllm.sh`).
"""

from draco.rollout.engines.vllm.engine import VllmEngine
from draco.rollout.engines.vllm.launch import Launch

__all__ = ["Launch", "VllmEngine"]
