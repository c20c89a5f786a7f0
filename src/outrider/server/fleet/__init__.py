"""Several replicas of a server behind one address.

Ray Serve starts, checks, replaces and scales them. This folder does the rest. It routes prompts to replicas (``affinity.py``),
repeats a dead replica's requests (``front.py``), stores responses (``carried.py``), and makes one set of metrics
(``merged.py``).
"""
