"""Labelled images: find and index them once; read, decode and augment in the run's order."""
