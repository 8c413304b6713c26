"""`appworld`: the AppWorld engine behind draco's environment protocol. scripts/setup_appworld.sh sets it up."""

from draco.env.appworld.environment import AppWorldEnvironment, AppWorldEpisode, AppWorldEvaluator

__all__ = ["AppWorldEnvironment", "AppWorldEpisode", "AppWorldEvaluator"]
