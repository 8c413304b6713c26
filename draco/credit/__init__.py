"""From rewards to advantages: of the group (Eq. 1), then of every step (Eq. 4 to 7)."""
