"""Rubric stages: one strategy a file."""
