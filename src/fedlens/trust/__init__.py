"""What leaves a client: written down, limited by its owner, provable."""
