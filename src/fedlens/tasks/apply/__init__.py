"""What `fedlens apply` does with a trained model: a file for each task that can be applied."""
