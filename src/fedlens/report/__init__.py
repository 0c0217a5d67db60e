"""A run folder as a page, a figure, a board or a computed table."""
