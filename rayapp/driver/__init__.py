"""Drive a run of any kind: start workers, watch them, start them again, write down what happens."""
