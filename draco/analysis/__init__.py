"""What is computed from run folders after the fact: figures' numbers, replays of credits and judges, agreement."""
