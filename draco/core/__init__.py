"""The ground that every room stands on: data objects, errors, files, processes, signals, calls to language models."""
