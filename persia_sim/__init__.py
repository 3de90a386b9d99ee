"""The cluster as a model: the testbed's words, its trace, and a discrete-event simulator.

Nothing here imports torch, and importing the package loads nothing heavy: name the module you need.
"""
