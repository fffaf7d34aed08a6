"""The report of a run, or of several side by side: one HTML file that needs no network.

    write(open_storage("s3://bucket/runs/demo"))        # report.html in the run's folder
    compare([one, another], "comparison.html")

The report reads nothing but the run's folder, and can be written at any time: while the run trains,
or after it has ended, stopped or failed. What is not known is left out.
"""

from rayapp.report.card import write_card
from rayapp.report.pages import compare, write, write_for

__all__ = ["compare", "write", "write_card", "write_for"]
