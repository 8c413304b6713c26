"""Credit: rewards become advantages, first of every trajectory, then of every step.

base             the class that every credit rule derives from: one `Credit` for each judgement
advantage        group advantages (Eq. 1)
redistribution   step credit (Eq. 4–7), and why a trajectory got the credit it has
"""
