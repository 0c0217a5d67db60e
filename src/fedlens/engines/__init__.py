"""Engines carry messages between server and clients, nothing else."""
