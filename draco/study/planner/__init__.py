"""What a run will need: memory, time, judge calls and money (`scripts/plan.py`)."""
