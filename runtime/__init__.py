"""The training runtime: data, embedding store, dense models and the executors of every mode.

Importing the package loads nothing heavy; `persia-runtime --help` is the reference.
"""
