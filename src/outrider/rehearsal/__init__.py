"""Costs of rounds on this machine, measured before the first requests are served."""
