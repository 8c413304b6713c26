"""Rollouts through vLLM's OpenAI-compatible servers: token ids in, token ids and log-probs out, adapters by name.

    engine.py         the engine: life cycle, batches, where the policy judges
    replicas.py       the servers of an engine and what each of them holds
    sync.py           every server gets the policy's adapter and must prove it
    sampling.py       the requests of one batch, repeated elsewhere when a server is lost
    routing.py        which server a trajectory goes to
    client.py         one server over HTTP
    adapters.py       versions of the adapter on disk
    adapter_check.py  what a server must answer before rollouts use an adapter
    launch.py         servers that belong to the run; watchdog.py ends them with it

vLLM is never imported: it lives in an environment of its own (`scripts/setup_vllm.sh` of the repository).
"""

from draco.rollout.engines.vllm.engine import VllmEngine
from draco.rollout.engines.vllm.launch import Launch

__all__ = ["Launch", "VllmEngine"]
