"""A recipe over real sites: both of its ends, Flower's programs, certificates and keys."""
