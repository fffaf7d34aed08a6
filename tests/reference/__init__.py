"""A trainer of one page that shares no code with rayapp, and what compares the two."""
