"""Published throughput, and how the simulator compares with it."""
