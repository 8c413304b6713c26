"""`appworld`: the AppWorld engine as an environment of draco. scripts/setup_appworld.sh of the repository sets it
up.

environment  environment, episode and evaluator
prompt       what the agent is told, and how long outputs are cut
data         task lists and specifications
pool         places for live episodes, and the servers that hold them
client       starts one fork server and speaks JSON lines to it
faults       everything that can go wrong and is not the agent's doing
inside/      the programs on the other side: fork server, sandbox, data roots
"""

from draco.env.appworld.environment import AppWorldEnvironment, AppWorldEpisode, AppWorldEvaluator

__all__ = ["AppWorldEnvironment", "AppWorldEpisode", "AppWorldEvaluator"]
