"""The model side of the trainer and the run itself: configuration, layers, data, training loop, metrics."""
