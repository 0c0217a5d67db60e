"""A job, and the run folder it writes; reading, comparing and resuming run folders."""
