"""Credit stages: from one advantage per trajectory to one per step.

step.py      by the steps that verdicts cite (DRACO)
uniform.py   the same for every step (GRPO)
"""
