"""A recipe over real sites: Flower's programs, certificates, and both ends of a study."""
