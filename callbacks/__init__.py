"""Pluggable Lightning callbacks: one strategy a file, named by the YAML files in conf/."""
