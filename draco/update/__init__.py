"""The update: credits become gradients and metrics.

options     options of the loss and of the update
packing     credits become micro-batches of token rows
logprobs    log-probabilities of the step tokens, without full logits
loss        the token loss (Eq. 2)
gradients   forward and backward passes of micro-batches
metrics     the metrics of a step, out of its sums
"""
