"""What is simulated, as plain data and pure functions: cluster, workload, costs, scenario."""
