"""Ids and words; the engine never sees text."""
