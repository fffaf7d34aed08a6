"""Prepare training rows once (read, tokenise, pack), and stream them from any step."""

FOLDER = ".prepared"  # folder of prepared data, beside the runs
