"""The core: what moves, what happens at both ends of it, and the loop around that. Imports torch
and numpy, and no other room.
"""
