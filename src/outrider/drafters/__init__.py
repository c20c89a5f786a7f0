"""Drafters: where guesses come from. One file per idea; ``methods.py`` gives them their names."""
