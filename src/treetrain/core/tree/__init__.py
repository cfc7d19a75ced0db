"""The token tree: a batch's rows merged by shared prefix. Numpy only."""
