"""Bytes into memory; knows no model."""
