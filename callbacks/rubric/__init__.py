"""Rubric stages: from groups to rewards.

dynamic.py      criteria written for every task from its rollouts (DRACO)
static.py       one fixed set of criteria
self_judge.py   dynamic, with the policy as the judge
outcome.py      the environment's success
random.py       a coin toss
"""
