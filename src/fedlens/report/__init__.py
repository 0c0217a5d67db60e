"""A run folder as a page, a figure, or a board."""
