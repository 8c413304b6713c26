"""From tasks to trajectories: the agent loop, token-exact rollouts, and the engines that sample.

loop.py      the agent loop: turns, steps, ends, reminders and budgets, whoever writes the turns
rollout.py   the loop over token ids
engines/     what drives rollouts: in process, on vLLM servers, behind an API
"""
