"""Several replicas of a server behind one address.

Ray Serve starts, checks, replaces and scales them. What is here is the rest: which replica a prompt goes to (``affinity.py``),
what becomes of a dead replica's requests (``front.py``), and one set of metrics for all of them (``merged.py``).
"""
