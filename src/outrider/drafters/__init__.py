"""Drafters: where guesses come from. One folder per source of guesses, and one file per method, named as in ``methods.py``."""
