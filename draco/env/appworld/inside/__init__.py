"""Programs that run inside AppWorld's own environment, by path. They import nothing of draco."""
