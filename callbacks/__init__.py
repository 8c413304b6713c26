"""Lightning callbacks that the files in conf/ name; each can be replaced by another class.

rollout.py       stage: samples the rollouts
rubric/          stage: turns groups into rewards
credit/          stage: turns rewards into an advantage for every step
archive.py       writes the tables of every step
checkpoint.py    saves and loads checkpoints
evaluation.py    writes evaluations during training
health.py        speed and memory metrics, and warnings
progress.py      progress in the terminal
"""
