"""Programs that run inside AppWorld's own environment, by path. They import nothing of draco.

server      the fork server: one warm process, a child for every episode
episode     what runs in a child: an episode or an evaluation
sandbox     what the kernel lets such a child do
code_check  what an agent's code may not say
state       the end state of an episode as a text
protocol    JSON lines between trainer, server and children
data_roots  makes the two data roots, with and without answers, out of one AppWorld root
"""
