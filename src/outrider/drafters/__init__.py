"""Drafters: where guesses come from. A room per source, and one file per method, named as in ``methods.py``."""
