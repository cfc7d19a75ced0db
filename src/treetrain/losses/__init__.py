"""Pure functions of log-probabilities and trajectory facts; they know nothing of trees."""
