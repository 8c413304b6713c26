"""The judge: from a finished trajectory to verdicts with cited steps, by LLM calls (Section 3.2, Appendix F).

A group, and what a rubric callback needs:
stage.py        `JudgedRubric`: judges a stream of groups while rollouts go on
pipeline.py     the calls of one group: propose, merge, score, attribute
votes.py        several votes on every verdict: ensemble, self-judge
verdicts.py     scores and attributions → verdicts, dropout, rewards (Eq. 3)

A prompt and its reply:
transcript.py   a trajectory as text between delimiters that nobody can guess
prompts.py      the packaged texts (prompts/), and the messages of a call
views/          what each prompt shows: judge.plan=paper or lean
parsing.py      the JSON object in a reply, small errors of syntax mended
replies.py      what each kind of reply must look like

A call:
client.py       `JudgeClient`: one request → one checked reply
requests.py     what a request holds, and a call on its way
routing.py      gets a question answered: retries, fallbacks, a circuit breaker
limits.py       requests and tokens a minute
budget.py       spend caps
bill.py         calls, tokens and cost, and their projection before a run
endpoints.py    the judge's models and where they are
options.py      conf/judge/*.yaml
cache.py        the database of replies and attempts
ping.py         one cheap call before a run
local.py        the policy as its own judge, in this process

What is kept:
records.py      a record of every attempt, counters and rates
agreement.py    κ and AC1
"""
