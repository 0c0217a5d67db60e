"""Labelled images: folders, archives, made-up shapes."""
