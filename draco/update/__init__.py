"""From advantages to one optimizer step: packed rows, log-probabilities, the loss and its gradients."""
