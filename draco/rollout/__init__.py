"""From tasks to trajectories: one episode as a state machine over tokens, and the engines that sample."""
