"""What every other room builds on.

types.py         the data objects that travel between the stages
errors.py        the exceptions
files.py         files that are complete or absent; JSON lines
table.py         a table for the terminal, Markdown and CSV
signals.py       Ctrl-C, SIGTERM and a scheduler's warning, between steps
background.py    an asyncio event loop on a thread
distributed.py   several processes: their groups, what they exchange, what is summed
watch.py         one failed process ends all of them
llm/             calls to language models
"""
