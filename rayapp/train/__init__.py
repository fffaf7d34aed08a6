"""Training on one rank, with torch alone."""
