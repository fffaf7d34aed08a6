"""Training on one rank, with torch and without a cluster."""
