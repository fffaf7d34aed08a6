"""Drive a run of any kind: start its workers, watch and restart them, and record what happens."""
