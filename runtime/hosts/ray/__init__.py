"""Runs on a Ray cluster: who is placed where, and who starts again what dies."""

import os

for _name, _value in {
    "RAY_DEDUP_LOGS": "0",  # a line of each rank, not one for all
    "RAY_USAGE_STATS_ENABLED": "0",
}.items():
    os.environ.setdefault(_name, _value)  # Ray reads them when it is imported
