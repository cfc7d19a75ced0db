"""Reports on the rows of a file: what they share, and why they do not share more. Numpy only."""
