"""Credit strategies: one advantage a trajectory → one advantage a step."""
