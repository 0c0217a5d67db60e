"""The core: what moves, what happens at both ends of it, and the loop around that. It imports no
other room.
"""
