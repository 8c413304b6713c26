"""The policy: base model and LoRA adapter, chat format, sharding, and exact fast passes."""
