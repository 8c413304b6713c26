"""What is made from finished runs, and what is found out around a run: reports, replays, evaluations, plans.

runs            a run folder or a folder of evaluation files, opened
settings        settings in their order, and the evaluations that stand for each
statistics      means, spreads and paired differences
tables          tables T2–T9
curves          the numbers of figures F2–F12
figures         drawing of figures
page            report.html with the credit viewer (assets/)
pieces          texts of single tokens, for the viewer
judgements      groups and credits of an archived step, read back
replay          rewards and credits of an archived step, recomputed
judge_replay    archived judge calls, sent to another judge
matching        which criteria of two sets are the same
audit           a sheet of verdicts for a person to rate
outside         finished trajectories of other agents
base_rollouts   groups of the untrained policy, or of an archive
authoring       a static set of criteria from base rollouts
redteam         attacks on a judge
planner         memory, time, judge calls and money of a run before it starts
evaluate        checkpoints of a run on held-out tasks; evaluate_api: a model behind an API
episodes        the episodes of an evaluation, on the disk as they end
tau             τ-bench by its own program; tau_judge: the judge inside it
serving         checkpoints behind a server of vLLM, each proven
verbs           the commands of `draco`
"""
