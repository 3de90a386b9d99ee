"""The words that runtime, replay and simulator share.

All of persia_sim that the runtime may import.
"""
