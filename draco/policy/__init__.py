"""The policy: base model with LoRA adapter, its chat format, and its form over several GPUs.

policy      loads the model and the adapter, saves the adapter, switches to the reference policy
chat        token-exact chat: prompts, and what a template adds around a sampled turn
structure   the parts of a transformers model: base model, decoder, output head
attention   attention over packed rows
mode        training mode, in which the base model is not random
copies      small random models of the same structure, on which checks are cheap
sharding    FSDP2: the base model spread over ranks
kernels     kernels that some models need on a GPU
tiny/       the policy of the default run; scripts/build_tiny_policy.py builds it
"""
