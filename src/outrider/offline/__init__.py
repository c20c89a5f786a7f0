"""Texts for many prompts at once, spread over processes or machines, in a job that goes on where it was killed."""
