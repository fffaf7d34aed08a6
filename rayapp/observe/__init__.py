"""Record and report a run: its metrics, events, result, status, gauges and trackers."""
