"""One training run, from a configuration to its results.

train.py         the order of a run: check, build, evaluate, train, evaluate, report
build.py         what a configuration builds; the life cycle of the stages
launch.py        processes and strategy, from the configuration and the launcher
preflight.py     preflight=true: everything is tried once
disk.py          the disk space that a run needs
loader.py        batches of tasks
evaluation.py    success on held-out tasks
folder.py        the run folder: lock, config.yaml, overwriting, resume
checkpoint.py    checkpoints
archive.py       tables of every training step
numbers.py       counts of an archived step
samples.py       rollouts and criteria for the tables of a logger
loggers.py       metrics.csv and Weights & Biases
summary.py       summary.json and the closing table
sweep.py         the table at the end of a sweep
healthcheck.py   the health check of the container
"""
