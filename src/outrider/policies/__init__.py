"""Policies: how much to draft next. One file per idea."""
