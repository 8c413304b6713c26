"""Hydra configuration: one YAML an option, one `_target_` each."""
