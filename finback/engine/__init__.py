"""Sequences through a model."""
