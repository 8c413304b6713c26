"""What a run will need, before it starts: memory, time, judge calls and money.

plan.py        the whole plan of a configuration
layout.py      how GPUs are divided between trainer and servers: memory, speed, settings, advice
hardware.py    GPUs by name, and the assumptions
model.py       sizes of a policy, counted without its weights
memory.py      bytes of one GPU during the update
judge.py       judge calls, their tokens and the bill
shapes/        configurations of known models, for want of their folders
"""
