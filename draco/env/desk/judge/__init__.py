"""The scripted judge of `desk`: rules instead of a model, behind litellm as the model `draco-scripted/desk`.

It reads the text of the prompt, as a judge model would, and answers with the same JSON. It has no access to the
environment and never sees an outcome. All it knows about `desk` is the public grammar of its texts (TEXTS.md).

    reading    the text of a prompt → kind of call, quoted blocks, criteria; a transcript → calls with step and answer
    events     calls → what was looked up, changed and left unconfirmed
    goals      the sub-goals of a request, and the sub-goal that each change was made for
    findings   one finding for every way to succeed or fail, and what kinds of sub-goal have in common
    subgoals   the rules for every kind of sub-goal: events → findings
    general    findings → one verdict for each general criterion
    replies    findings → the JSON of every kind of call
    handler    the model as litellm calls it
    provider   registration with litellm, and the titles of the general criteria that this judge knows
"""
