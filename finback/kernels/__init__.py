"""Arithmetic. `ops` says what there is, `reference` is the oracle, `cpu` the native library."""
