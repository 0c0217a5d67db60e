"""What a curious server could read out of the messages of a run: `fedlens audit`."""
