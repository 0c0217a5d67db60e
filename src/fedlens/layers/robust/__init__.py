"""Layers that merge replies of which some may be wrong or hostile."""
