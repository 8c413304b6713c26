"""The judge: five kinds of call from a finished trajectory to verdicts with cited steps (method: DRACO, Section 3).

`transcript` renders a trajectory as text, `prompts` adds the instructions, `client` carries a call through litellm,
`schema` checks the reply, `pipeline` runs the calls of a group, `stage` makes a rubric callback of it.
"""
