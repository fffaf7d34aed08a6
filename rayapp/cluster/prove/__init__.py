"""Prove a cluster on an AWS account: up, faults, comparison, down, and a page that tells of it.

account.py   the account: hosts, a spot notice, what is left
trials.py    the steps, in order
__main__.py  `make prove-ecs` and `make prove-eks`: the price, a question, the steps, the page
"""
