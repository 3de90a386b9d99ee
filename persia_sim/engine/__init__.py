"""The discrete-event simulation: SimPy processes over a cluster's resources."""
