"""What a batch costs on a model of a given shape. Numpy only."""
