"""Fetching checkpoints, and where they live."""
