"""Families, one file each and named like their `model_type`, and the bricks they share."""
