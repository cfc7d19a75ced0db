"""What runs wrote down, as figures on one HTML page."""
