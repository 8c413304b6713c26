"""One run: its folder, archive, checkpoints, data, logs, preflight, and the order of it all."""
