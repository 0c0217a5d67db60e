"""People and their joints: published sets, made-up figures, crops."""
