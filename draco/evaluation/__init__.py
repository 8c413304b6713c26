"""Evaluation: records of evaluated rollouts and the metrics made from them."""
