"""An honest rule-based judge for the embedded environment `desk`, behind litellm as the model `draco-scripted/desk`.

It reads what a judge model would read, the prompt's text, and answers the five calls in the same JSON. It has no
access to the environment and never sees an outcome. What it knows about `desk` is the public grammar of its texts.

    reading    a prompt's text → phase, quoted blocks, criteria; a transcript → calls with their step and answer
    ledger     calls → what was looked up, what was changed, what is still held
    goals      the request's sub-goals, and which change was made for which
    findings   the sub-goals against the ledger → one finding for every way to succeed or fail
    general    the findings summed up to a general criterion: one verdict for the whole rollout
    replies    findings → the JSON of the five calls
    provider   registration with litellm
"""
