"""The training runtime: data, embedding store, dense models and the executors of every mode.

Importing the package loads nothing heavy; `python -m runtime --help` is the reference.
"""
