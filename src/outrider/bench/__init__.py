"""Measurements people can trust: bench, audit, tune, and the simulator that extends them to other machines."""
