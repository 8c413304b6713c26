"""Bytes of one GPU during the update: counted where possible, else modelled.

With gradient checkpointing, activations are the inputs of all layers plus what one layer keeps for its backward pass,
in bytes a token (s: bytes of a number; h, f: widths; Q, K: widths of all query and key heads; r: LoRA rank)::

    norms        2 × (h·s + 4h where s = 2: transformers normalises in float32, 4 h·s / 2 in float32) + 8
    attention    (3 Q + 2 K) s + 4 heads        q, k, v, the kernel's output, the same in its packed order, log-sum-exp
    MLP          4 f·s                          gate, SiLU(gate), up, product
    LoRA         lows · r · s                   x Aᵀ of every adapted matrix
    backward     2 f·s + h·s                    gradients alive at the widest point (the MLP product)

With a 16-bit base and a float32 adapter (one device, ddp) the adapter computes in float32: every adapted matrix keeps a
float32 copy of its input, 4 Σ in + 4 lows · r, in place of the outputs of the norms, the attention and the MLP
(2 h·s + Q·s + f·s), and the widest point holds 4 f more. FSDP2 computes both in 16 bits.

A linear-attention layer (Gated DeltaNet, fused kernels) keeps q, k, v before and after the convolution, gates and
output instead of the attention line: (4 K_lin + 5 V_lin) s. That line is an estimate. Tests compare the others with the
bytes of tracked tensors.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from draco.study.planner.model import ModelSize

__all__ = ["UpdateMemory", "layer_activation_bytes", "update_memory"]

#: `draco.update.logprobs.step_logprobs`
_TOKEN_CHUNK, _VOCAB_CHUNK = 1024, 4096


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes on one GPU while it updates."""

    weights: int  #: base model, or this rank's shard
    gathered: int  #: layers and head that a sharded run gathers for a moment
    adapter: int
    gradients: int
    optimizer: int
    layer_inputs: int  #: checkpointed
    layer: int  #: of the layer under recomputation
    logits: int  #: head: chunks of logits, hidden states of step tokens and their gradient

    @property
    def total(self) -> int:
        """Peak: the head and a layer's backward pass never run at the same time."""
        fixed = self.weights + self.gathered + self.adapter + self.gradients + self.optimizer + self.layer_inputs
        return fixed + max(self.layer, self.logits)

    def as_dict(self) -> dict[str, int]:
        return {**asdict(self), "total": self.total}


def layer_activation_bytes(size: ModelSize, itemsize: int, *, mixed: bool = False) -> tuple[int, int]:
    """Bytes a token that one layer keeps for its backward pass, and bytes a token of gradients at its widest point.

    Args:
        size: of the policy.
        itemsize: bytes of a base weight.
        mixed: the adapter computes in float32, the base in 16 bits.
    """
    h, f, s = size.hidden, size.ffn, itemsize
    norms = 2 * (h * s + (4 * h if s < 4 else h * s)) + 8
    attention = (3 * size.query + 2 * size.key_value) * s + 4 * size.heads + (2 * size.query * s if size.gated else 0)
    linear = (4 * size.linear_key + 5 * size.linear_value) * s if size.linear_heads else 0
    lows = size.lora_per_layer * size.rank
    lora = 4 * (lows + size.lora_inputs) if mixed else lows * s
    instead = (2 * h + size.query + f) * s if mixed else 0
    return norms + max(attention, linear) + 4 * f * s + lora - instead, 2 * f * s + h * s + (4 * f if mixed else 0)


def update_memory(
    size: ModelSize, *, tokens: int, step_tokens: int, shards: int = 1, itemsize: int = 2, checkpointing: bool = True
) -> UpdateMemory:
    """Memory of one micro-batch.

    Args:
        size: of the policy.
        tokens: of the micro-batch (`update.micro_batch_tokens`, or the longest trajectory if that is longer).
        step_tokens: those of them that train.
        shards: ranks that the model is cut over; 1 = whole on every GPU.
        itemsize: bytes of a base weight.
        checkpointing: a layer keeps nothing but its input.
    """
    kept, gradients = layer_activation_bytes(size, itemsize, mixed=itemsize < 4 and shards == 1)
    gathered = 0
    if shards > 1:  # a layer, the next one on its way, and embedding + head around the whole pass
        gathered = (2 * size.largest_layer + size.outside) * itemsize
    lora = -(-size.lora_parameters // shards)
    h, s = size.hidden, itemsize
    buffers = 2 * min(step_tokens, _TOKEN_CHUNK) * min(size.vocabulary, _VOCAB_CHUNK) * 4
    return UpdateMemory(
        weights=-(-size.parameters // shards) * itemsize,
        gathered=gathered,
        adapter=4 * lora,
        gradients=4 * lora,
        optimizer=8 * lora,
        layer_inputs=tokens * size.layers * (h * s if checkpointing else kept),
        layer=tokens * ((kept if checkpointing else 0) + gradients),
        logits=buffers + step_tokens * h * (4 + 2 * s) + 2 * tokens * h * s,
    )
