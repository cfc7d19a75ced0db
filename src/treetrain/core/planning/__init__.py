"""Cost of a batch on a model, plans that fit a budget, and balance over ranks. Numpy only."""
