"""Texts for many prompts, spread over processes or machines, in a job that can be resumed after it was killed."""
