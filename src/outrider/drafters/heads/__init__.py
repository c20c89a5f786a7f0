"""Guesses from small trained heads that read the target's hidden states."""
